// Sparsifiner's attention of one head. The connectivity of a query with all keys is a sparse combination of basis rows.
// The query attends to the `budget` keys of largest positive connectivity.
//
// Loop order: step 0 copies the basis, [ranks][tokens padded to 16], and packs keys and values. Step 1: prefix queries
// attend to all tokens in groups of kPrefix. The other queries are processed in groups of at_once():
//     for each query: connectivities (kScores keys at a time), choice     the basis stays in the cache
//     for each range of keys, for each query: scores                      the keys of the range stay in the L2 cache
//     for each query: tail, weights
//     for each range of keys, for each query: weighted sum of values      the values of the range stay in the L2 cache
// Lists, scores and results of the group stay in the thread's scratch memory.
//
// Most basis entries are 0, but adding whole vectors is faster than skipping zeros.
#pragma once

#include "own_list.hpp"
#include "select.hpp"

namespace attendless::ATTENDLESS_ISA {

template <int W, class P>
struct SparsifinerHead {
  using Args = Sparsifiner;
  using Numbers = P;
  using C = Channels<W>;
  using L = OwnList<W, P>;

  const Sparsifiner& args;
  const Head head;
  const int tokens, ranks, prefix, length, shares;
  const float* share;    // [tokens][ranks] of this image; null: no tail
  KvTable<P> rows;       // rows: tokens, then one per rank with the pooled values of the tail
  float *basis, *total;  // [ranks][tokens padded to 16]; Σ share over the tokens, per rank

  static int64_t table_rows(const Sparsifiner& s) { return s.problem.tokens + s.coefficients.width; }

  // Group sizes: prefix queries, which attend to all tokens; other queries.
  static constexpr int kPrefix = 4, kQueries = 64;

  // Buffers of one query: its list, the query, scores (later weights) per list entry, and the result.
  struct Query {
    int32_t* list;
    typename P::Key* q;
    float *p, *out;
  };

  struct Local {
    float* factor;       // coefficients that count
    const float** row;   // their basis rows
    float* found_value;  // connectivities above 0
    int32_t* found_key;
    float* mass;         // Σ share over the chosen keys, per rank
    int32_t* all;        // the list of all tokens, for prefix queries
    Cursor attend;
    Query query[kQueries];

    Local(const Sparsifiner& s, Cursor& memory)
        : factor(memory.floats(padded(s.coefficients.width))),
          row(memory.pointers(s.coefficients.width)),
          found_value(memory.floats(padded(s.problem.tokens))),
          found_key(memory.ints(padded(s.problem.tokens))),
          mass(memory.floats(s.coefficients.width)),
          all(memory.ints(s.problem.tokens)),
          attend(memory.part(attend_scratch<W, P>(s.problem))) {
      const int64_t longest = padded(s.budget + s.coefficients.width + 16);  // keys, tail, room for whole vectors
      for (Query& here : query) {
        here = {memory.ints(longest),
                reinterpret_cast<typename P::Key*>(memory.floats(KvTable<P>::key_words(s.problem.q.width))),
                memory.floats(longest), memory.floats(padded(s.problem.v.width))};
      }
    }
  };

  SparsifinerHead(const Sparsifiner& s, int image, int head_index, Cursor& memory)
      : args(s),
        head{s.problem, image, head_index},
        tokens(s.problem.tokens),
        ranks(s.coefficients.width),
        prefix(least(s.prefix, s.problem.tokens)),
        length(padded(tokens)),
        shares(parts_of_head(s.problem)),
        share(s.share.data ? s.share.of(image) : nullptr),
        rows(memory, table_rows(s), s.problem.q.width, s.problem.v.width),
        basis(memory.floats(int64_t(length) * ranks)),
        total(memory.floats(ranks)) {}

  static constexpr int kSteps = 2;
  int parts(int step) const {
    return step == 0 ? shares : prefix_parts() + (tokens - prefix + at_once() - 1) / at_once();
  }

  void work(int step, int part, const Local& local) const {
    if (step == 0) return prepare(part);
    if (part < prefix_parts()) return attend_prefix(part * kPrefix, local);
    const int first = prefix + (part - prefix_parts()) * at_once(), count = least(at_once(), tokens - first);
    if (attends()) return attend(first, count, local);
    for (int query = first; query < first + count; ++query) write(query, choose(query, local, local.query[0].list));
  }

  bool attends() const { return !args.indices; }
  int prefix_parts() const { return (prefix + kPrefix - 1) / kPrefix; }
  int at_once() const { return attends() && tokens > 2 * range() ? kQueries : kQueries / 4; }

  void backward(const KvTable<P>&, const Local&) const {}  // inference only

 private:
  void prepare(int part) const {
    const float* const given = args.basis.of(head.image);
    const Slice some(ranks, part, shares);
    for (int64_t r = some.begin; r < some.end; ++r) C::copy_padded(basis + r * length, given + r * tokens, tokens);
    if (!attends()) return;
    pack_tokens<W, P>(head, rows, part, shares);
    for (int r = some.begin; r < some.end && share; ++r) {
      C::copy_padded(rows.value(tokens + r), head.row(args.tail_values, r), rows.value_width);
      double sum = 0.;
      for (int i = 0; i < tokens; ++i) sum += share[int64_t(i) * ranks + r];
      total[r] = float(sum);
    }
  }

  // Choosing --------------------------------------------------------------------------------------------------------

  // Writes the keys of the largest positive connectivities to `list`, at most `budget`.
  INLINE List choose(int query, const Local& local, int32_t* list) const {
    float* const factor = local.factor;
    const float** const row = local.row;
    typename Select<W>::Positive found{local.found_value, local.found_key, 0};
    const float* const coefficient = head.row(args.coefficients, query);
    const float bound = args.top ? Select<W>::reached_by(args.top, coefficient, ranks, factor) : -kInfinity;
    int used = 0;
    for (int r = 0; r < ranks; ++r) {
      factor[used] = coefficient[r];
      row[used] = basis + int64_t(r) * length;
      used += coefficient[r] > args.tau && coefficient[r] >= bound;  // false for NaN
    }
    for (int first = 0; first < length; first += kScores) {
      float score[kScores];
      const int count = least(kScores, length - first);
      C::sum(score, used, count, [&](int i) { return row[i] + first; }, [&](int i) { return factor[i]; });
      found.add(score, count, first);
    }
    return {list, Select<W>::largest(found, args.budget, list)};
  }
  static constexpr int kScores = 128;  // keys per block of connectivities

  void write(int query, const List& seen) const {
    const int64_t index = head.index(query);
    int32_t* const to = args.indices + index * args.budget;
    args.counts[index] = seen.count;
    for (int i = 0; i < args.budget; ++i) to[i] = i < seen.count ? seen.row[i] : 0;
  }

  // Attending -------------------------------------------------------------------------------------------------------

  // The state of one query of a group.
  struct Visitor : Query {
    List seen;
    typename L::Weighed weighed;
    int done;  // list entries already visited
  };

  void attend(int first, int count, const Local& local) const {
    Visitor queries[kQueries];
    for (int i = 0; i < count; ++i) {
      Visitor& query = queries[i];
      static_cast<Query&>(query) = local.query[i];
      query.seen = choose(first + i, local, query.list);
      L::load_query(head, first + i, query.q);
      L::clear(query.out, rows.value_width);
    }
    by_ranges(queries, count, [&](const Query& query, const List& part, float* p) {
      L::scores(head, rows, part, query.q, p);
    });
    for (int i = 0; i < count; ++i) {
      Visitor& query = queries[i];
      if (share) query.seen.count += add_tail(first + i, query, query.seen.count, local.mass);
      query.weighed = L::weigh(query.p, query.seen.count);
    }
    by_ranges(queries, count, [&](const Query& query, const List& part, const float* p) {
      L::combine(part, p, rows.v, rows.value_stride(), padded(rows.value_width), query.out);
    });
    for (int i = 0; i < count; ++i) L::finish(head, first + i, queries[i].out, queries[i].weighed);
  }

  // For each range of keys, for each query: visits the part of its ascending list that lies in the range. Parts are
  // whole vectors, so that no score is computed twice. The last part has the rest of the list, and the tail.
  template <class Visit>
  INLINE void by_ranges(Visitor* queries, int count, Visit visit) const {
    for (int i = 0; i < count; ++i) queries[i].done = 0;
    for (int end = range();; end += range()) {
      for (int i = 0; i < count; ++i) {
        Visitor& query = queries[i];
        const int32_t* const row = query.seen.row;
        int next = end < tokens ? query.done : query.seen.count;
        while (next + W <= query.seen.count && row[next + W - 1] < end) next += W;
        visit(query, {row + query.done, next - query.done}, query.p + query.done);
        query.done = next;
      }
      if (end >= tokens) return;
    }
  }
  // Keys per range: 32K numbers (128 KB in fp32), a fraction of the L2 cache.
  int range() const { return 1 + (1 << 15) / padded(rows.width > rows.value_width ? rows.width : rows.value_width); }

  // Appends one list entry per rank whose keys were not all chosen: table row tokens + r, with the tail score of the
  // rank plus the log of the mass that is left. Returns the number of entries.
  INLINE int add_tail(int query, const Query& memory, int chosen, float* mass) const {
    int32_t* const list = memory.list;
    const float* const score = head.row(args.tail_scores, query);
    C::sum(mass, chosen, ranks, [&](int i) { return share + int64_t(list[i]) * ranks; },
           [](int) { return 1.f; });
    int n = chosen;
    for (int r = 0; r < ranks; ++r) {
      const float left = total[r] - mass[r];
      list[n] = tokens + r;
      memory.p[n] = (score[r] + __builtin_logf(left)) * kLog2e;
      n += left > 1e-4f * total[r];  // less is a rounding error
    }
    return n - chosen;
  }

  void attend_prefix(int first, const Local& local) const {
    const int count = least(kPrefix, prefix - first);
    if (!attends()) {
      for (int i = first; i < first + count; ++i) write(i, {nullptr, 0});
      return;
    }
    for (int i = 0; i < tokens; ++i) local.all[i] = i;
    attend_all<W, P>(head, rows, local.all, tokens, local.all + first, count, local.attend);
  }
};

}  // namespace attendless::ATTENDLESS_ISA
