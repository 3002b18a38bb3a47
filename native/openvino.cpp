// The OpenVINO extension: operators of the domain `attendless`, for ONNX files and OpenVINO IR. It is compiled on the
// user's machine against the installed OpenVINO. It is linked with the kernels into one library, which depends on
// nothing else of attendless.
#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>

#include <thread>

#include <openvino/core/extension.hpp>
#include <openvino/core/op_extension.hpp>
#include <openvino/frontend/onnx/extension/conversion.hpp>

#include "openvino.hpp"
#include "operators.hpp"
#include "parallel.hpp"

namespace attendless {

// OpenVINO runs inference in a TBB arena with the configured number of threads. `body` takes pieces of work from a
// shared counter, so a thread may start late or not at all.
void run_parallel(int threads, void (*body)(void*, int), void* context) {
  if (threads <= 1) return body(context, 0);
  tbb::parallel_for(0, threads, [&](int rank) { body(context, rank); }, tbb::simple_partitioner());
}

const char* why_own_threads() { return ""; }
void give_way() { std::this_thread::yield(); }

namespace openvino {

int threads() { return tbb::this_task_arena::max_concurrency(); }

// Reads the attributes of an ONNX node.
class FromOnnx : public ov::AttributeVisitor {
 public:
  explicit FromOnnx(const ov::frontend::NodeContext& node) : node_(node) {}
  using ov::AttributeVisitor::on_adapter;

  void on_adapter(const std::string& name, ov::ValueAccessor<void>&) override {
    fail("attribute '", name, "' is of a type that was not expected");
  }
  void on_adapter(const std::string& name, ov::ValueAccessor<std::string>& to) override { set(name, to); }
  void on_adapter(const std::string& name, ov::ValueAccessor<int64_t>& to) override { set(name, to); }
  void on_adapter(const std::string& name, ov::ValueAccessor<double>& to) override {
    to.set(node_.get_attribute<float>(name, float(to.get())));
  }
  void on_adapter(const std::string& name, ov::ValueAccessor<std::vector<int64_t>>& to) override { set(name, to); }

 private:
  template <class T>
  void set(const std::string& name, ov::ValueAccessor<T>& to) {
    to.set(node_.get_attribute<T>(name, to.get()));
  }
  const ov::frontend::NodeContext& node_;
};

template <class Kernel>
void add(std::vector<ov::Extension::Ptr>& extensions) {
  const auto operation = std::make_shared<ov::OpExtension<Operator<Kernel>>>();
  extensions.push_back(operation);
  extensions.push_back(std::make_shared<ov::frontend::onnx::ConversionExtension>(
      Kernel::kName, "attendless", [operation](const ov::frontend::NodeContext& node) {
        ov::OutputVector inputs;
        for (size_t i = 0; i < node.get_input_size(); ++i) inputs.push_back(node.get_input(int(i)));
        FromOnnx attributes(node);
        return operation->create(inputs, attributes);
      }));
}

}  // namespace openvino
}  // namespace attendless

namespace {

template <class... Arguments>
void add_all(std::vector<ov::Extension::Ptr>& extensions, attendless::List<Arguments...>) {
  (attendless::openvino::add<attendless::operators::Node<Arguments>>(extensions), ...);
}

}  // namespace

OPENVINO_EXTENSION_C_API void create_extensions(std::vector<ov::Extension::Ptr>& extensions) {
  add_all(extensions, attendless::Nodes());
}
