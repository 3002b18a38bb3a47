// Attention in which every query has a list of keys of its own, in any order, with repeats counted as often as they
// stand there.
//
// Nobody shares a list, so the lanes are channels: a row of keys is multiplied with the query, a row of values with its
// weight, each read once. The scores of one query are all that is kept: scratch grows with the longest list alone.
#pragma once

#include "head.hpp"

namespace attendless::ATTENDLESS_UNIT {

template <int W>
struct GatherHead {
  using Args = Gather;
  using S = Simd<W>;
  using F = typename S::F;

  const Gather& gather;
  const Head head;
  Rows rows;

  static int64_t table_rows(const Gather& g) { return g.problem.tokens; }
  static int64_t table_floats(const Gather& g) {
    return table_rows(g) * (padded(g.problem.q.width) + padded(g.problem.v.width) + 1) + 48;
  }
  static int64_t thread_floats(const Gather& g) {
    return 2 * padded(g.problem.q.width) + 2 * padded(g.problem.v.width) + 2 * padded(int64_t(g.longest)) + 96;
  }

  GatherHead(const Gather& g, int image, int head_index, Cursor& memory)
      : gather(g), head{g.problem, image, head_index}, rows(memory.rows(table_rows(g), g.problem)) {}

  void prepare(Cursor) const {
    for (int i = 0; i < gather.problem.tokens; ++i) pack_token<W>(head, rows, i, i);
  }

  static constexpr int kQueries = 16;  // in a piece of work
  int pieces() const { return (gather.problem.tokens + kQueries - 1) / kQueries; }

  void forward(int piece, Cursor memory) const {
    const int first = piece * kQueries, last = least(first + kQueries, gather.problem.tokens);
    for (int query = first; query < last; ++query) attend(query, memory);
  }

  void backward(const Rows& grads, Cursor memory) const {
    prepare(memory);
    for (int query = 0; query < gather.problem.tokens; ++query) attend_backward(grads, query, memory);
    for (int i = 0; i < gather.problem.tokens; ++i) unpack_gradient<W>(head, grads, i, i);
  }

 private:
  struct List {
    const int32_t* row;
    int count;
  };

  // What a query sees: nothing, and a note for the caller, if any of it is no token.
  INLINE List list(int query) const {
    const int64_t index = head.index(query);
    const List found{gather.indices + index * gather.longest, gather.counts ? gather.counts[index] : gather.longest};
    bool good = uint32_t(found.count) <= uint32_t(gather.longest);
    uint32_t most = 0;
    for (int i = 0; good && i < found.count; ++i) {
      const uint32_t row = uint32_t(found.row[i]);
      most = row > most ? row : most;
    }
    good = good && (found.count == 0 || most < uint32_t(gather.problem.tokens));
    if (good) return found;
    __atomic_store_n(gather.wrong, 1, __ATOMIC_RELAXED);
    return {found.row, 0};
  }

  void attend(int query, Cursor memory) const {
    const List seen = list(query);
    const int width = padded(rows.width), value_width = padded(rows.value_width);
    float* const q = load_row(head.row(head.problem.q, query), rows.width, head.problem.scale * kLog2e, memory);
    float* const p = memory.floats(padded(gather.longest));
    float* const out = memory.floats(value_width);
    float* const lse = head.problem.lse + head.index(query);
    const float most = scores(seen, q, width, p);
    const float base = most == -kInfinity ? 0.f : most;
    F sum{};
    for (int i = 0; i < seen.count; i += W) {
      const F x = S::exp2(S::load(p + i) - S::splat(base));
      sum += x;
      S::store(p + i, x);
    }
    const float total = S::sum(sum), share = total == 0.f ? 0.f : 1.f / total;  // nothing to look at gives 0
    combine(seen, p, rows.v, value_width, out);
    float* const result = head.row(head.problem.out, query);
    for (int c = 0; c < rows.value_width; ++c) result[c] = out[c] * share;
    *lse = most * kLn2 + __builtin_logf(total);
  }

  // p, the weights; slope, how the loss changes with each score; both as one query's list has them.
  void attend_backward(const Rows& grads, int query, Cursor memory) const {
    const List seen = list(query);
    const int width = padded(rows.width), value_width = padded(rows.value_width);
    const float* const out = head.row(head.problem.out, query);
    float* const q = load_row(head.row(head.problem.q, query), rows.width, head.problem.scale * kLog2e, memory);
    float* const g = load_row(head.row(head.problem.out_grad, query), rows.value_width, 1.f, memory);
    float* const q_grad = memory.floats(width);
    float* const p = memory.floats(padded(gather.longest));
    float* const slope = memory.floats(padded(gather.longest));
    const float lse = head.problem.lse[head.index(query)] * kLog2e;
    float mean = 0.f;
    for (int c = 0; c < rows.value_width; ++c) mean += g[c] * out[c];
    scores(seen, q, width, p);
    dots(seen, rows.v, g, value_width, slope);
    const F shift = S::splat(lse == -kInfinity ? kInfinity : lse);  // a query that sees nothing: every weight is 0
    for (int i = 0; i < seen.count; i += W) {
      const F x = S::exp2(S::load(p + i) - shift);
      S::store(p + i, x);
      S::store(slope + i, x * (S::load(slope + i) - S::splat(mean)));
    }
    combine(seen, slope, rows.k, width, q_grad);
    float* const result = head.row(head.problem.q_grad, query);
    for (int c = 0; c < rows.width; ++c) result[c] = q_grad[c] * head.problem.scale;
    for (int i = 0; i < seen.count; ++i) {
      const int64_t row = seen.row[i];
      Channels<W>::add(grads.key(row), q, slope[i] * kLn2, width);
      Channels<W>::add(grads.value(row), g, p[i], value_width);
      grads.bias[row] += slope[i];
    }
  }

  static INLINE float* load_row(const float* from, int width, float factor, Cursor& memory) {
    float* const to = memory.floats(padded(width));
    for (int c = 0; c < padded(width); ++c) to[c] = c < width ? from[c] * factor : 0.f;
    return to;
  }

  // Each key's score, then -∞ up to whole vectors; the largest.
  INLINE float scores(const List& seen, const float* q, int width, float* p) const {
    dots(seen, rows.k, q, width, p);
    F most = S::splat(-kInfinity);
    for (int i = seen.count; i % W; ++i) p[i] = -kInfinity;
    for (int i = 0; i < seen.count; i += W) {
      float bias[W];
      UNROLL for (int j = 0; j < W; ++j) bias[j] = rows.bias[seen.row[least(i + j, seen.count - 1)]];
      const F x = S::load(p + i) + S::load(bias);
      most = S::max(most, x);
      S::store(p + i, x);
    }
    return S::largest(most);
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
      S::transpose(sum);
      UNROLL for (int half = W / 2; half; half /= 2) {
        UNROLL for (int j = 0; j < half; ++j) sum[j] += sum[j + half];
      }
      S::store(result + i, sum[0]);
    }
  }

  // result = Σ_i weight[i] · row i of the list, with as many channels as registers hold at a time.
  static INLINE void combine(const List& seen, const float* weight, const float* table, int width, float* result) {
    int c = 0;
    for (; c + 8 * W <= width; c += 8 * W) combine_channels<8>(seen, weight, table, width, result, c);
    for (; c < width; c += W) combine_channels<1>(seen, weight, table, width, result, c);
  }

  template <int K>
  static INLINE void combine_channels(const List& seen, const float* weight, const float* table, int width,
                                      float* result, int c) {
    F sum[K];
    UNROLL for (int j = 0; j < K; ++j) sum[j] = F{};
    for (int i = 0; i < seen.count; ++i) {
      const float* const row = table + int64_t(seen.row[i]) * width + c;
      const F factor = S::splat(weight[i]);
      UNROLL for (int j = 0; j < K; ++j) sum[j] += factor * S::load(row + j * W);
    }
    UNROLL for (int j = 0; j < K; ++j) S::store(result + c + j * W, sum[j]);
  }
};

}  // namespace attendless::ATTENDLESS_UNIT
