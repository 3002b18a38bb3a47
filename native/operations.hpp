// Written by native/generate.py from attendless.sparse.table: the arguments of every operation. Do not edit.
//
// `visit` names the arguments in the order Python passes them, `visit_results` the results and functions that return
// their shapes. Python's module, OpenVINO and ONNX Runtime fill in arguments by visiting them; `run` (api.cpp) checks
// them and computes.
//
// Axes: B batch, H heads, N tokens, n patches, D width of a query, E width of a value, R ranks, G 1 or B.
#pragma once

#include <array>
#include <optional>
#include <string_view>

#include "array.hpp"
#include "plans.hpp"

namespace attendless {

// How a tensor may come besides its own shape: as part 0, 1 or 2 of qkv [B, N, 3, H, D]; without one of its axes.
struct Forms {
  int part = -1, omits = -1;
};

template <class... Arguments>
struct List {};

static_assert(kElement<float> == Element::f32 && name_of(Element::f32) == std::string_view("f32"));
static_assert(kElement<Bf16> == Element::bf16 && name_of(Element::bf16) == std::string_view("bf16"));
static_assert(kElement<int8_t> == Element::i8 && name_of(Element::i8) == std::string_view("i8"));
static_assert(kElement<int32_t> == Element::i32 && name_of(Element::i32) == std::string_view("i32"));
static_assert(kElement<int64_t> == Element::i64 && name_of(Element::i64) == std::string_view("i64"));
static_assert(std::string_view(Layout::kName) == "layout" && has_fields<Layout>({"height", "width", "prefix", "cell", "tile", "coarse", "budget", "order", "int8"}));
static_assert(std::string_view(Merging::kName) == "plan" && has_fields<Merging>({"height", "width", "prefix", "patches", "r", "window", "sources"}));

// the cells each tile of queries sees sharply, ascending
struct FovealSelectArguments {
  static constexpr const char* kName = "foveal_select";
  OneOf<4, Element::f32, Element::bf16> q;  // [B, H, N, D] f32, bf16
  OneOf<4, Element::f32, Element::bf16> k;  // [B, H, N, D] f32, bf16
  std::optional<Array<float, 2>> key_bias;  // [B, N] f32
  std::optional<Array<int32_t, 2>> places;  // [B, n] i32
  Fields<Layout> layout;
  float scale = 1;
  int64_t threads = 1;
  std::optional<Array<int32_t, 4>> chosen;  // [B, H, layout.tiles, layout.budget] i32

  template <class Visitor>
  void visit(Visitor& on) {
    on.tensor("q", q, Forms{0});
    on.tensor("k", k, Forms{1});
    on.tensor("key_bias", key_bias);
    on.tensor("places", places);
    on.attribute("layout", layout);
    on.attribute("scale", scale);
  }

  template <class Visitor>
  void visit_results(Visitor& on) {
    on.result("chosen", chosen, [&] { return Shape<4>{q.shape(0), q.shape(1), size_t(Layout(layout).tiles()), size_t(Layout(layout).budget)}; });
  }
};
void run(const FovealSelectArguments& arguments);

// foveal attention to given cells
struct FovealAttendArguments {
  static constexpr const char* kName = "foveal_attend";
  OneOf<4, Element::f32, Element::bf16> q;  // [B, H, N, D] f32, bf16
  OneOf<4, Element::f32, Element::bf16> k;  // [B, H, N, D] f32, bf16
  OneOf<4, Element::f32, Element::bf16> v;  // [B, H, N, E] f32, bf16
  std::optional<Array<float, 2>> key_bias;  // [B, N] f32
  std::optional<Array<int32_t, 2>> places;  // [B, n] i32
  Fields<Layout> layout;
  float scale = 1;
  Array<int32_t, 4> chosen;  // [B, H, layout.tiles, layout.budget] i32
  int64_t threads = 1;
  OneOf<4, Element::f32, Element::bf16> out;  // [B, H, N, E] f32, bf16
  std::optional<Array<float, 3>> lse;  // [B, H, N] f32

  template <class Visitor>
  void visit(Visitor& on) {
    on.tensor("q", q, Forms{0});
    on.tensor("k", k, Forms{1});
    on.tensor("v", v, Forms{2});
    on.tensor("key_bias", key_bias);
    on.tensor("places", places);
    on.attribute("layout", layout);
    on.attribute("scale", scale);
    on.tensor("chosen", chosen);
  }

  template <class Visitor>
  void visit_results(Visitor& on) {
    on.result("out", out, [&] { return Shape<4>{q.shape(0), q.shape(1), q.shape(2), v.shape(3)}; });
    on.result("lse", lse, [&] { return Shape<3>{q.shape(0), q.shape(1), q.shape(2)}; });
  }
};
void run(const FovealAttendArguments& arguments);

// `foveal_select` and `foveal_attend` in one call
struct FovealArguments {
  static constexpr const char* kName = "foveal";
  OneOf<4, Element::f32, Element::bf16> q;  // [B, H, N, D] f32, bf16
  OneOf<4, Element::f32, Element::bf16> k;  // [B, H, N, D] f32, bf16
  OneOf<4, Element::f32, Element::bf16> v;  // [B, H, N, E] f32, bf16
  std::optional<Array<float, 2>> key_bias;  // [B, N] f32
  std::optional<Array<int32_t, 2>> places;  // [B, n] i32
  Fields<Layout> layout;
  float scale = 1;
  int64_t threads = 1;
  OneOf<4, Element::f32, Element::bf16> out;  // [B, H, N, E] f32, bf16
  std::optional<Array<float, 3>> lse;  // [B, H, N] f32
  std::optional<Array<int32_t, 4>> chosen;  // [B, H, layout.tiles, layout.budget] i32

  template <class Visitor>
  void visit(Visitor& on) {
    on.tensor("q", q, Forms{0});
    on.tensor("k", k, Forms{1});
    on.tensor("v", v, Forms{2});
    on.tensor("key_bias", key_bias);
    on.tensor("places", places);
    on.attribute("layout", layout);
    on.attribute("scale", scale);
  }

  template <class Visitor>
  void visit_results(Visitor& on) {
    on.result("out", out, [&] { return Shape<4>{q.shape(0), q.shape(1), q.shape(2), v.shape(3)}; });
    on.result("lse", lse, [&] { return Shape<3>{q.shape(0), q.shape(1), q.shape(2)}; });
    on.result("chosen", chosen, [&] { return Shape<4>{q.shape(0), q.shape(1), size_t(Layout(layout).tiles()), size_t(Layout(layout).budget)}; });
  }
};
void run(const FovealArguments& arguments);

// `foveal` for inference
struct FovealForwardArguments {
  static constexpr const char* kName = "foveal_forward";
  static constexpr const char* kNode = "FovealAttention";
  static constexpr std::array<Element, 1> kNodeResults = {Element::f32};
  OneOf<4, Element::f32, Element::bf16> q;  // [B, H, N, D] f32, bf16
  OneOf<4, Element::f32, Element::bf16> k;  // [B, H, N, D] f32, bf16
  OneOf<4, Element::f32, Element::bf16> v;  // [B, H, N, E] f32, bf16
  std::optional<Array<float, 2>> key_bias;  // [B, N] f32
  std::optional<Array<int32_t, 2>> places;  // [B, n] i32
  Fields<Layout> layout;
  float scale = 1;
  int64_t threads = 1;
  OneOf<4, Element::f32, Element::bf16> out;  // [B, H, N, E] f32, bf16
  std::optional<Array<float, 3>> lse;  // [B, H, N] f32
  std::optional<Array<int32_t, 4>> chosen;  // [B, H, layout.tiles, layout.budget] i32

  template <class Visitor>
  void visit(Visitor& on) {
    on.tensor("q", q, Forms{0});
    on.tensor("k", k, Forms{1});
    on.tensor("v", v, Forms{2});
    on.tensor("key_bias", key_bias);
    on.tensor("places", places);
    on.attribute("layout", layout);
    on.attribute("scale", scale);
  }

  template <class Visitor>
  void visit_results(Visitor& on) {
    on.result("out", out, [&] { return Shape<4>{q.shape(0), q.shape(1), q.shape(2), v.shape(3)}; });
    on.result("lse", lse, [&] { return Shape<3>{q.shape(0), q.shape(1), q.shape(2)}; });
    on.result("chosen", chosen, [&] { return Shape<4>{q.shape(0), q.shape(1), size_t(Layout(layout).tiles()), size_t(Layout(layout).budget)}; });
  }
};
void run(const FovealForwardArguments& arguments);

// the gradients of `foveal`
struct FovealBackwardArguments {
  static constexpr const char* kName = "foveal_backward";
  Array<float, 4, Storage::strided> out_grad;  // [B, H, N, E] f32
  Array<float, 4, Storage::strided> q;  // [B, H, N, D] f32
  Array<float, 4, Storage::strided> k;  // [B, H, N, D] f32
  Array<float, 4, Storage::strided> v;  // [B, H, N, E] f32
  Array<float, 4, Storage::strided> out;  // [B, H, N, E] f32
  Array<float, 3> lse;  // [B, H, N] f32
  std::optional<Array<float, 2>> key_bias;  // [B, N] f32
  std::optional<Array<int32_t, 2>> places;  // [B, n] i32
  Fields<Layout> layout;
  float scale = 1;
  Array<int32_t, 4> chosen;  // [B, H, layout.tiles, layout.budget] i32
  int64_t threads = 1;
  Array<float, 4, Storage::strided> q_grad;  // [B, H, N, D] f32
  Array<float, 4, Storage::strided> k_grad;  // [B, H, N, D] f32
  Array<float, 4, Storage::strided> v_grad;  // [B, H, N, E] f32
  std::optional<Array<float, 3>> key_bias_grad;  // [B, H, N] f32

  template <class Visitor>
  void visit(Visitor& on) {
    on.tensor("out_grad", out_grad);
    on.tensor("q", q);
    on.tensor("k", k);
    on.tensor("v", v);
    on.tensor("out", out);
    on.tensor("lse", lse);
    on.tensor("key_bias", key_bias);
    on.tensor("places", places);
    on.attribute("layout", layout);
    on.attribute("scale", scale);
    on.tensor("chosen", chosen);
  }

  template <class Visitor>
  void visit_results(Visitor& on) {
    on.result("q_grad", q_grad, [&] { return Shape<4>{out_grad.shape(0), out_grad.shape(1), out_grad.shape(2), q.shape(3)}; });
    on.result("k_grad", k_grad, [&] { return Shape<4>{out_grad.shape(0), out_grad.shape(1), out_grad.shape(2), q.shape(3)}; });
    on.result("v_grad", v_grad, [&] { return Shape<4>{out_grad.shape(0), out_grad.shape(1), out_grad.shape(2), out_grad.shape(3)}; });
    on.result("key_bias_grad", key_bias_grad, [&] { return Shape<3>{out_grad.shape(0), out_grad.shape(1), out_grad.shape(2)}; });
  }
};
void run(const FovealBackwardArguments& arguments);

// attention of each tile of queries to a fixed list of keys; a key listed twice counts twice
struct BlockAttendArguments {
  static constexpr const char* kName = "block_attend";
  static constexpr const char* kNode = "BlockAttention";
  static constexpr std::array<Element, 1> kNodeResults = {Element::f32};
  OneOf<4, Element::f32, Element::bf16> q;  // [B, H, N, D] f32, bf16
  OneOf<4, Element::f32, Element::bf16> k;  // [B, H, N, D] f32, bf16
  OneOf<4, Element::f32, Element::bf16> v;  // [B, H, N, E] f32, bf16
  std::optional<Array<float, 2>> key_bias;  // [B, N] f32
  Array<int32_t, 1> query_start;  // [S] i32
  Array<int32_t, 1> queries;  // [Q] i32
  Array<int32_t, 1> key_start;  // [T] i32
  Array<int32_t, 1> keys;  // [K] i32
  float scale = 1;
  int64_t threads = 1;
  OneOf<4, Element::f32, Element::bf16> out;  // [B, H, N, E] f32, bf16
  std::optional<Array<float, 3>> lse;  // [B, H, N] f32

  template <class Visitor>
  void visit(Visitor& on) {
    on.tensor("q", q, Forms{0});
    on.tensor("k", k, Forms{1});
    on.tensor("v", v, Forms{2});
    on.tensor("key_bias", key_bias);
    on.tensor("query_start", query_start);
    on.tensor("queries", queries);
    on.tensor("key_start", key_start);
    on.tensor("keys", keys);
    on.attribute("scale", scale);
  }

  template <class Visitor>
  void visit_results(Visitor& on) {
    on.result("out", out, [&] { return Shape<4>{q.shape(0), q.shape(1), q.shape(2), v.shape(3)}; });
    on.result("lse", lse, [&] { return Shape<3>{q.shape(0), q.shape(1), q.shape(2)}; });
  }
};
void run(const BlockAttendArguments& arguments);

// the gradients of `block_attend`
struct BlockBackwardArguments {
  static constexpr const char* kName = "block_backward";
  Array<float, 4, Storage::strided> out_grad;  // [B, H, N, E] f32
  Array<float, 4, Storage::strided> q;  // [B, H, N, D] f32
  Array<float, 4, Storage::strided> k;  // [B, H, N, D] f32
  Array<float, 4, Storage::strided> v;  // [B, H, N, E] f32
  Array<float, 4, Storage::strided> out;  // [B, H, N, E] f32
  Array<float, 3> lse;  // [B, H, N] f32
  std::optional<Array<float, 2>> key_bias;  // [B, N] f32
  Array<int32_t, 1> query_start;  // [S] i32
  Array<int32_t, 1> queries;  // [Q] i32
  Array<int32_t, 1> key_start;  // [T] i32
  Array<int32_t, 1> keys;  // [K] i32
  float scale = 1;
  int64_t threads = 1;
  Array<float, 4, Storage::strided> q_grad;  // [B, H, N, D] f32
  Array<float, 4, Storage::strided> k_grad;  // [B, H, N, D] f32
  Array<float, 4, Storage::strided> v_grad;  // [B, H, N, E] f32
  std::optional<Array<float, 3>> key_bias_grad;  // [B, H, N] f32

  template <class Visitor>
  void visit(Visitor& on) {
    on.tensor("out_grad", out_grad);
    on.tensor("q", q);
    on.tensor("k", k);
    on.tensor("v", v);
    on.tensor("out", out);
    on.tensor("lse", lse);
    on.tensor("key_bias", key_bias);
    on.tensor("query_start", query_start);
    on.tensor("queries", queries);
    on.tensor("key_start", key_start);
    on.tensor("keys", keys);
    on.attribute("scale", scale);
  }

  template <class Visitor>
  void visit_results(Visitor& on) {
    on.result("q_grad", q_grad, [&] { return Shape<4>{out_grad.shape(0), out_grad.shape(1), out_grad.shape(2), q.shape(3)}; });
    on.result("k_grad", k_grad, [&] { return Shape<4>{out_grad.shape(0), out_grad.shape(1), out_grad.shape(2), q.shape(3)}; });
    on.result("v_grad", v_grad, [&] { return Shape<4>{out_grad.shape(0), out_grad.shape(1), out_grad.shape(2), out_grad.shape(3)}; });
    on.result("key_bias_grad", key_bias_grad, [&] { return Shape<3>{out_grad.shape(0), out_grad.shape(1), out_grad.shape(2)}; });
  }
};
void run(const BlockBackwardArguments& arguments);

// attention of each query to the first `counts` keys of its own list
struct GatherAttendArguments {
  static constexpr const char* kName = "gather_attend";
  static constexpr const char* kNode = "GatherAttention";
  static constexpr std::array<Element, 1> kNodeResults = {Element::f32};
  OneOf<4, Element::f32, Element::bf16> q;  // [B, H, N, D] f32, bf16
  OneOf<4, Element::f32, Element::bf16> k;  // [B, H, N, D] f32, bf16
  OneOf<4, Element::f32, Element::bf16> v;  // [B, H, N, E] f32, bf16
  std::optional<Array<float, 2>> key_bias;  // [B, N] f32
  Array<int32_t, 4> indices;  // [B, H, N, m] i32
  std::optional<Array<int32_t, 3>> counts;  // [B, H, N] i32
  float scale = 1;
  int64_t threads = 1;
  OneOf<4, Element::f32, Element::bf16> out;  // [B, H, N, E] f32, bf16
  std::optional<Array<float, 3>> lse;  // [B, H, N] f32

  template <class Visitor>
  void visit(Visitor& on) {
    on.tensor("q", q, Forms{0});
    on.tensor("k", k, Forms{1});
    on.tensor("v", v, Forms{2});
    on.tensor("key_bias", key_bias);
    on.tensor("indices", indices);
    on.tensor("counts", counts);
    on.attribute("scale", scale);
  }

  template <class Visitor>
  void visit_results(Visitor& on) {
    on.result("out", out, [&] { return Shape<4>{q.shape(0), q.shape(1), q.shape(2), v.shape(3)}; });
    on.result("lse", lse, [&] { return Shape<3>{q.shape(0), q.shape(1), q.shape(2)}; });
  }
};
void run(const GatherAttendArguments& arguments);

// the gradients of `gather_attend`
struct GatherBackwardArguments {
  static constexpr const char* kName = "gather_backward";
  Array<float, 4, Storage::strided> out_grad;  // [B, H, N, E] f32
  Array<float, 4, Storage::strided> q;  // [B, H, N, D] f32
  Array<float, 4, Storage::strided> k;  // [B, H, N, D] f32
  Array<float, 4, Storage::strided> v;  // [B, H, N, E] f32
  Array<float, 4, Storage::strided> out;  // [B, H, N, E] f32
  Array<float, 3> lse;  // [B, H, N] f32
  std::optional<Array<float, 2>> key_bias;  // [B, N] f32
  Array<int32_t, 4> indices;  // [B, H, N, m] i32
  std::optional<Array<int32_t, 3>> counts;  // [B, H, N] i32
  float scale = 1;
  int64_t threads = 1;
  Array<float, 4, Storage::strided> q_grad;  // [B, H, N, D] f32
  Array<float, 4, Storage::strided> k_grad;  // [B, H, N, D] f32
  Array<float, 4, Storage::strided> v_grad;  // [B, H, N, E] f32
  std::optional<Array<float, 3>> key_bias_grad;  // [B, H, N] f32

  template <class Visitor>
  void visit(Visitor& on) {
    on.tensor("out_grad", out_grad);
    on.tensor("q", q);
    on.tensor("k", k);
    on.tensor("v", v);
    on.tensor("out", out);
    on.tensor("lse", lse);
    on.tensor("key_bias", key_bias);
    on.tensor("indices", indices);
    on.tensor("counts", counts);
    on.attribute("scale", scale);
  }

  template <class Visitor>
  void visit_results(Visitor& on) {
    on.result("q_grad", q_grad, [&] { return Shape<4>{out_grad.shape(0), out_grad.shape(1), out_grad.shape(2), q.shape(3)}; });
    on.result("k_grad", k_grad, [&] { return Shape<4>{out_grad.shape(0), out_grad.shape(1), out_grad.shape(2), q.shape(3)}; });
    on.result("v_grad", v_grad, [&] { return Shape<4>{out_grad.shape(0), out_grad.shape(1), out_grad.shape(2), out_grad.shape(3)}; });
    on.result("key_bias_grad", key_bias_grad, [&] { return Shape<3>{out_grad.shape(0), out_grad.shape(1), out_grad.shape(2)}; });
  }
};
void run(const GatherBackwardArguments& arguments);

// the `budget` keys of each query's largest positive connectivities, ascending, and their number
struct SparsifinerSelectArguments {
  static constexpr const char* kName = "sparsifiner_select";
  Array<float, 4, Storage::strided> coefficients;  // [B, H, N, R] f32
  Array<float, 3> basis;  // [G, R, N] f32
  int64_t budget = 0;
  int64_t prefix = 0;
  float tau = 0;
  int64_t top = 0;
  int64_t threads = 1;
  Array<int32_t, 4> indices;  // [B, H, N, budget] i32
  Array<int32_t, 3> counts;  // [B, H, N] i32

  template <class Visitor>
  void visit(Visitor& on) {
    on.tensor("coefficients", coefficients);
    on.tensor("basis", basis, Forms{-1, 0});
    on.attribute("budget", budget);
    on.attribute("prefix", prefix);
    on.attribute("tau", tau);
    on.attribute("top", top);
  }

  template <class Visitor>
  void visit_results(Visitor& on) {
    on.result("indices", indices, [&] { return Shape<4>{coefficients.shape(0), coefficients.shape(1), coefficients.shape(2), size_t(budget)}; });
    on.result("counts", counts, [&] { return Shape<3>{coefficients.shape(0), coefficients.shape(1), coefficients.shape(2)}; });
  }
};
void run(const SparsifinerSelectArguments& arguments);

// `sparsifiner_select` and attention to the chosen keys in one call, with an optional tail for the others
struct SparsifinerArguments {
  static constexpr const char* kName = "sparsifiner";
  static constexpr const char* kNode = "SparsifinerAttention";
  static constexpr std::array<Element, 1> kNodeResults = {Element::f32};
  OneOf<4, Element::f32, Element::bf16> q;  // [B, H, N, D] f32, bf16
  OneOf<4, Element::f32, Element::bf16> k;  // [B, H, N, D] f32, bf16
  OneOf<4, Element::f32, Element::bf16> v;  // [B, H, N, E] f32, bf16
  std::optional<Array<float, 2>> key_bias;  // [B, N] f32
  Array<float, 4, Storage::strided> coefficients;  // [B, H, N, R] f32
  Array<float, 3> basis;  // [G, R, N] f32
  std::optional<Array<float, 4, Storage::strided>> tail_scores;  // [B, H, N, R] f32
  std::optional<Array<float, 4, Storage::strided>> tail_values;  // [B, H, R, E] f32
  std::optional<Array<float, 3>> share;  // [G, N, R] f32
  int64_t budget = 0;
  int64_t prefix = 0;
  float tau = 0;
  int64_t top = 0;
  float scale = 1;
  int64_t threads = 1;
  OneOf<4, Element::f32, Element::bf16> out;  // [B, H, N, E] f32, bf16
  std::optional<Array<float, 3>> lse;  // [B, H, N] f32

  template <class Visitor>
  void visit(Visitor& on) {
    on.tensor("q", q, Forms{0});
    on.tensor("k", k, Forms{1});
    on.tensor("v", v, Forms{2});
    on.tensor("key_bias", key_bias);
    on.tensor("coefficients", coefficients);
    on.tensor("basis", basis, Forms{-1, 0});
    on.tensor("tail_scores", tail_scores);
    on.tensor("tail_values", tail_values);
    on.tensor("share", share, Forms{-1, 0});
    on.attribute("budget", budget);
    on.attribute("prefix", prefix);
    on.attribute("tau", tau);
    on.attribute("top", top);
    on.attribute("scale", scale);
  }

  template <class Visitor>
  void visit_results(Visitor& on) {
    on.result("out", out, [&] { return Shape<4>{q.shape(0), q.shape(1), q.shape(2), v.shape(3)}; });
    on.result("lse", lse, [&] { return Shape<3>{q.shape(0), q.shape(1), q.shape(2)}; });
  }
};
void run(const SparsifinerArguments& arguments);

// token merging: `plan.r` source patches are averaged with the target whose key is most similar
struct MergeArguments {
  static constexpr const char* kName = "merge";
  static constexpr const char* kNode = "MergeTokens";
  static constexpr std::array<Element, 4> kNodeResults = {Element::f32, Element::f32, Element::i64, Element::i64};
  Array<float, 3, Storage::strided> x;  // [B, N, C] f32
  Array<float, 4, Storage::strided> keys;  // [B, H, N, D] f32
  std::optional<Array<float, 2>> importance;  // [B, N] f32
  std::optional<Array<float, 2>> sizes;  // [B, n] f32
  std::optional<Array<int64_t, 2>> cells;  // [B, n] i64
  std::optional<Array<int64_t, 2>> owners;  // [B, plan.cells] i64
  Fields<Merging> plan;
  float protect = 0;
  int64_t threads = 1;
  Array<float, 3, Storage::strided> out;  // [B, plan.remaining, C] f32
  Array<float, 2> sizes_out;  // [B, plan.left] f32
  Array<int64_t, 2> cells_out;  // [B, plan.left] i64
  Array<int64_t, 2> owners_out;  // [B, plan.cells] i64

  template <class Visitor>
  void visit(Visitor& on) {
    on.tensor("x", x);
    on.tensor("keys", keys, Forms{1, 1});
    on.tensor("importance", importance);
    on.tensor("sizes", sizes);
    on.tensor("cells", cells);
    on.tensor("owners", owners);
    on.attribute("plan", plan);
    on.attribute("protect", protect);
  }

  template <class Visitor>
  void visit_results(Visitor& on) {
    on.result("out", out, [&] { return Shape<3>{x.shape(0), size_t(Merging(plan).remaining()), x.shape(2)}; });
    on.result("sizes_out", sizes_out, [&] { return Shape<2>{x.shape(0), size_t(Merging(plan).left())}; });
    on.result("cells_out", cells_out, [&] { return Shape<2>{x.shape(0), size_t(Merging(plan).left())}; });
    on.result("owners_out", owners_out, [&] { return Shape<2>{x.shape(0), size_t(Merging(plan).cells())}; });
  }
};
void run(const MergeArguments& arguments);

using Operations = List<FovealSelectArguments, FovealAttendArguments, FovealArguments, FovealForwardArguments, FovealBackwardArguments, BlockAttendArguments, BlockBackwardArguments, GatherAttendArguments, GatherBackwardArguments, SparsifinerSelectArguments, SparsifinerArguments, MergeArguments>;
using Nodes = List<FovealForwardArguments, BlockAttendArguments, GatherAttendArguments, SparsifinerArguments, MergeArguments>;

}  // namespace attendless
