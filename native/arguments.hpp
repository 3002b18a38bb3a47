// The arrays Python hands over as the Problem a kernel reads, checked. Without copies, so an array must be what it is
// taken for: nothing is converted.
#pragma once

#include <nanobind/ndarray.h>

#include <algorithm>
#include <array>
#include <initializer_list>
#include <optional>

#include "checks.hpp"

namespace attendless {

namespace nb = nanobind;

using Heads = nb::ndarray<float, nb::ndim<4>, nb::device::cpu>;                       // [B, H, N, channels]
using Lse = nb::ndarray<float, nb::ndim<3>, nb::c_contig, nb::device::cpu>;           // [B, H, N]
using Bias = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;          // [B, N]
using Places = nb::ndarray<int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;      // [B, patches]
using Chosen = nb::ndarray<int32_t, nb::ndim<4>, nb::c_contig, nb::device::cpu>;      // [B, H, tiles, budget]
using Counts = nb::ndarray<int32_t, nb::ndim<3>, nb::c_contig, nb::device::cpu>;      // [B, H, N]
using Floats = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Indices = nb::ndarray<int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Numbers = std::array<int64_t, 7>;  // of a Layout

template <class Array>
bool is(const Array& array, std::initializer_list<int> shape) {
  size_t axis = 0;
  return std::all_of(shape.begin(), shape.end(), [&](int size) { return array.shape(axis++) == size_t(size); });
}

inline View view(const Heads& array, const char* name, const Problem& problem, int tokens, int width) {
  require(is(array, {problem.batch, problem.heads, tokens, width}), name, " has another shape than its fellows");
  require(width >= 1, name, " must have at least one channel");
  require(width == 1 || array.stride(3) == 1, name, " must have adjacent channels");
  return {array.data(), array.stride(0), array.stride(1), array.stride(2), width};
}

inline View view(const Heads& array, const char* name, const Problem& problem) {
  return view(array, name, problem, problem.tokens, size_of(array.shape(3), name));
}

inline View view(const Heads& array, const char* name, const Problem& problem, int width) {
  return view(array, name, problem, problem.tokens, width);
}

inline Problem problem_of(const Heads& first, const char* name, int threads) {
  Problem problem{};
  problem.batch = size_of(first.shape(0), name);
  problem.heads = size_of(first.shape(1), name);
  problem.tokens = size_of(first.shape(2), name);
  size_of(uint64_t(problem.batch) * uint64_t(problem.heads), name);
  problem.threads = std::clamp(threads, 1, kMostThreads);
  return problem;
}

inline Problem problem_of(const Heads& q, const Heads& k, const std::optional<Bias>& bias, float scale, int threads) {
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

inline void add_result(Problem& problem, const Heads& v, const Heads& out, const Lse& lse) {
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

}  // namespace attendless
