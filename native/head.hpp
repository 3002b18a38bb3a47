// One head of one image: its keys and values copied into a table of rows that lists can name, and the queries of a tile
// found in the caller's tensors.
#pragma once

#include "attend.hpp"
#include "kernels.hpp"

namespace attendless::ATTENDLESS_ISA {

// The rows of one head in the caller's tensors.
struct Head {
  const Problem& problem;
  int image, head;

  INLINE float* row(const View& view, int64_t token) const {
    return view.data + image * view.batch + head * view.head + token * view.token;
  }
  INLINE int64_t index(int64_t token) const {
    return (int64_t(image) * problem.heads + head) * problem.tokens + token;
  }
  INLINE const float* biases() const {
    return problem.bias ? problem.bias + int64_t(image) * problem.tokens : nullptr;
  }

  INLINE Queries queries(const int32_t* token, int count) const {
    Queries group;
    group.count = count;
    for (int i = 0; i < count; ++i) {
      group.q[i] = row(problem.q, token[i]);
      group.out[i] = row(problem.out, token[i]);
      group.lse[i] = problem.lse + index(token[i]);
      if (problem.out_grad.data) {
        group.out_grad[i] = row(problem.out_grad, token[i]);
        group.q_grad[i] = row(problem.q_grad, token[i]);
      }
    }
    return group;
  }
};

// Vectors over the channels of rows of any width.
template <int W>
struct Channels {
  using S = Simd<W>;

  static INLINE void copy(float* to, const float* from, int width) {
    int c = 0;
    for (; c + W <= width; c += W) S::store(to + c, S::load(from + c));
    for (; c < width; ++c) to[c] = from[c];
  }
  static INLINE void copy_padded(float* to, const float* from, int width) {
    copy(to, from, width);
    for (int c = width; c < padded(width); ++c) to[c] = 0.f;
  }

  // to = Σ_i factor(i) · from(i), a row with its channels in registers.
  template <class From, class Factor>
  static INLINE void sum(float* to, int count, int width, From from, Factor factor) {
    int c = 0;
    for (; c + 8 * W <= width; c += 8 * W) sum_vectors<8>(to, c, count, from, factor);
    for (; c + 2 * W <= width; c += 2 * W) sum_vectors<2>(to, c, count, from, factor);
    for (; c + W <= width; c += W) sum_vectors<1>(to, c, count, from, factor);
    for (; c < width; ++c) {
      to[c] = 0.f;
      for (int i = 0; i < count; ++i) to[c] += factor(i) * from(i)[c];
    }
  }

  // These run over whole rows of a table, whose width is a multiple of 16.
  static INLINE void add(float* to, const float* from, float factor, int width) {
    for (int c = 0; c < width; c += W) S::store(to + c, S::load(to + c) + S::load(from + c) * factor);
  }
  // Σ a (b - c)
  static INLINE float dot_difference(const float* a, const float* b, const float* c, int width) {
    typename S::F sum{};
    for (int i = 0; i < width; i += W) sum += S::load(a + i) * (S::load(b + i) - S::load(c + i));
    return S::sum(sum);
  }

 private:
  // Eight sums are on their way at once, of several rows if their channels are fewer: one alone waits for itself.
  template <int K, class From, class Factor>
  static INLINE void sum_vectors(float* to, int c, int count, From from, Factor factor) {
    constexpr int R = 8 / K;
    typename S::F sum[R][K];
    UNROLL for (int r = 0; r < R; ++r) {
      UNROLL for (int j = 0; j < K; ++j) sum[r][j] = typename S::F{};
    }
    const auto add = [&](int i, typename S::F(&part)[K]) {
      const float* const row = from(i) + c;
      const typename S::F weight = S::splat(factor(i));
      UNROLL for (int j = 0; j < K; ++j) part[j] += weight * S::load(row + j * W);
    };
    int i = 0;
    for (; i + R <= count; i += R) {
      UNROLL for (int r = 0; r < R; ++r) add(i + r, sum[r]);
    }
    for (; i < count; ++i) add(i, sum[0]);
    UNROLL for (int j = 0; j < K; ++j) {
      UNROLL for (int r = 1; r < R; ++r) sum[0][j] += sum[r][j];
      S::store(to + c + j * W, sum[0][j]);
    }
  }
};

constexpr int kAhead = 16;  // rows

INLINE void prefetch_token(const Head& head, int64_t token) {
  prefetch(head.row(head.problem.k, token), head.problem.k.width);
  prefetch(head.row(head.problem.v, token), head.problem.v.width);
}

template <int W>
INLINE void pack_token(const Head& head, const KvTable& rows, int64_t to, int64_t token) {
  Channels<W>::copy_padded(rows.key(to), head.row(head.problem.k, token), rows.width);
  Channels<W>::copy_padded(rows.value(to), head.row(head.problem.v, token), rows.value_width);
  rows.bias[to] = head.biases() ? head.biases()[token] * kLog2e : 0.f;
}

template <int W>
INLINE void unpack_gradient(const Head& head, const KvTable& grads, int64_t from, int64_t token) {
  Channels<W>::copy(head.row(head.problem.k_grad, token), grads.key(from), grads.width);
  Channels<W>::copy(head.row(head.problem.v_grad, token), grads.value(from), grads.value_width);
  if (head.problem.bias_grad) head.problem.bias_grad[head.index(token)] = grads.bias[from];
}

// Attend from `count` queries, however many, to the rows of one list.
template <int W>
void attend_all(const Head& head, const KvTable& rows, const int32_t* list, int keys, const int32_t* token, int count,
                Cursor scratch, const Blurs& blurs = {}) {
  for (int i = 0; i < count; i += kGroup) {
    const Queries queries = head.queries(token + i, least(kGroup, count - i));
    Attend<W>::forward(rows, list, keys, queries, head.problem.scale, blurs, scratch);
  }
}

template <int W>
void attend_all_backward(const Head& head, const KvTable& rows, const KvTable& grads, const int32_t* list, int keys,
                         const int32_t* token, int count, Cursor scratch, const Blurs& blurs = {}) {
  for (int i = 0; i < count; i += kGroup) {
    const Queries queries = head.queries(token + i, least(kGroup, count - i));
    Attend<W>::backward(rows, grads, list, keys, queries, head.problem.scale, head.problem.repeats, blurs, scratch);
  }
}

}  // namespace attendless::ATTENDLESS_ISA
