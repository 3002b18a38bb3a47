// Attention in which each query has its own list of keys, in any order. A key that is listed n times counts n times.
//
// Loop order: step 0 packs keys and values into the table. Step 1: for each query, one softmax over its list
// (own_list.hpp). Scratch memory holds the scores of one query, so its size depends on the longest list only.
#pragma once

#include "own_list.hpp"

namespace attendless::ATTENDLESS_ISA {

template <int W, class P>
struct GatherHead {
  using Args = Gather;
  using Numbers = P;
  using S = Simd<W>;
  using F = typename S::F;
  using L = OwnList<W, P>;

  const Gather& gather;
  const Head head;
  const int shares;
  KvTable<P> rows;

  static int64_t table_rows(const Gather& g) { return g.problem.tokens; }

  // Buffers of one query: rows of key channels and of value channels, padded to 16; one number per entry of its list.
  struct Local {
    float *q, *q_grad, *out, *out_grad, *p, *slope;
    Local(const Gather& g, Cursor& memory)
        : q(memory.floats(padded(g.problem.q.width))),
          q_grad(memory.floats(padded(g.problem.q.width))),
          out(memory.floats(padded(g.problem.v.width))),
          out_grad(memory.floats(padded(g.problem.v.width))),
          p(memory.floats(padded(g.longest))),
          slope(memory.floats(padded(g.longest))) {}
  };

  GatherHead(const Gather& g, int image, int head_index, Cursor& memory)
      : gather(g),
        head{g.problem, image, head_index},
        shares(parts_of_head(g.problem)),
        rows(memory, table_rows(g), g.problem.q.width, g.problem.v.width) {}

  static constexpr int kSteps = 2, kQueries = 16;  // queries per part
  int parts(int step) const { return step == 0 ? shares : (gather.problem.tokens + kQueries - 1) / kQueries; }

  void work(int step, int part, const Local& local) const {
    if (step == 0) return pack_tokens<W, P>(head, rows, part, shares);
    const int first = part * kQueries, last = least(first + kQueries, gather.problem.tokens);
    for (int query = first; query < last; ++query) attend(query, local);
  }

  void backward(const KvTable<P>& grads, const Local& local) const {
    for (int query = 0; query < gather.problem.tokens; ++query) attend_backward(grads, query, local);
    for (int i = 0; i < gather.problem.tokens; ++i) unpack_gradient<W>(head, grads, i, i);
  }

 private:
  // The list of a query. If an index is not a token, or the count is out of range: sets `wrong`, returns an empty list.
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

  void attend(int query, const Local& local) const {
    const List seen = list(query);
    const auto q = reinterpret_cast<typename P::Key*>(local.q);
    float *const p = local.p, *const out = local.out;
    L::load_query(head, query, q);
    L::clear(out, rows.value_width);
    L::scores(head, rows, seen, q, p);
    const auto weighed = L::weigh(p, seen.count);
    L::combine(seen, p, rows.v, rows.value_stride(), padded(rows.value_width), out);
    L::finish(head, query, out, weighed);
  }

  // Backward pass of one query. Per list entry, p is the weight, and slope is the gradient of the score.
  void attend_backward(const KvTable<P>& grads, int query, const Local& local) const {
    const List seen = list(query);
    const int width = padded(rows.width), value_width = padded(rows.value_width);
    const float* const out = head.row(head.problem.out, query);
    float *const q = local.q, *const g = local.out_grad, *const q_grad = local.q_grad;
    float *const p = local.p, *const slope = local.slope;
    L::load_query(head, query, q);
    L::load_row(g, head.row(head.problem.out_grad, query), rows.value_width, 1.f);
    L::clear(q_grad, rows.width);
    const float lse = head.problem.lse[head.index(query)] * kLog2e;
    float mean = 0.f;
    for (int c = 0; c < rows.value_width; ++c) mean += g[c] * out[c];
    L::scores(head, rows, seen, q, p);
    L::dots(seen, rows.v, g, value_width, slope);
    const F shift = S::splat(lse == -kInfinity ? kInfinity : lse);  // no visible key: every weight is 0
    for (int i = 0; i < seen.count; i += W) {
      const F x = S::exp2(S::load(p + i) - shift);
      S::store(p + i, x);
      S::store(slope + i, x * (S::load(slope + i) - S::splat(mean)));
    }
    L::combine(seen, slope, rows.k, width, width, q_grad);
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

}  // namespace attendless::ATTENDLESS_ISA
