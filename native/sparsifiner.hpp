// Sparsifiner's attention of one head: each query scores the keys by a sparse combination of basis rows, keeps the
// best and attends to them.
//
// Connectivity is a sum of a few rows of the basis. They are spread out into plain rows first: adding whole vectors,
// mostly of zeros, is quicker than adding numbers one by one. A list lives in a thread's scratch for as long as its
// query is attended.
#pragma once

#include "listed.hpp"
#include "select.hpp"

namespace attendless::ATTENDLESS_UNIT {

template <int W>
struct SparsifinerHead {
  using Args = Sparsifiner;
  using C = Channels<W>;
  using L = Listed<W>;

  const Sparsifiner& args;
  const Head head;
  const int tokens, ranks, prefix, length;
  Rows rows;  // the tokens, then the pooled values of the tail
  float *basis, *total;

  static int64_t table_rows(const Sparsifiner& s) { return s.problem.tokens + s.coefficients.width; }
  static int64_t table_floats(const Sparsifiner& s) {
    return table_rows(s) * (padded(s.problem.q.width) + padded(s.problem.v.width) + 1) + 48 +
           padded(int64_t(s.problem.tokens)) * s.coefficients.width + 2 * padded(s.coefficients.width);
  }
  static int64_t thread_floats(const Sparsifiner& s) {
    const int64_t ranks = padded(s.coefficients.width), keys = padded(int64_t(s.problem.tokens));
    const int64_t choosing = 2 * (keys + 16) + 4 * ranks, seeing_all = keys;
    return choosing + seeing_all + 2 * longest(s) + group_scratch(s.problem.q.width, s.problem.v.width);
  }
  // Entries of a list at most, with room for whole vectors.
  static int64_t longest(const Sparsifiner& s) { return padded(s.budget + s.coefficients.width + 8); }

  SparsifinerHead(const Sparsifiner& s, int image, int head_index, Cursor& memory)
      : args(s),
        head{s.problem, image, head_index},
        tokens(s.problem.tokens),
        ranks(s.coefficients.width),
        prefix(least(s.prefix, s.problem.tokens)),
        length(padded(tokens)),
        rows(memory.rows(table_rows(s), s.problem)),
        basis(memory.floats(int64_t(length) * ranks)),
        total(memory.floats(ranks)) {}

  void prepare(Cursor) const {
    std::memset(basis, 0, sizeof(float) * length * ranks);
    for (int r = 0; r < ranks; ++r) {
      float* const row = basis + int64_t(r) * length;
      for (int i = args.basis.start[r]; i < args.basis.start[r + 1]; ++i) row[args.basis.member[i]] += args.weight[i];
    }
    if (!attends()) return;
    for (int i = 0; i < tokens; ++i) pack_token<W>(head, rows, i, i);
    for (int r = 0; r < ranks && args.share; ++r) {
      C::copy_padded(rows.value(tokens + r), head.row(args.tail_values, r), rows.value_width);
      double sum = 0.;
      for (int i = 0; i < tokens; ++i) sum += args.share[int64_t(i) * ranks + r];
      total[r] = float(sum);
    }
  }

  // Prefix queries, which see every token, a few at a time; then the others.
  static constexpr int kPrefix = 4, kQueries = 16;
  bool attends() const { return !args.indices; }
  int prefix_pieces() const { return (prefix + kPrefix - 1) / kPrefix; }
  int pieces() const { return prefix_pieces() + (tokens - prefix + kQueries - 1) / kQueries; }

  void forward(int piece, Cursor memory) const {
    if (piece < prefix_pieces()) return attend_prefix(piece * kPrefix, memory);
    const int first = prefix + (piece - prefix_pieces()) * kQueries, last = least(first + kQueries, tokens);
    for (int query = first; query < last; ++query) attends() ? attend(query, memory) : list(query, memory);
  }

  void backward(const Rows&, Cursor) const {}  // for inference

 private:
  // Choosing --------------------------------------------------------------------------------------------------------

  // The keys of the largest connectivities, at most `budget`; `memory` moves on behind the list, which has room for
  // the tail.
  INLINE List choose(int query, Cursor& memory) const {
    int32_t* const list = memory.ints(longest(args));
    Cursor scratch = memory;
    float* const factor = scratch.floats(ranks);
    const float** const row = reinterpret_cast<const float**>(scratch.floats(2 * ranks));
    const float* const coefficient = head.row(args.coefficients, query);
    int used = 0;
    for (int r = 0; r < ranks; ++r) {
      factor[used] = coefficient[r];
      row[used] = basis + int64_t(r) * length;
      used += coefficient[r] > args.tau;  // NaN is not
    }
    typename Select<W>::Positive found{scratch.floats(length + 8), scratch.ints(length + 8), 0};
    for (int first = 0; first < length; first += kScores) {
      float score[kScores];
      const int count = least(kScores, length - first);
      C::sum(score, used, count, [&](int i) { return row[i] + first; }, [&](int i) { return factor[i]; });
      found.add(score, count, first);
    }
    return {list, Select<W>::largest(found, args.budget, list)};
  }
  static constexpr int kScores = 128;  // at a time

  void list(int query, Cursor memory) const { write(query, choose(query, memory)); }

  void write(int query, const List& seen) const {
    const int64_t index = head.index(query);
    int32_t* const to = args.indices + index * args.budget;
    args.counts[index] = seen.count;
    for (int i = 0; i < args.budget; ++i) to[i] = i < seen.count ? seen.row[i] : 0;
  }

  // Attending -------------------------------------------------------------------------------------------------------

  void attend(int query, Cursor memory) const {
    List seen = choose(query, memory);
    float* const q = L::load_row(head.row(head.problem.q, query), rows.width, head.problem.scale * kLog2e, memory);
    float* const p = memory.floats(longest(args));
    float* const out = L::zeros(rows.value_width, memory);
    L::scores(rows, head.problem.bias, seen, q, p);
    if (args.share) seen.count += add_tail(query, seen, p, memory);
    const auto weighed = L::weigh(p, seen.count);
    L::combine(seen, p, rows.v, padded(rows.value_width), out);
    L::finish(head, query, out, weighed);
  }

  // Every rank that has something left which was not chosen joins the list as one more key, which stands for it.
  INLINE int add_tail(int query, const List& seen, float* p, Cursor memory) const {
    float* const mass = memory.floats(ranks);
    int32_t* const list = const_cast<int32_t*>(seen.row);
    const float* const score = head.row(args.tail_scores, query);
    C::sum(mass, seen.count, ranks, [&](int i) { return args.share + int64_t(list[i]) * ranks; },
           [](int) { return 1.f; });
    int n = seen.count;
    for (int r = 0; r < ranks; ++r) {
      const float left = total[r] - mass[r];
      list[n] = tokens + r;
      p[n] = (score[r] + __builtin_logf(left)) * kLog2e;
      n += left > 1e-4f * total[r];  // less is rounding
    }
    return n - seen.count;
  }

  void attend_prefix(int first, Cursor memory) const {
    const int count = least(kPrefix, prefix - first);
    if (!attends()) {
      for (int i = first; i < first + count; ++i) write(i, {nullptr, 0});
      return;
    }
    int32_t* const all = memory.ints(tokens);
    float* const scratch = memory.floats(group_scratch(rows.width, rows.value_width));
    for (int i = 0; i < tokens; ++i) all[i] = i;
    attend_all<W>(head, rows, all, tokens, all + first, count, scratch);
  }
};

}  // namespace attendless::ATTENDLESS_UNIT
