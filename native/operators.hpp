// The operators of the domain `attendless`, whichever runtime calls them: OpenVINO by openvino.cpp, ONNX Runtime by
// onnxruntime.cpp. Each has
//     kName, kInputs         its name and those of its inputs
//     kResults               the types of what it gives
//     visit(visitor)         its attributes
//     results(shapes)        the same with shapes, of which some sizes may not be known yet
//     run(call)
#pragma once

#include <array>
#include <string>
#include <vector>

#include "runtime_call.hpp"
#include "api.hpp"
#include "geometry.hpp"
#include "memory.hpp"

namespace attendless::operators {

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
  static constexpr std::array<Type, 1> kResults = {Type::f32};
  float scale = 1.f;

  template <class Visitor>
  void visit(Visitor& visitor) {
    Inputs::visit(visitor);
    visitor.on_attribute("scale", scale);
  }

  template <class Shapes>
  auto results(const Shapes& shapes) const {
    return shapes.attended();
  }
};

struct FovealAttention : Attention {
  static constexpr const char* kName = "FovealAttention";
  inline static const std::vector<std::string> kInputs = {"q", "k", "v", "qkv", "key_bias", "places"};
  std::vector<int64_t> layout;

  template <class Visitor>
  void visit(Visitor& visitor) {
    Attention::visit(visitor);
    visitor.on_attribute("layout", layout);
  }

  template <class Shapes>
  auto results(const Shapes& shapes) const {
    const Layout checked(numbers<8>(layout, "layout"));
    geometry_of(checked);
    const auto found = shapes.attended();
    const auto tokens = found[0].shape[tokens_first() ? 1 : 2];
    const int all = checked.prefix + checked.patches();
    require(find("places") || tokens.compatible(all), "the layout has ", all, " tokens, q has ", tokens);
    return found;
  }

  void run(Call& call) const {
    const Heads q = call.heads("q"), k = call.heads("k"), v = call.heads("v");
    foveal_attend(q, k, v, call.maybe<Bias>("key_bias"), call.maybe<Places>("places"), numbers<8>(layout, "layout"),
                  scale, call.threads, std::nullopt, true, call.attended(q, v), Unread(q).lse());
  }
};

struct SparsifinerAttention : Attention {
  static constexpr const char* kName = "SparsifinerAttention";
  inline static const std::vector<std::string> kInputs = {
      "q", "k", "v", "qkv", "coefficients", "basis", "tail_scores", "tail_values", "share", "key_bias"};
  int64_t budget = 0, prefix = 0, top = 0;
  float tau = 0.f;

  template <class Visitor>
  void visit(Visitor& visitor) {
    Attention::visit(visitor);
    visitor.on_attribute("budget", budget);
    visitor.on_attribute("prefix", prefix);
    visitor.on_attribute("tau", tau);
    visitor.on_attribute("top", top);
  }

  void run(Call& call) const {
    const Heads q = call.heads("q"), k = call.heads("k"), v = call.heads("v");
    sparsifiner(q, k, v, call.maybe<Bias>("key_bias"), call.get<Heads>("coefficients"), call.get<Tables>("basis"),
                call.maybe<Heads>("tail_scores"), call.maybe<Heads>("tail_values"), call.maybe<Tables>("share"), budget,
                prefix, tau, top, scale, call.threads, call.attended(q, v), Unread(q).lse());
  }
};

struct BlockAttention : Attention {
  static constexpr const char* kName = "BlockAttention";
  inline static const std::vector<std::string> kInputs = {"q",       "k",         "v",    "qkv",     "query_start",
                                                          "queries", "key_start", "keys", "key_bias"};

  void run(Call& call) const {
    const Heads q = call.heads("q"), k = call.heads("k"), v = call.heads("v");
    block_attend(q, k, v, call.maybe<Bias>("key_bias"), call.get<Indices>("query_start"), call.get<Indices>("queries"),
                 call.get<Indices>("key_start"), call.get<Indices>("keys"), scale, call.threads, call.attended(q, v),
                 Unread(q).lse());
  }
};

struct GatherAttention : Attention {
  static constexpr const char* kName = "GatherAttention";
  inline static const std::vector<std::string> kInputs = {"q", "k", "v", "qkv", "indices", "counts", "key_bias"};

  void run(Call& call) const {
    const Heads q = call.heads("q"), k = call.heads("k"), v = call.heads("v");
    gather_attend(q, k, v, call.maybe<Bias>("key_bias"), call.get<Chosen>("indices"), call.maybe<Counts>("counts"),
                  scale, call.threads, call.attended(q, v), Unread(q).lse());
  }
};

// Its keys are [B, H, N, D] or, of one head, [B, N, D]; or those of qkv.
struct MergeTokens : Inputs {
  static constexpr const char* kName = "MergeTokens";
  inline static const std::vector<std::string> kInputs = {"x",     "keys",  "qkv",   "importance",
                                                          "sizes", "cells", "owners"};
  static constexpr std::array<Type, 4> kResults = {Type::f32, Type::f32, Type::i64, Type::i64};
  std::vector<int64_t> plan;
  float protect = 0.f;

  template <class Visitor>
  void visit(Visitor& visitor) {
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

  template <class Shapes>
  std::vector<typename Shapes::Result> results(const Shapes& shapes) const {
    const auto x = shapes.of("x", 3);
    const Left rest = left();
    return {{kResults[0], {x[0], rest.tokens, x[2]}},
            {kResults[1], {x[0], rest.patches}},
            {kResults[2], {x[0], rest.patches}},
            {kResults[3], {x[0], rest.cells}}};
  }

  void run(Call& call) const {
    const Tokens x = call.get<Tokens>("x");
    const Left rest = left();
    const size_t B = x.shape(0), patches = size_t(rest.patches);
    const Heads keys = find("keys") && call.rank("keys") == 3 ? one_head(call.get<Tokens>("keys")) : call.heads("keys");
    merge(x, keys, call.maybe<Bias>("importance"), call.maybe<Bias>("sizes"), call.maybe<Longs>("cells"),
          call.maybe<Longs>("owners"), numbers<6>(plan, "plan"), protect, call.threads,
          call.result<Tokens>(0, {B, size_t(rest.tokens), x.shape(2)}), call.result<Bias>(1, {B, patches}),
          call.longs_out(2, B, patches), call.longs_out(3, B, size_t(rest.cells)));
  }

  static Heads one_head(const Tokens& x) {
    return {x.data(), {x.shape(0), 1, x.shape(1), x.shape(2)}, {x.stride(0), 0, x.stride(1), x.stride(2)}};
  }
};

}  // namespace attendless::operators
