// Attention in which every query has a list of keys of its own, in any order, with repeats counted as often as they
// stand there.
//
// The scores of one query are all that is kept: scratch grows with the longest list alone.
#pragma once

#include "listed.hpp"

namespace attendless::ATTENDLESS_UNIT {

template <int W>
struct GatherHead {
  using Args = Gather;
  using S = Simd<W>;
  using F = typename S::F;
  using L = Listed<W>;

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
    float* const q = L::load_row(head.row(head.problem.q, query), rows.width, head.problem.scale * kLog2e, memory);
    float* const p = memory.floats(padded(gather.longest));
    float* const out = L::zeros(rows.value_width, memory);
    L::scores(rows, head.problem.bias, seen, q, p);
    const auto weighed = L::weigh(p, seen.count);
    L::combine(seen, p, rows.v, padded(rows.value_width), out);
    L::finish(head, query, out, weighed);
  }

  // p, the weights; slope, how the loss changes with each score; both as one query's list has them.
  void attend_backward(const Rows& grads, int query, Cursor memory) const {
    const List seen = list(query);
    const int width = padded(rows.width), value_width = padded(rows.value_width);
    const float* const out = head.row(head.problem.out, query);
    float* const q = L::load_row(head.row(head.problem.q, query), rows.width, head.problem.scale * kLog2e, memory);
    float* const g = L::load_row(head.row(head.problem.out_grad, query), rows.value_width, 1.f, memory);
    float* const q_grad = L::zeros(rows.width, memory);
    float* const p = memory.floats(padded(gather.longest));
    float* const slope = memory.floats(padded(gather.longest));
    const float lse = head.problem.lse[head.index(query)] * kLog2e;
    float mean = 0.f;
    for (int c = 0; c < rows.value_width; ++c) mean += g[c] * out[c];
    L::scores(rows, head.problem.bias, seen, q, p);
    L::dots(seen, rows.v, g, value_width, slope);
    const F shift = S::splat(lse == -kInfinity ? kInfinity : lse);  // a query that sees nothing: every weight is 0
    for (int i = 0; i < seen.count; i += W) {
      const F x = S::exp2(S::load(p + i) - shift);
      S::store(p + i, x);
      S::store(slope + i, x * (S::load(slope + i) - S::splat(mean)));
    }
    L::combine(seen, slope, rows.k, width, q_grad);
    float* const result = head.row(head.problem.q_grad, query);
    for (int c = 0; c < rows.width; ++c) result[c] = q_grad[c] * head.problem.scale;
    for (int i = 0; i < seen.count; ++i) {
      const int64_t row = seen.row[i];
      Channels<W>::add(grads.key(row), q, slope[i] * kLn2, width);
      Channels<W>::add(grads.value(row), g, p[i], value_width);
      grads.bias[row] += slope[i];
    }
  }
};

}  // namespace attendless::ATTENDLESS_UNIT
