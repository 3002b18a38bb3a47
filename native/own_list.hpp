// One query's softmax over a list of keys that nobody shares.
//
// The lanes are channels: a row of keys is multiplied with the query, a row of values with its weight, each read once.
// Scores are in units of log 2, one for each entry of the list, with room for whole vectors.
#pragma once

#include "head.hpp"

namespace attendless::ATTENDLESS_ISA {

struct List {
  const int32_t* row;
  int count;
};

template <int W>
struct OwnList {
  using S = Simd<W>;
  using F = typename S::F;

  // Rows of scratch, as wide as rows of the table.
  template <class From>
  static INLINE void load_row(float* to, const From* from, int width, float factor) {
    for (int c = 0; c < padded(width); ++c) to[c] = c < width ? value(from[c]) * factor : 0.f;
  }
  static INLINE void load_query(const Head& head, int query, float* to) {
    const View& q = head.problem.q;
    head.at(q, query, [&](const auto* row) { load_row(to, row, q.width, head.problem.scale * kLog2e); });
  }
  static INLINE void clear(float* to, int width) { std::memset(to, 0, sizeof(float) * padded(width)); }

  // Each key's score, with its bias if there are any.
  static INLINE void scores(const KvTable& rows, bool biased, const List& seen, const float* q, float* p) {
    dots(seen, rows.k, q, padded(rows.width), p);
    for (int i = 0; i < seen.count && biased; i += W) {
      float bias[W];
      UNROLL for (int j = 0; j < W; ++j) bias[j] = rows.bias[seen.row[least(i + j, seen.count - 1)]];
      S::store(p + i, S::load(p + i) + S::load(bias));
    }
  }

  // Scores become weights, relative to the largest score.
  struct Weighed {
    float most, total;
  };
  static INLINE Weighed weigh(float* p, int count) {
    for (int i = count; i % W; ++i) p[i] = -kInfinity;
    F most = S::splat(-kInfinity), sum{};
    for (int i = 0; i < count; i += W) most = S::max(most, S::load(p + i));
    const float largest = S::largest(most);
    const F base = S::finite(S::splat(largest));
    for (int i = 0; i < count; i += W) {
      const F x = S::exp2(S::load(p + i) - base);
      sum += x;
      S::store(p + i, x);
    }
    return {largest, S::sum(sum)};
  }

  // The weighted sum of values, `out`, becomes the query's result.
  static INLINE void finish(const Head& head, int query, float* out, const Weighed& weighed) {
    const float share = weighed.total == 0.f ? 0.f : 1.f / weighed.total;  // nothing to look at gives 0
    const int width = head.problem.v.width;
    for (int c = 0; c < width; ++c) out[c] *= share;
    head.at(head.problem.out, query, [&](auto* result) { Channels<W>::copy(result, out, width); });
    head.problem.lse[head.index(query)] = weighed.most * kLn2 + __builtin_logf(weighed.total);
  }

  // result[i] = row i of the list · x, W rows at a time: the last is repeated.
  static INLINE void dots(const List& seen, const float* table, const float* x, int width, float* result) {
    int i = 0;
    for (; i + W <= seen.count; i += W) S::store(result + i, dots(seen.row + i, table, x, width));
    if (i == seen.count) return;
    int32_t last[W];
    for (int j = 0; j < W; ++j) last[j] = seen.row[least(i + j, seen.count - 1)];
    S::store(result + i, dots(last, table, x, width));
  }

  // result += Σ_i weight[i] · row i of the list.
  static INLINE void combine(const List& seen, const float* weight, const float* table, int width, float* result) {
    combine_from<8>(seen, weight, table, width, result, 0);
  }

 private:
  static INLINE F dots(const int32_t* list, const float* table, const float* x, int width) {
    F sum[W];
    UNROLL for (int j = 0; j < W; ++j) sum[j] = F{};
    int c = 0;
    for (; c + 4 * W <= width; c += 4 * W) add_dots<4>(list, table + c, x + c, width, sum);
    for (; c < width; c += W) add_dots<1>(list, table + c, x + c, width, sum);
    return S::sums(sum);
  }
  // With K vectors of x in registers, each row is one pointer.
  template <int K>
  static INLINE void add_dots(const int32_t* list, const float* table, const float* x, int width, F (&sum)[W]) {
    F channel[K];
    UNROLL for (int k = 0; k < K; ++k) channel[k] = S::load(x + k * W);
    UNROLL for (int j = 0; j < W; ++j) {
      const float* const row = table + int64_t(list[j]) * width;
      UNROLL for (int k = 0; k < K; ++k) sum[j] += channel[k] * S::load(row + k * W);
    }
  }

  // K vectors of channels at a time, then half as many: what is added to one after the other has to be waited for, so
  // eight sums are always on their way, of several rows if the channels do not fill them.
  template <int K>
  static INLINE void combine_from(const List& seen, const float* weight, const float* table, int width, float* result,
                                  int c) {
    for (; c + K * W <= width; c += K * W) combine_channels<K, 8 / K>(seen, weight, table + c, width, result + c);
    if constexpr (K > 1) combine_from<K / 2>(seen, weight, table, width, result, c);
  }
  template <int K, int R>
  static INLINE void combine_channels(const List& seen, const float* weight, const float* table, int width,
                                      float* result) {
    F sum[R][K];
    UNROLL for (int j = 0; j < K; ++j) {
      sum[0][j] = S::load(result + j * W);
      UNROLL for (int r = 1; r < R; ++r) sum[r][j] = F{};
    }
    const auto add = [&](int i, F (&to)[K]) {
      const float* const row = table + int64_t(seen.row[i]) * width;
      const F factor = S::splat(weight[i]);
      UNROLL for (int j = 0; j < K; ++j) to[j] += factor * S::load(row + j * W);
    };
    int i = 0;
    for (; i + R <= seen.count; i += R) {
      UNROLL for (int r = 0; r < R; ++r) add(i + r, sum[r]);
    }
    for (; i < seen.count; ++i) add(i, sum[0]);
    UNROLL for (int j = 0; j < K; ++j) {
      UNROLL for (int r = 1; r < R; ++r) sum[0][j] += sum[r][j];
      S::store(result + j * W, sum[0][j]);
    }
  }
};

}  // namespace attendless::ATTENDLESS_ISA
