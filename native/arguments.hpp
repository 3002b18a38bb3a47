// Arrays as the Problem a kernel reads, checked. Without copies, so an array must be what it is taken for: nothing is
// converted.
#pragma once

#include <algorithm>
#include <array>
#include <initializer_list>
#include <optional>

#include "array.hpp"
#include "checks.hpp"

namespace attendless {

using Numbers = std::array<int64_t, 8>;  // of a Layout
using Merging = std::array<int64_t, 6>;  // height, width, prefix, patches, merged, window

template <class Any>
bool is(const Any& array, std::initializer_list<int> shape) {
  size_t axis = 0;
  return std::all_of(shape.begin(), shape.end(), [&](int size) { return array.shape(axis++) == size_t(size); });
}

inline View view(const AnyHeads& array, const char* name, const Problem& problem, int tokens, int width) {
  require(is(array, {problem.batch, problem.heads, tokens, width}), name, " has another shape than its fellows");
  require(width >= 1, name, " must have at least one channel");
  require(width == 1 || array.size() == 0 || array.stride(3) == 1, name, " must have adjacent channels");
  return {array.data(), array.stride(0), array.stride(1), array.stride(2), width, array.bf16};
}

inline View view(const AnyHeads& array, const char* name, const Problem& problem) {
  return view(array, name, problem, problem.tokens, size_of(array.shape(3), name));
}

inline View view(const AnyHeads& array, const char* name, const Problem& problem, int width) {
  return view(array, name, problem, problem.tokens, width);
}

inline Problem problem_of(const AnyHeads& first, const char* name, int threads) {
  Problem problem{};
  problem.batch = size_of(first.shape(0), name);
  problem.heads = size_of(first.shape(1), name);
  problem.tokens = size_of(first.shape(2), name);
  size_of(uint64_t(problem.batch) * uint64_t(problem.heads), name);
  problem.threads = std::clamp(threads, 1, kMostThreads);
  return problem;
}

inline Problem problem_of(const AnyHeads& q, const AnyHeads& k, const std::optional<Bias>& bias, float scale,
                          int threads) {
  Problem problem = problem_of(q, "q", threads);
  problem.scale = scale;
  problem.q = view(q, "q", problem);
  problem.k = view(k, "k", problem, problem.q.width);
  problem.v = problem.k;
  problem.v.width = 0;
  if (bias) {
    require(is(*bias, {problem.batch, problem.tokens}), "key_bias must be [batch, tokens]");
    problem.bias = bias->data();
  }
  return problem;
}

inline void add_result(Problem& problem, const AnyHeads& v, const AnyHeads& out, const Lse& lse) {
  problem.v = view(v, "v", problem);
  problem.out = view(out, "out", problem, problem.v.width);
  require(is(lse, {problem.batch, problem.heads, problem.tokens}), "lse must be [batch, heads, tokens]");
  problem.lse = lse.data();
}

inline void add_gradients(Problem& problem, const Heads& out, const Heads& q, const Heads& k, const Heads& v,
                   const std::optional<Lse>& bias) {
  problem.out_grad = view(out, "out_grad", problem, problem.v.width);
  problem.q_grad = view(q, "q_grad", problem, problem.q.width);
  problem.k_grad = view(k, "k_grad", problem, problem.q.width);
  problem.v_grad = view(v, "v_grad", problem, problem.v.width);
  if (bias) {
    require(is(*bias, {problem.batch, problem.heads, problem.tokens}), "bias_grad must be [batch, heads, tokens]");
    problem.bias_grad = bias->data();
  }
}

// Merging -------------------------------------------------------------------------------------------------------------

inline Rows rows_of(const Tokens& array, const char* name, int batch, int tokens, int width) {
  require(is(array, {batch, tokens, width}), name, " must be [batch, tokens, channels] as the plan says");
  require(width >= 1, name, " must have at least one channel");
  require(width == 1 || array.size() == 0 || array.stride(2) == 1, name, " must have adjacent channels");
  return {array.data(), array.stride(0), array.stride(1), width};
}

// Passes without a branch in them are vectorised.
inline const int64_t* numbers_of(const std::optional<Longs>& array, const char* name, int batch, int count,
                                 int64_t low, int64_t high) {
  if (!array) return nullptr;
  require(is(*array, {batch, count}), name, " must be [", batch, ", ", count, "]");
  const int64_t* const data = array->data();
  bool outside = false;
  for (size_t i = 0, size = array->size(); i < size; ++i) outside |= (data[i] < low) | (data[i] > high);
  require(!outside, name, " must be from ", low, " to ", high);
  return data;
}

inline Merge merge_of(const Tokens& x, const Heads& keys, const Merging& plan, float protect, int threads) {
  for (const int64_t number : plan) {
    require(number >= 0 && number <= kLargest, "the plan's numbers must be from 0 to ", kLargest);
  }
  Merge merge{};
  merge.protect = protect;
  merge.threads = std::clamp(threads, 1, kMostThreads);
  merge.batch = size_of(x.shape(0), "x");
  int* const to[] = {&merge.height, &merge.width, &merge.prefix, &merge.patches, &merge.merged, &merge.window};
  for (size_t i = 0; i < plan.size(); ++i) *to[i] = int(plan[i]);
  size_of(uint64_t(merge.height) * uint64_t(merge.width), "the grid");
  const int tokens = size_of(uint64_t(merge.prefix) + uint64_t(merge.patches), "tokens");
  require(merge.merged <= merge.patches / 2, merge.merged, " of ", merge.patches,
          " patches cannot join others: half of them at most");
  merge.x = rows_of(x, "x", merge.batch, tokens, size_of(x.shape(2), "x"));
  const int width = size_of(keys.shape(3), "keys");
  merge.heads = size_of(keys.shape(1), "keys");
  require(is(keys, {merge.batch, merge.heads, tokens, width}) && merge.heads >= 1,
          "keys must be [batch, heads, tokens, channels] as the plan says");
  require(width >= 1, "keys must have at least one channel");
  require(width == 1 || keys.size() == 0 || keys.stride(3) == 1, "keys must have adjacent channels");
  merge.keys = {keys.data(), keys.stride(0), keys.stride(1), keys.stride(2), width};
  return merge;
}

inline void add_past(Merge& merge, const std::optional<Bias>& importance, const std::optional<Bias>& sizes,
                     const std::optional<Longs>& cells, const std::optional<Longs>& owners) {
  const int batch = merge.batch, patches = merge.patches, grid = merge.height * merge.width;
  require(!importance || is(*importance, {batch, merge.prefix + patches}), "importance must be [batch, tokens]");
  require(!sizes || is(*sizes, {batch, patches}), "sizes must be [batch, patches]");
  require(cells || patches <= grid, "a grid of ", grid, " cells has no place for ", patches, " patches");
  merge.importance = importance && merge.protect != 0.f ? importance->data() : nullptr;
  merge.sizes = sizes ? sizes->data() : nullptr;
  merge.cells = numbers_of(cells, "cells", batch, patches, 0, grid - 1);
  merge.owners = numbers_of(owners, "owners", batch, grid, -1, patches - 1);
}

inline void add_result(Merge& merge, const Tokens& out, const Bias& sizes, const Longs& cells, const Longs& owners) {
  const int left = merge.patches - merge.merged;
  merge.out = rows_of(out, "out", merge.batch, merge.prefix + left, merge.x.width);
  require(is(sizes, {merge.batch, left}) && is(cells, {merge.batch, left}) &&
              is(owners, {merge.batch, merge.height * merge.width}),
          "the results must be [batch, patches left], and owners [batch, cells of the grid]");
  merge.sizes_out = sizes.data();
  merge.cells_out = cells.data();
  merge.owners_out = owners.data();
}

}  // namespace attendless
