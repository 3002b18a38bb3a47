// Access to one head of one image in the caller's tensors.
//     Head           row pointers into strided tensors
//     Channels       copies and sums over the channels of rows
//     pack_*         copies keys and values into a KvTable, padded, and converts the element type
//     attend_all*    attends from any number of queries to one list, kGroup queries at a time
#pragma once

#include "attend.hpp"
#include "kernels.hpp"

namespace attendless::ATTENDLESS_ISA {

// Scratch copies for a group of queries in bf16: queries [kGroup][channels padded to 16 words], results
// [kGroup][channels] in fp32. Null if the kernel reads or writes the caller's rows directly.
template <class P>
struct Aside {
  typename P::Key* q = nullptr;
  float* out = nullptr;

  INLINE Aside() {}
  INLINE Aside(const Problem& problem, Cursor& memory) {
    if constexpr (P::kRounds) {
      const int64_t words = int64_t(kGroup) * KvTable<P>::key_words(problem.q.width);
      if (!whole_words(problem.q)) q = reinterpret_cast<typename P::Key*>(memory.floats(words));
      out = memory.floats(int64_t(kGroup) * problem.out.width);
    }
  }

 private:
  // Whether the caller's rows already consist of aligned words and need no padding.
  static INLINE bool whole_words(const View& q) {
    using Key = typename P::Key;
    constexpr int kNumbers = WordOf<Key>::kNumbers;
    return q.element == kElement<Key> && padded(words<Key>(q.width)) * kNumbers == q.width &&
           reinterpret_cast<uintptr_t>(q.data) % 4 == 0 && (q.batch | q.head | q.token) % kNumbers == 0;
  }
};

// Number of parts of a step of one head: about four parts per thread over all heads, for load balance; 1 for one
// thread.
INLINE int parts_of_head(const Problem& problem) {
  const int heads = problem.batch * problem.heads;
  return problem.threads > 1 ? (4 * problem.threads + heads - 1) / heads : 1;
}

// The range of items of one of `parts` equal parts.
struct Slice {
  int begin, end;
  INLINE Slice(int count, int part, int parts)
      : begin(int(int64_t(count) * part / parts)), end(int(int64_t(count) * (part + 1) / parts)) {}
};

// Row pointers of one head into the caller's tensors.
struct Head {
  const Problem& problem;
  int image, head;

  template <class T = float>
  INLINE T* row(const View& view, int64_t token) const {
    return static_cast<T*>(view.data) + image * view.batch + head * view.head + token * view.token;
  }
  // Calls `visit` with a pointer to fp32 or bf16, according to the element type of the tensor.
  template <class Visit>
  INLINE void at(const View& view, int64_t token, Visit visit) const {
    if (view.element == Element::bf16) {
      visit(row<Bf16>(view, token));
    } else {
      visit(row(view, token));
    }
  }
  INLINE int64_t index(int64_t token) const {
    return (int64_t(image) * problem.heads + head) * problem.tokens + token;
  }
  INLINE const float* biases() const {
    return problem.bias ? problem.bias + int64_t(image) * problem.tokens : nullptr;
  }

  template <class P>
  INLINE Queries<P> queries(const int32_t* token, int count, const Aside<P>& aside = {}) const {
    Queries<P> group;
    group.count = count;
    for (int i = 0; i < count; ++i) {
      using Word = typename Queries<P>::Word;
      group.q[i] = aside.q ? reinterpret_cast<const Word*>(aside.q) + i * KvTable<P>::key_words(problem.q.width)
                           : reinterpret_cast<const Word*>(row<typename P::Key>(problem.q, token[i]));
      group.out[i] = aside.out ? aside.out + i * problem.out.width : row(problem.out, token[i]);
      group.lse[i] = problem.lse + index(token[i]);
      if (problem.out_grad.data) {
        group.out_grad[i] = row(problem.out_grad, token[i]);
        group.q_grad[i] = row(problem.q_grad, token[i]);
      }
    }
    return group;
  }
};

// Vectorised operations over the channels of rows.
template <int W>
struct Channels {
  using S = Simd<W>;

  // Copies `width` numbers and converts between fp32 and bf16. Neither row needs padding.
  template <class To, class From>
  static INLINE void copy(To* to, const From* from, int width) {
    int c = 0;
    for (; c + W <= width; c += W) copy_vector(to + c, from + c);
    if (c == width) return;
    From rest[W] = {};
    To lane[W];
    for (int i = 0; c + i < width; ++i) rest[i] = from[c + i];
    copy_vector(lane, rest);
    for (int i = 0; c + i < width; ++i) to[c + i] = lane[i];
  }
  // Copies to a table row, padded with 0 to a multiple of 16 words.
  template <class To, class From>
  static INLINE void copy_padded(To* to, const From* from, int width) {
    copy(to, from, width);
    const int end = padded(words<To>(width)) * WordOf<To>::kNumbers;
    std::memset(static_cast<void*>(to + width), 0, sizeof(To) * size_t(end - width));
  }

  // to[c] = Σ_i factor(i) · from(i)[c]. Loops over blocks of channels, then rows: accumulators stay in registers.
  template <class From, class Factor>
  static INLINE void sum(float* to, int count, int width, From from, Factor factor) {
    int c = 0;
    for (; c + 8 * W <= width; c += 8 * W) sum_vectors<8>(to, c, count, from, factor);
    for (; c + 2 * W <= width; c += 2 * W) sum_vectors<2>(to, c, count, from, factor);
    for (; c + W <= width; c += W) sum_vectors<1>(to, c, count, from, factor);
    for (; c < width; ++c) {
      to[c] = 0.f;
      for (int i = 0; i < count; ++i) to[c] += factor(i) * value(from(i)[c]);
    }
  }

  // `add` and `dot_difference` take padded table rows: width is a multiple of 16.
  static INLINE void add(float* to, const float* from, float factor, int width) {
    for (int c = 0; c < width; c += W) S::store(to + c, S::load(to + c) + S::load(from + c) * factor);
  }
  // Σ_i a[i] · (b[i] - c[i])
  static INLINE float dot_difference(const float* a, const float* b, const float* c, int width) {
    typename S::F sum{};
    for (int i = 0; i < width; i += W) sum += S::load(a + i) * (S::load(b + i) - S::load(c + i));
    return S::sum(sum);
  }

 private:
  template <class To, class From>
  static INLINE void copy_vector(To* to, const From* from) {
    if constexpr (sizeof(To) == sizeof(From)) {
      std::memcpy(static_cast<void*>(to), from, sizeof(To) * W);
    } else {
      S::store(to, S::load(from));
    }
  }

  // Sums K vectors of channels. Keeps eight independent accumulators (several rows if K < 8), because a single FMA
  // chain is latency-bound.
  template <int K, class From, class Factor>
  static INLINE void sum_vectors(float* to, int c, int count, From from, Factor factor) {
    constexpr int R = 8 / K;
    typename S::F sum[R][K];
    UNROLL for (int r = 0; r < R; ++r) {
      UNROLL for (int j = 0; j < K; ++j) sum[r][j] = typename S::F{};
    }
    const auto add = [&](int i, typename S::F(&part)[K]) {
      const auto* const row = from(i) + c;
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

constexpr int kAhead = 16;  // prefetch distance in rows

INLINE void prefetch_token(const Head& head, int64_t token) {
  head.at(head.problem.k, token, [&](const auto* key) { prefetch(key, head.problem.k.width); });
  head.at(head.problem.v, token, [&](const auto* value) { prefetch(value, head.problem.v.width); });
}

template <int W, class P>
INLINE void pack_token(const Head& head, const KvTable<P>& rows, int64_t to, int64_t token) {
  using C = Channels<W>;
  head.at(head.problem.k, token, [&](const auto* key) { C::copy_padded(rows.key(to), key, rows.width); });
  head.at(head.problem.v, token, [&](const auto* value) { C::copy_padded(rows.value(to), value, rows.value_width); });
  rows.bias[to] = head.biases() ? head.biases()[token] * kLog2e : 0.f;
}

// Packs one of `parts` parts of a table with one row per token.
template <int W, class P>
INLINE void pack_tokens(const Head& head, const KvTable<P>& rows, int part, int parts) {
  const Slice tokens(head.problem.tokens, part, parts);
  for (int i = tokens.begin; i < tokens.end; ++i) pack_token<W, P>(head, rows, i, i);
}

// Copies one row of key, value and bias gradients to the caller's tensors.
template <int W>
INLINE void unpack_gradient(const Head& head, const KvTable<Single>& grads, int64_t from, int64_t token) {
  Channels<W>::copy(head.row(head.problem.k_grad, token), grads.key(from), grads.width);
  Channels<W>::copy(head.row(head.problem.v_grad, token), grads.value(from), grads.value_width);
  if (head.problem.bias_grad) head.problem.bias_grad[head.index(token)] = grads.bias[from];
}

// Scratch floats for `attend_all` and `attend_all_backward`.
template <int W, class P>
int64_t attend_scratch(const Problem& problem) {
  return counted([&](Cursor& memory) {
    Aside<P>(problem, memory);
    memory.part(Attend<W, P>::scratch(problem.q.width, problem.v.width));
  });
}

// Attends from `count` queries to the `keys` rows of one list, kGroup queries at a time.
template <int W, class P>
void attend_all(const Head& head, const KvTable<P>& rows, const int32_t* list, int keys, const int32_t* token, int count,
                Cursor scratch, const Blurs<P>& blurs = {}) {
  using C = Channels<W>;
  const View &q = head.problem.q, &out = head.problem.out;
  const Aside<P> aside(head.problem, scratch);
  for (int i = 0; i < count; i += kGroup, token += kGroup) {
    const Queries<P> queries = head.queries<P>(token, least(kGroup, count - i), aside);
    for (int j = 0; j < queries.count && aside.q; ++j) {
      auto* const to = aside.q + j * rows.key_stride();
      head.at(q, token[j], [&](const auto* query) { C::copy_padded(to, query, q.width); });
    }
    Attend<W, P>::forward(rows, list, keys, queries, head.problem.scale, blurs, scratch);
    for (int j = 0; j < queries.count && aside.out; ++j) {
      head.at(out, token[j], [&](auto* result) { C::copy(result, aside.out + j * out.width, out.width); });
    }
  }
}

template <int W>
void attend_all_backward(const Head& head, const KvTable<Single>& rows, const KvTable<Single>& grads,
                         const int32_t* list, int keys, const int32_t* token, int count, Cursor scratch,
                         const Blurs<Single>& blurs = {}) {
  for (int i = 0; i < count; i += kGroup) {
    const Queries<Single> queries = head.queries<Single>(token + i, least(kGroup, count - i));
    Attend<W, Single>::backward(rows, grads, list, keys, queries, head.problem.scale, head.problem.repeats, blurs,
                                scratch);
  }
}

}  // namespace attendless::ATTENDLESS_ISA
