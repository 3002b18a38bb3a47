// Custom operators for ONNX Runtime 1.17 or newer, in the domain `attendless`. The library contains the kernels and
// depends on nothing else of attendless.
#include "onnxruntime.hpp"

#include <algorithm>
#include <memory>
#include <thread>

#include "operators.hpp"
#include "parallel.hpp"

namespace attendless {
namespace onnxruntime {
namespace {

// The context of the evaluation on this thread. KernelContext_ParallelFor needs it to use the threads of the session.
thread_local const Api* current_api = nullptr;
thread_local KernelContext* current_context = nullptr;

struct Body {
  void (*run)(void*, int);
  void* context;
};

// An error status from ONNX Runtime, which the operator returns unchanged.
struct Refused {
  Status* status;
};

void check(Status* status) {
  if (status) throw Refused{status};
}

// ONNX Runtime does not report the number of threads of a session. It divides this many calls of `body` among its
// threads; calls that start after the work is done return at once.
int most_threads() { return std::clamp(int(std::thread::hardware_concurrency()), 1, 64); }

}  // namespace
}  // namespace onnxruntime

void run_parallel(int threads, void (*body)(void*, int), void* context) {
  using namespace onnxruntime;
  if (threads <= 1) return body(context, 0);
  Body all{body, context};
  const auto run = [](void* given, size_t rank) {
    const Body& body = *static_cast<Body*>(given);
    body.run(body.context, int(rank));
  };
  check(current_api->KernelContext_ParallelFor(current_context, run, size_t(threads), size_t(threads), &all));
}

const char* why_own_threads() { return ""; }
void give_way() { std::this_thread::yield(); }

namespace onnxruntime {
namespace {

using operators::Tensor;

// Reads the attributes of a node. A missing attribute keeps its default. An attribute of another type raises.
class Attributes {
 public:
  Attributes(const Api& api, const KernelInfo* info) : api_(api), info_(info) {}

  void on_attribute(const char* name, float& value) { there(name, "a FLOAT", get(name, value)); }
  void on_attribute(const char* name, int64_t& value) { there(name, "an INT", get(name, value)); }

  void on_attribute(const char* name, std::vector<int64_t>& value) {
    size_t size = 0;
    if (!there(name, "INTS", api_.KernelInfoGetAttributeArray_int64(info_, name, nullptr, &size))) return;
    value.resize(size);
    check(api_.KernelInfoGetAttributeArray_int64(info_, name, value.data(), &size));
  }

  void on_attribute(const char* name, std::string& value) {
    size_t size = 0;  // includes the terminating zero
    if (!there(name, "a STRING", api_.KernelInfoGetAttribute_string(info_, name, nullptr, &size))) return;
    value.resize(size);
    check(api_.KernelInfoGetAttribute_string(info_, name, value.data(), &size));
    value.resize(size - 1);
  }

 private:
  Status* get(const char* name, float& value) { return api_.KernelInfoGetAttribute_float(info_, name, &value); }
  Status* get(const char* name, int64_t& value) { return api_.KernelInfoGetAttribute_int64(info_, name, &value); }

  // ONNX Runtime reports the same error for a missing attribute and for one of another type. To tell them apart, this
  // tries to read the attribute as each other type.
  bool there(const char* name, const char* wanted, Status* status) {
    if (!status) return true;
    api_.ReleaseStatus(status);
    float number = 0;
    int64_t integer = 0;
    size_t size = 0;
    const bool exists = good(get(name, number)) || good(get(name, integer)) ||
                        good(api_.KernelInfoGetAttribute_string(info_, name, nullptr, &size)) ||
                        good(api_.KernelInfoGetAttributeArray_float(info_, name, nullptr, &size)) ||
                        good(api_.KernelInfoGetAttributeArray_int64(info_, name, nullptr, &size));
    require(!exists, "the attribute '", name, "' must be ", wanted);
    return false;
  }
  bool good(Status* status) {
    if (status) api_.ReleaseStatus(status);
    return !status;
  }

  const Api& api_;
  const KernelInfo* info_;
};

Tensor as_tensor(const Api& api, const Value* value) {
  require(value != nullptr, "an input that `given` names is not there");
  TensorInfo* info = nullptr;
  check(api.GetTensorTypeAndShape(value, &info));
  const auto release = [&](TensorInfo* one) { api.ReleaseTensorTypeAndShapeInfo(one); };
  const std::unique_ptr<TensorInfo, decltype(release)> held(info, release);
  ElementType type = kUndefined;
  size_t rank = 0;
  check(api.GetTensorElementType(info, &type));
  check(api.GetDimensionsCount(info, &rank));
  std::vector<int64_t> sizes(rank);
  check(api.GetDimensions(info, sizes.data(), rank));
  const Element element = type == kFloat      ? Element::f32
                          : type == kBfloat16 ? Element::bf16
                          : type == kInt32    ? Element::i32
                          : type == kInt64    ? Element::i64
                                              : Element::other;
  Tensor found{element, {sizes.begin(), sizes.end()}, {}, nullptr};
  if (element != Element::other) check(api.GetTensorMutableData(const_cast<Value*>(value), &found.data));
  return found;
}

// The kernel of one node of a model: its attributes, and the conversion of its inputs and outputs.
template <class Operator>
class Kernel {
 public:
  Kernel(const Api& api, const KernelInfo* info) : api_(api) {
    Attributes attributes(api, info);
    operator_.visit(attributes);
    size_t inputs = 0;
    check(api.KernelInfo_GetInputCount(info, &inputs));
    operator_.check(inputs);
  }

  void run(KernelContext* context) const {
    current_api = &api_;
    current_context = context;
    std::vector<Tensor> given;
    size_t inputs = 0;
    check(api_.KernelContext_GetInputCount(context, &inputs));
    for (size_t i = 0; i < inputs; ++i) {
      const Value* value = nullptr;
      check(api_.KernelContext_GetInput(context, i, &value));
      given.push_back(as_tensor(api_, value));
    }
    const auto place = [&](size_t number, const std::vector<size_t>& shape) {
      const std::vector<int64_t> sizes(shape.begin(), shape.end());
      Value* value = nullptr;
      check(api_.KernelContext_GetOutput(context, number, sizes.data(), sizes.size(), &value));
      return as_tensor(api_, value);
    };
    operators::Call call(operator_, std::move(given), place, most_threads());
    operator_.run(call);
  }

  // Runs `body` and converts exceptions to a status.
  template <class Run>
  static Status* told(const Api& api, const Run& body) {
    const auto status = [&](Code code, const char* text) {
      const std::string named = std::string("attendless.") + Operator::kName + ": " + text;
      return api.CreateStatus(code, named.c_str());
    };
    try {
      body();
      return nullptr;
    } catch (const Refused& refused) {
      return refused.status;
    } catch (const std::invalid_argument& error) {
      return status(kInvalidArgument, error.what());
    } catch (const std::exception& error) {
      return status(kFail, error.what());
    }
  }

  const Api& api_;

 private:
  Operator operator_;
};

template <class Operator>
const CustomOp* described() {
  using Node = Kernel<Operator>;
  static const CustomOp op = [] {
    CustomOp op{};
    op.version = kVersion;
    op.GetName = [](const CustomOp*) { return Operator::kName; };
    op.GetExecutionProviderType = [](const CustomOp*) -> const char* { return nullptr; };
    op.GetInputType = [](const CustomOp*, size_t) { return kUndefined; };  // any
    op.GetInputTypeCount = [](const CustomOp*) { return size_t(1); };      // one variadic input
    op.GetInputCharacteristic = [](const CustomOp*, size_t) { return kVariadic; };
    op.GetVariadicInputMinArity = [](const CustomOp*) { return 1; };
    op.GetVariadicInputHomogeneity = [](const CustomOp*) { return 0; };
    op.GetInputMemoryType = [](const CustomOp*, size_t) { return 0; };
    // Floating results are f32, also for bf16 inputs, because the CPU operators of ONNX Runtime compute in f32 only.
    op.GetOutputType = [](const CustomOp*, size_t number) {
      return Operator::kResults[number] == Element::f32 ? kFloat : kInt64;
    };
    op.GetOutputTypeCount = [](const CustomOp*) { return Operator::kResults.size(); };
    op.GetOutputCharacteristic = [](const CustomOp*, size_t) { return kRequired; };
    op.GetVariadicOutputMinArity = [](const CustomOp*) { return 0; };
    op.GetVariadicOutputHomogeneity = [](const CustomOp*) { return 0; };
    op.GetStartVersion = [](const CustomOp*) { return 1; };
    op.GetEndVersion = [](const CustomOp*) { return 1; };
    op.CreateKernelV2 = [](const CustomOp*, const Api* api, const KernelInfo* info, void** kernel) {
      return Node::told(*api, [&] { *kernel = new Node(*api, info); });
    };
    op.KernelComputeV2 = [](void* kernel, KernelContext* context) {
      const Node& node = *static_cast<Node*>(kernel);
      return Node::told(node.api_, [&] { node.run(context); });
    };
    op.KernelDestroy = [](void* kernel) { delete static_cast<Node*>(kernel); };
    return op;
  }();
  return &op;
}

template <class... Arguments>
Status* add_all(const Api& api, SessionOptions* options, List<Arguments...>) {
  Domain* domain = nullptr;  // never released: it must outlive every session that uses it
  if (Status* const wrong = api.CreateCustomOpDomain("attendless", &domain)) return wrong;
  for (const CustomOp* const op : {described<operators::Node<Arguments>>()...}) {
    if (Status* const wrong = api.CustomOpDomain_Add(domain, op)) return wrong;
  }
  return api.AddCustomOpDomain(options, domain);
}

}  // namespace
}  // namespace onnxruntime
}  // namespace attendless

// ONNX Runtime calls this function when the library is registered with session options.
extern "C" __attribute__((visibility("default"))) attendless::onnxruntime::Status* RegisterCustomOps(
    attendless::onnxruntime::SessionOptions* options, const attendless::onnxruntime::ApiBase* base) {
  using namespace attendless::onnxruntime;
  if (const Api* const api = base->GetApi(kVersion)) return add_all(*api, options, attendless::Nodes());
  const Api* const old = base->GetApi(1);  // CreateStatus is the first function of every version
  return old->CreateStatus(kFail, "attendless's operators need ONNX Runtime 1.17 or newer");
}
