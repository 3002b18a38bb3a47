// Building blocks of softmax attention of one query over its own list of keys. Lanes are channels.
//     scores    p[i] = scale · log2 e · q · key i + bias: W keys at a time, then vectors of channels
//     weigh     p[i] = 2^(p[i] - maximum)
//     combine   out += Σ p[i] · value i: blocks of channels, then rows
//     finish    divides by the sum of the weights, writes the result and lse
// p has one entry per entry of the list, padded to whole vectors. Scores are in base 2.
#pragma once

#include "head.hpp"

namespace attendless::ATTENDLESS_ISA {

struct List {
  const int32_t* row;
  int count;
};

template <int W, class P>
struct OwnList {
  using S = Simd<W>;
  using F = typename S::F;
  using Key = typename P::Key;
  using Value = typename P::Value;
  using C = Channels<W>;

  // Loads a row into scratch memory as fp32 · factor, padded with 0 like a table row.
  template <class From>
  static INLINE void load_row(float* to, const From* from, int width, float factor) {
    for (int c = 0; c < padded(width); ++c) to[c] = c < width ? value(from[c]) * factor : 0.f;
  }
  // Loads a query. fp32 queries are multiplied by scale · log2 e; for bf16, `scores` applies this factor.
  static INLINE void load_query(const Head& head, int query, Key* to) {
    const View& q = head.problem.q;
    head.at(q, query, [&](const auto* row) {
      if constexpr (P::kRounds) {
        C::copy_padded(to, row, q.width);
      } else {
        load_row(to, row, q.width, head.problem.scale * kLog2e);
      }
    });
  }
  static INLINE void clear(float* to, int width) { std::memset(to, 0, sizeof(float) * padded(width)); }

  // Scores of the listed keys, with biases if there are any.
  static INLINE void scores(const Head& head, const KvTable<P>& rows, const List& seen, const Key* q, float* p) {
    dots(seen, rows.k, q, rows.key_stride(), p);
    if constexpr (P::kRounds) {
      const F factor = S::splat(head.problem.scale * kLog2e);
      for (int i = 0; i < seen.count; i += W) S::store(p + i, S::load(p + i) * factor);
    }
    for (int i = 0; i < seen.count && head.problem.bias; i += W) {
      float bias[W];
      UNROLL for (int j = 0; j < W; ++j) bias[j] = rows.bias[seen.row[least(i + j, seen.count - 1)]];
      S::store(p + i, S::load(p + i) + S::load(bias));
    }
  }

  // Replaces scores by weights relative to the maximum. Returns the maximum and the sum of the weights.
  struct Weighed {
    float most, total;
  };
  static INLINE Weighed weigh(float* p, int count) {
    for (int i = count; i % W; ++i) p[i] = -kInfinity;
    F most = S::splat(-kInfinity), sum{};
    for (int i = 0; i < count; i += W) most = S::max(most, S::load(p + i));
    const F largest = S::splat(S::largest(most)), shift = P::kRounds ? S::whole(largest) : largest;
    const F base = S::finite(shift);
    for (int i = 0; i < count; i += W) {
      F x = S::exp2(S::load(p + i) - base);
      if constexpr (P::kRounds) x = S::nearest_half(x);
      sum += x;
      S::store(p + i, x);
    }
    return {shift[0], S::sum(sum)};
  }

  // Divides `out` by the sum of the weights and writes the query's result and lse.
  static INLINE void finish(const Head& head, int query, float* out, const Weighed& weighed) {
    const float share = weighed.total == 0.f ? 0.f : 1.f / weighed.total;  // no visible key: result 0
    const int width = head.problem.v.width;
    for (int c = 0; c < width; ++c) out[c] *= share;
    head.at(head.problem.out, query, [&](auto* result) { C::copy(result, out, width); });
    head.problem.lse[head.index(query)] = weighed.most * kLn2 + __builtin_logf(weighed.total);
  }

  // result[i] = (row i of the list) · x. Takes W rows at a time and repeats the last row. Rows are `stride` numbers
  // apart.
  template <class Number>
  static INLINE void dots(const List& seen, const Number* table, const Number* x, int64_t stride, float* result) {
    int i = 0;
    for (; i + W <= seen.count; i += W) S::store(result + i, some_dots(seen.row + i, table, x, stride));
    if (i == seen.count) return;
    int32_t last[W];
    for (int j = 0; j < W; ++j) last[j] = seen.row[least(i + j, seen.count - 1)];
    S::store(result + i, some_dots(last, table, x, stride));
  }

  // result[c] += Σ_i weight[i] · (row i of the list)[c] for c < width.
  template <class Number>
  static INLINE void combine(const List& seen, const float* weight, const Number* table, int64_t stride, int width,
                             float* result) {
    combine_from<8>(seen, weight, table, stride, width, result, 0);
  }

 private:
  template <class Number>
  using Row = typename WordOf<Number>::Word;

  template <class Number>
  static INLINE F some_dots(const int32_t* list, const Number* table, const Number* x, int64_t stride) {
    const int width = int(stride) / WordOf<Number>::kNumbers;
    F sum[W];
    UNROLL for (int j = 0; j < W; ++j) sum[j] = F{};
    const auto from = reinterpret_cast<const Row<Number>*>(table), by = reinterpret_cast<const Row<Number>*>(x);
    int c = 0;
    for (; c + 4 * W <= width; c += 4 * W) add_dots<4, Number>(list, from + c, by + c, width, sum);
    for (; c < width; c += W) add_dots<1, Number>(list, from + c, by + c, width, sum);
    return S::sums(sum);
  }
  // Adds the products of K vectors of channels. Holds K vectors of x in registers, and each row needs one pointer only.
  template <int K, class Number>
  static INLINE void add_dots(const int32_t* list, const Row<Number>* table, const Row<Number>* x, int width,
                              F (&sum)[W]) {
    using N = Words<W, Number>;
    typename N::Vec channel[K];
    UNROLL for (int k = 0; k < K; ++k) channel[k] = N::load(x + k * W);
    UNROLL for (int j = 0; j < W; ++j) {
      const Row<Number>* const row = table + int64_t(list[j]) * width;
      UNROLL for (int k = 0; k < K; ++k) sum[j] = N::add(sum[j], channel[k], N::load(row + k * W));
    }
  }

  // Takes K vectors of channels at a time, then K / 2 for the rest. Keeps eight independent accumulators (8 / K rows of
  // K vectors), because a single FMA chain is latency-bound.
  template <int K, class Number>
  static INLINE void combine_from(const List& seen, const float* weight, const Number* table, int64_t stride, int width,
                                  float* result, int c) {
    for (; c + K * W <= width; c += K * W) combine_channels<K, 8 / K>(seen, weight, table + c, stride, result + c);
    if constexpr (K > 1) combine_from<K / 2>(seen, weight, table, stride, width, result, c);
  }
  template <int K, int R, class Number>
  static INLINE void combine_channels(const List& seen, const float* weight, const Number* table, int64_t stride,
                                      float* result) {
    using N = Words<W, Number>;
    constexpr int M = N::kNumbers;
    F sum[R][K];
    UNROLL for (int j = 0; j < K; ++j) {
      sum[0][j] = S::load(result + j * W);
      UNROLL for (int r = 1; r < R; ++r) sum[r][j] = F{};
    }
    const auto row = [&](int i) { return table + int64_t(seen.row[i]) * stride; };
    const auto add = [&](int i, F (&to)[K]) INLINE_LAMBDA {
      if constexpr (M == 1) {
        const float* const from = row(i);
        const F factor = S::splat(weight[i]);
        UNROLL for (int j = 0; j < K; ++j) to[j] += factor * S::load(from + j * W);
      } else {
        const Number* const from[2] = {row(i), row(i + 1)};
        const typename N::Vec factor = N::splat(pair_of(weight[i], weight[i + 1]));
        UNROLL for (int j = 0; j < K; ++j) to[j] = N::add(to[j], factor, N::across(from, j * W));
      }
    };
    int i = 0;
    for (; i + R * M <= seen.count; i += R * M) {
      UNROLL for (int r = 0; r < R; ++r) add(i + r * M, sum[r]);
    }
    for (; i + M <= seen.count; i += M) add(i, sum[0]);
    if constexpr (M > 1) {
      if (i < seen.count) {
        const typename N::Vec factor = N::splat(pair_of(weight[i], 0.f));
        UNROLL for (int j = 0; j < K; ++j) sum[0][j] = N::add(sum[0][j], factor, N::last(row(i), j * W));
      }
    }
    UNROLL for (int j = 0; j < K; ++j) {
      UNROLL for (int r = 1; r < R; ++r) sum[0][j] += sum[r][j];
      S::store(result + j * W, sum[0][j]);
    }
  }
};

}  // namespace attendless::ATTENDLESS_ISA
