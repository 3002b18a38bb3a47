// The kernels as an OpenVINO extension: operators of the domain `attendless`, read from ONNX files and from OpenVINO's
// own. Compiled where it is used, against the OpenVINO found there, and linked with the kernels into one library that
// needs nothing else of attendless's.
#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>

#include <thread>

#include <openvino/core/extension.hpp>
#include <openvino/core/op_extension.hpp>
#include <openvino/frontend/onnx/extension/conversion.hpp>

#include "calls.hpp"
#include "geometry.hpp"
#include "memory.hpp"
#include "openvino.hpp"
#include "parallel.hpp"

namespace attendless {

// OpenVINO infers inside an arena of TBB's with as many threads as it was told to use. Whoever runs first does all there
// is to do, so it does not matter if others come late or never.
void run_parallel(int threads, void (*body)(void*, int), void* context) {
  if (threads <= 1) return body(context, 0);
  tbb::parallel_for(0, threads, [&](int rank) { body(context, rank); }, tbb::simple_partitioner());
}

const char* why_own_threads() { return ""; }
void give_way() { std::this_thread::yield(); }

namespace openvino {

int threads() { return tbb::this_task_arena::max_concurrency(); }

// The kernels tell each query's log Σ exp, which nobody here asks for.
class Unread {
 public:
  explicit Unread(const Heads& q)
      : shape_{q.shape(0), q.shape(1), q.shape(2)},
        memory_(std::max<int64_t>(1, int64_t(size_of(shape_[0] * shape_[1], "heads")) * size_of(shape_[2], "tokens"))) {}
  Lse lse() const { return Lse(memory_.data(), shape_); }

 private:
  Lse::Shape shape_;
  Memory memory_;
};

template <size_t count>
std::array<int64_t, count> numbers(const std::vector<int64_t>& given, const char* name) {
  require(given.size() == count, name, " must be ", count, " numbers, not ", given.size());
  std::array<int64_t, count> found;
  std::copy(given.begin(), given.end(), found.begin());
  return found;
}

struct Attention : Inputs {
  float scale = 1.f;

  void visit(ov::AttributeVisitor& visitor) {
    Inputs::visit(visitor);
    visitor.on_attribute("scale", scale);
  }
  std::vector<Result> results(const Shapes& shapes) const { return shapes.attended(); }
};

struct FovealAttention : Attention {
  static constexpr const char* kName = "FovealAttention";
  inline static const std::vector<std::string> kInputs = {"q", "k", "v", "qkv", "key_bias", "places"};
  std::vector<int64_t> layout;

  void visit(ov::AttributeVisitor& visitor) {
    Attention::visit(visitor);
    visitor.on_attribute("layout", layout);
  }

  std::vector<Result> results(const Shapes& shapes) const {
    const Layout checked(numbers<8>(layout, "layout"));
    return shapes.attended();
  }

  void run(Call& call) const {
    const Heads q = call.heads("q"), k = call.heads("k"), v = call.heads("v");
    foveal_attend(q, k, v, call.maybe<Bias>("key_bias"), call.maybe<Places>("places"), numbers<8>(layout, "layout"),
                  scale, threads(), std::nullopt, true, call.attended(q, v), Unread(q).lse());
  }
};

struct SparsifinerAttention : Attention {
  static constexpr const char* kName = "SparsifinerAttention";
  inline static const std::vector<std::string> kInputs = {
      "q", "k", "v", "qkv", "coefficients", "basis", "tail_scores", "tail_values", "share", "key_bias"};
  int64_t budget = 0, prefix = 0, top = 0;
  float tau = 0.f;

  void visit(ov::AttributeVisitor& visitor) {
    Attention::visit(visitor);
    visitor.on_attribute("budget", budget);
    visitor.on_attribute("prefix", prefix);
    visitor.on_attribute("tau", tau);
    visitor.on_attribute("top", top);
  }

  void run(Call& call) const {
    const Heads q = call.heads("q"), k = call.heads("k"), v = call.heads("v");
    sparsifiner(q, k, v, call.maybe<Bias>("key_bias"), call.get<Heads>("coefficients"), call.get<Bias>("basis"),
                call.maybe<Heads>("tail_scores"), call.maybe<Heads>("tail_values"), call.maybe<Bias>("share"), budget,
                prefix, tau, top, scale, threads(), call.attended(q, v), Unread(q).lse());
  }
};

struct BlockAttention : Attention {
  static constexpr const char* kName = "BlockAttention";
  inline static const std::vector<std::string> kInputs = {"q",       "k",         "v",    "qkv",     "query_start",
                                                          "queries", "key_start", "keys", "key_bias"};

  void run(Call& call) const {
    const Heads q = call.heads("q"), k = call.heads("k"), v = call.heads("v");
    block_attend(q, k, v, call.maybe<Bias>("key_bias"), call.get<Indices>("query_start"), call.get<Indices>("queries"),
                 call.get<Indices>("key_start"), call.get<Indices>("keys"), scale, threads(), call.attended(q, v),
                 Unread(q).lse());
  }
};

struct GatherAttention : Attention {
  static constexpr const char* kName = "GatherAttention";
  inline static const std::vector<std::string> kInputs = {"q", "k", "v", "qkv", "indices", "counts", "key_bias"};

  void run(Call& call) const {
    const Heads q = call.heads("q"), k = call.heads("k"), v = call.heads("v");
    gather_attend(q, k, v, call.maybe<Bias>("key_bias"), call.get<Chosen>("indices"), call.maybe<Counts>("counts"),
                  scale, threads(), call.attended(q, v), Unread(q).lse());
  }
};

// Its keys are [B, H, N, D] or, of one head, [B, N, D]; or those of qkv.
struct MergeTokens : Inputs {
  static constexpr const char* kName = "MergeTokens";
  inline static const std::vector<std::string> kInputs = {"x",          "keys",  "qkv",   "importance",
                                                          "sizes",      "cells", "owners"};
  std::vector<int64_t> plan;
  float protect = 0.f;

  void visit(ov::AttributeVisitor& visitor) {
    Inputs::visit(visitor);
    visitor.on_attribute("plan", plan);
    visitor.on_attribute("protect", protect);
  }

  struct Left {
    int64_t tokens, patches, cells;
  };

  Left left() const {
    const auto [height, width, prefix, patches, merged, window] = numbers<6>(plan, "plan");
    for (const int64_t number : {height, width, prefix, patches, merged, window}) {
      require(number >= 0 && number <= kLargest, "the plan's numbers must be from 0 to ", kLargest);
    }
    require(merged <= patches / 2, merged, " of ", patches, " patches cannot join others: half of them at most");
    return {prefix + patches - merged, patches - merged, size_of(uint64_t(height) * uint64_t(width), "the grid")};
  }

  std::vector<Result> results(const Shapes& shapes) const {
    const ov::PartialShape x = shapes.of("x", 3);
    const Left rest = left();
    return {{ov::element::f32, {x[0], rest.tokens, x[2]}},
            {ov::element::f32, {x[0], rest.patches}},
            {ov::element::i64, {x[0], rest.patches}},
            {ov::element::i64, {x[0], rest.cells}}};
  }

  void run(Call& call) const {
    const Tokens x = call.get<Tokens>("x");
    const Left rest = left();
    const size_t B = x.shape(0), patches = size_t(rest.patches);
    const Heads keys = find("keys") && call.rank("keys") == 3 ? one_head(call.get<Tokens>("keys")) : call.heads("keys");
    merge(x, keys, call.maybe<Bias>("importance"), call.maybe<Bias>("sizes"), call.maybe<Longs>("cells"),
          call.maybe<Longs>("owners"), numbers<6>(plan, "plan"), protect, threads(),
          call.result<Tokens>(0, {B, size_t(rest.tokens), x.shape(2)}), call.result<Bias>(1, {B, patches}),
          call.longs_out(2, B, patches), call.longs_out(3, B, size_t(rest.cells)));
  }

  static Heads one_head(const Tokens& x) {
    return {x.data(), {x.shape(0), 1, x.shape(1), x.shape(2)}, {x.stride(0), 0, x.stride(1), x.stride(2)}};
  }
};

// An ONNX node's attributes, for an operator that asks for its own.
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

OPENVINO_EXTENSION_C_API void create_extensions(std::vector<ov::Extension::Ptr>& extensions) {
  using namespace attendless::openvino;
  add<FovealAttention>(extensions);
  add<SparsifinerAttention>(extensions);
  add<BlockAttention>(extensions);
  add<GatherAttention>(extensions);
  add<MergeTokens>(extensions);
}
