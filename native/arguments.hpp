// Converts the arguments of operations.hpp to the structs of kernels.hpp and checks every size. No data is copied or
// converted. Element types are checked earlier, when the arguments are filled in. The template parameter `Arguments` is
// any struct with the members that the function reads.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <tuple>

#include "checks.hpp"
#include "memory.hpp"
#include "operations.hpp"

namespace attendless {

template <class Any>
bool is(const Any& array, std::initializer_list<int> shape) {
  size_t axis = 0;
  return std::all_of(shape.begin(), shape.end(), [&](int size) { return array.shape(axis++) == size_t(size); });
}

inline int threads_of(int64_t threads) { return int(std::clamp<int64_t>(threads, 1, kMostThreads)); }

inline View view(const Heads& array, const char* name, const Problem& problem, int tokens, int width) {
  require(is(array, {problem.batch, problem.heads, tokens, width}), name, " has another shape than q requires");
  require(width >= 1, name, " must have at least one channel");
  require(width == 1 || array.size() == 0 || array.stride(3) == 1, name, " must have adjacent channels");
  return {array.data(), array.stride(0), array.stride(1), array.stride(2), width, array.element};
}

inline View view(const Heads& array, const char* name, const Problem& problem) {
  return view(array, name, problem, problem.tokens, size_of(array.shape(3), name));
}

inline View view(const Heads& array, const char* name, const Problem& problem, int width) {
  return view(array, name, problem, problem.tokens, width);
}

// Batch, heads and tokens of a [B, H, N, channels] tensor.
inline Problem problem_of(const Heads& first, const char* name, int64_t threads) {
  Problem problem{};
  problem.batch = size_of(first.shape(0), name);
  problem.heads = size_of(first.shape(1), name);
  problem.tokens = size_of(first.shape(2), name);
  size_of(uint64_t(problem.batch) * uint64_t(problem.heads), name);
  problem.threads = threads_of(threads);
  return problem;
}

// Queries and keys, without values.
template <class Arguments>
Problem problem_of(const Arguments& arguments) {
  Problem problem = problem_of(arguments.q, "q", arguments.threads);
  problem.scale = arguments.scale;
  problem.q = view(arguments.q, "q", problem);
  problem.k = view(arguments.k, "k", problem, problem.q.width);
  problem.v = problem.k;
  problem.v.width = 0;
  if (arguments.key_bias) {
    require(is(*arguments.key_bias, {problem.batch, problem.tokens}), "key_bias must be [batch, tokens]");
    problem.bias = arguments.key_bias->data();
  }
  return problem;
}

// The problem of a forward pass. Kernels always write lse; this struct owns the memory if the caller does not request
// lse.
struct Forward {
  Problem problem;

  template <class Arguments>
  explicit Forward(const Arguments& arguments) : problem(problem_of(arguments)) {
    problem.v = view(arguments.v, "v", problem);
    problem.out = view(arguments.out, "out", problem, problem.v.width);
    require(problem.out.element == Element::f32 || problem.q.element == Element::bf16,
            "out must be f32, as q is, or q bf16 too");
    if (!arguments.lse) {
      unread_.emplace(std::max<int64_t>(1, int64_t(problem.batch) * problem.heads * problem.tokens));
    }
    problem.lse = arguments.lse ? arguments.lse->data() : unread_->data();
  }

 private:
  std::optional<Memory> unread_;
};

template <class Arguments>
Problem backward_of(const Arguments& arguments) {
  Problem problem = problem_of(arguments);
  problem.v = view(arguments.v, "v", problem);
  problem.out = view(arguments.out, "out", problem, problem.v.width);
  require(is(arguments.lse, {problem.batch, problem.heads, problem.tokens}), "lse must be [batch, heads, tokens]");
  problem.lse = arguments.lse.data();
  problem.out_grad = view(arguments.out_grad, "out_grad", problem, problem.v.width);
  problem.q_grad = view(arguments.q_grad, "q_grad", problem, problem.q.width);
  problem.k_grad = view(arguments.k_grad, "k_grad", problem, problem.q.width);
  problem.v_grad = view(arguments.v_grad, "v_grad", problem, problem.v.width);
  if (arguments.key_bias_grad) {
    require(is(*arguments.key_bias_grad, {problem.batch, problem.heads, problem.tokens}),
            "key_bias_grad must be [batch, heads, tokens]");
    problem.bias_grad = arguments.key_bias_grad->data();
  }
  return problem;
}

// Merging -------------------------------------------------------------------------------------------------------------

inline Rows rows_of(const Tokens& array, const char* name, int batch, int tokens, int width) {
  require(is(array, {batch, tokens, width}), name, " must be [batch, tokens, channels] as the plan says");
  require(width >= 1, name, " must have at least one channel");
  require(width == 1 || array.size() == 0 || array.stride(2) == 1, name, " must have adjacent channels");
  return {array.data(), array.stride(0), array.stride(1), width};
}

// Checks shape and range of an optional integer tensor. The loop has no branch, so that the compiler vectorises it.
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

inline Merge merge_of(const MergeArguments& arguments) {
  const Merging plan(arguments.plan);
  const int grid = plan.cells();
  Merge merge{};
  merge.threads = threads_of(arguments.threads);
  merge.batch = size_of(arguments.x.shape(0), "x");
  merge.height = plan.height;
  merge.width = plan.width;
  merge.prefix = plan.prefix;
  merge.patches = plan.patches;
  merge.merged = plan.r;
  merge.window = plan.window;
  merge.sources = plan.seeking();
  merge.by_importance = plan.sources > 0;
  merge.protect = arguments.protect;
  merge.x = rows_of(arguments.x, "x", merge.batch, plan.tokens(), size_of(arguments.x.shape(2), "x"));

  const FloatHeads& keys = arguments.keys;
  const int width = size_of(keys.shape(3), "keys");
  merge.heads = size_of(keys.shape(1), "keys");
  require(is(keys, {merge.batch, merge.heads, plan.tokens(), width}) && merge.heads >= 1,
          "keys must be [batch, heads, tokens, channels] as the plan says");
  require(width >= 1, "keys must have at least one channel");
  require(width == 1 || keys.size() == 0 || keys.stride(3) == 1, "keys must have adjacent channels");
  merge.keys = {keys.data(), keys.stride(0), keys.stride(1), keys.stride(2), width};

  const auto& [importance, sizes] = std::tie(arguments.importance, arguments.sizes);
  require(!importance || is(*importance, {merge.batch, plan.tokens()}), "importance must be [batch, tokens]");
  require(!sizes || is(*sizes, {merge.batch, plan.patches}), "sizes must be [batch, patches]");
  require(arguments.cells || plan.patches <= grid, "a grid of ", grid, " cells has no place for ", plan.patches,
          " patches");
  require(importance || !merge.by_importance, "importance is missing: it chooses the sources");
  merge.importance = importance ? importance->data() : nullptr;
  merge.sizes = sizes ? sizes->data() : nullptr;
  merge.cells = numbers_of(arguments.cells, "cells", merge.batch, plan.patches, 0, grid - 1);
  merge.owners = numbers_of(arguments.owners, "owners", merge.batch, grid, -1, plan.patches - 1);

  merge.out = rows_of(arguments.out, "out", merge.batch, plan.remaining(), merge.x.width);
  merge.sizes_out = arguments.sizes_out.data();
  merge.cells_out = arguments.cells_out.data();
  merge.owners_out = arguments.owners_out.data();
  return merge;
}

}  // namespace attendless
