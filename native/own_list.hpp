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
  static INLINE void load_row(float* to, const float* from, int width, float factor) {
    for (int c = 0; c < padded(width); ++c) to[c] = c < width ? from[c] * factor : 0.f;
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
  static INLINE void finish(const Head& head, int query, const float* out, const Weighed& weighed) {
    const float share = weighed.total == 0.f ? 0.f : 1.f / weighed.total;  // nothing to look at gives 0
    float* const result = head.row(head.problem.out, query);
    for (int c = 0; c < head.problem.v.width; ++c) result[c] = out[c] * share;
    head.problem.lse[head.index(query)] = weighed.most * kLn2 + __builtin_logf(weighed.total);
  }

  // result[i] = row i of the list · x, for whole vectors of rows: the last is repeated.
  static INLINE void dots(const List& seen, const float* table, const float* x, int width, float* result) {
    for (int i = 0; i < seen.count; i += W) {
      const float* row[W];
      UNROLL for (int j = 0; j < W; ++j) row[j] = table + int64_t(seen.row[least(i + j, seen.count - 1)]) * width;
      F sum[W];
      UNROLL for (int j = 0; j < W; ++j) sum[j] = F{};
      for (int c = 0; c < width; c += W) {
        const F channel = S::load(x + c);
        UNROLL for (int j = 0; j < W; ++j) sum[j] += channel * S::load(row[j] + c);
      }
      S::store(result + i, S::sums(sum));
    }
  }

  // result += Σ_i weight[i] · row i of the list, with as many channels as registers hold at a time.
  static INLINE void combine(const List& seen, const float* weight, const float* table, int width, float* result) {
    int c = 0;
    for (; c + 8 * W <= width; c += 8 * W) combine_channels<8>(seen, weight, table, width, result, c);
    for (; c < width; c += W) combine_channels<1>(seen, weight, table, width, result, c);
  }

 private:
  template <int K>
  static INLINE void combine_channels(const List& seen, const float* weight, const float* table, int width,
                                      float* result, int c) {
    F sum[K];
    UNROLL for (int j = 0; j < K; ++j) sum[j] = S::load(result + c + j * W);
    for (int i = 0; i < seen.count; ++i) {
      const float* const row = table + int64_t(seen.row[i]) * width + c;
      const F factor = S::splat(weight[i]);
      UNROLL for (int j = 0; j < K; ++j) sum[j] += factor * S::load(row + j * W);
    }
    UNROLL for (int j = 0; j < K; ++j) S::store(result + c + j * W, sum[j]);
  }
};

}  // namespace attendless::ATTENDLESS_ISA
