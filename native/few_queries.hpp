// Forward softmax attention of Q = 1, 2 or 4 queries over one list of keys, too few queries to fill the lanes. Lanes
// are channels in both products. A vector of scores holds R = W / Q keys × Q queries; lane i is key i / Q, query i % Q.
//
// The loop order is that of group.hpp: per chunk of kChunk keys, scores (R keys at a time), running maximum, weights,
// results by Weigh::add; then the blurs, and the division by the sum of the weights.
//
// Scratch memory: q [Q][key channels padded to 16 words], out [Q][value channels padded to 16], p [kChunk + 1][Q],
// turned [key channels][Q] with the queries transposed, more [Q][value channels] with q H.
#pragma once

#include "bytes.hpp"
#include "weigh.hpp"

namespace attendless::ATTENDLESS_ISA {

template <int W, int Q, class P>
struct FewQueries {
  using S = Simd<W>;
  using F = typename S::F;
  using I = typename S::I;
  using Key = typename P::Key;
  using Value = typename P::Value;
  using Score = typename P::Score;
  using N = Words<W, Score>;
  using Word = typename N::Word;
  using Weight = typename WordOf<Value>::Word;
  static constexpr int R = W / Q;

  static void forward(const KvTable<P>& rows, const int32_t* list, int count, const Queries<P>& queries, float scale,
                      const Blurs<P>& blurs, Cursor scratch) {
    const int width = padded(words<Score>(rows.width)), value_width = padded(rows.value_width);
    Word* const q = reinterpret_cast<Word*>(scratch.floats(Q * width));
    float* const out = scratch.floats(Q * value_width);
    float* const p = scratch.floats(Q * (kChunk + 1));
    float* const turned = scratch.floats(Q * rows.key_words(rows.width));
    float* const more = scratch.floats(P::kRounds ? Q * value_width : 0);
    Weight* const weights = P::kRounds ? reinterpret_cast<Weight*>(scratch.floats(Q * kChunk)) : (Weight*)p;
    float factor[Q];
    for (int i = 0; i < Q; ++i) {
      factor[i] = scale * kLog2e;
      if constexpr (P::kBytes) {
        factor[i] *= Bytes<W>::of_query(queries.q[i], rows.width, q + i * width);
      } else if constexpr (P::kRounds) {
        std::memcpy(q + i * width, queries.q[i], sizeof(Word) * width);
      } else {
        for (int c = 0; c < width; ++c) q[i * width + c] = c < rows.width ? queries.q[i][c] * factor[i] : 0.f;
      }
    }
    std::memset(out, 0, sizeof(float) * Q * value_width);
    F most = S::splat(-kInfinity), base = most, total{}, mass[2] = {};
    for (int at = 0; at < count; at += kChunk) {
      const Chunk<P> chunk(rows, list + at, count - at);
      for (int r = 0; r < chunk.count; r += R) {
        const F s = scores(chunk, r, q, width, factor);
        most = S::max(most, s);
        S::store(p + r * Q, s);
      }
      for (int i = chunk.count * Q; i % W; ++i) p[i] = -kInfinity;  // masks the repeated keys in the last vector
      if (S::any(most > base + 8.f)) {
        for (int i = Q; i < W; i *= 2) most = S::max(most, S::rotate(most, i));  // maximum over the R lanes of a query
        const F next = P::kRounds ? S::whole(most) : most, shrink = S::exp2(base - S::finite(next));
        total *= shrink;
        for (F& each : mass) each *= shrink;
        base = next;
        for (int i = 0; i < Q; ++i) {
          for (int c = 0; c < value_width; c += W) {
            float* const here = out + i * value_width + c;
            S::store(here, S::load(here) * shrink[i]);
          }
        }
      }
      for (int i = 0; i < chunk.count * Q; i += W) {
        F x = S::exp2(S::load(p + i) - S::finite(base));
        if constexpr (P::kRounds) x = S::nearest_half(x);
        total += x;
        for (int b = 0; b < blurs.count; ++b) {
          const I key = lanes_of_keys() + (at + i / Q);
          mass[b] += (key >= blurs.at[b].begin) & (key < blurs.at[b].end) ? x : F{};
        }
        S::store(p + i, x);
      }
      if constexpr (P::kRounds) pack(p, chunk.count, weights);
      Weigh<W, Value>::template add<Q>(chunk.value, weights, Q, chunk.count, out, value_width);
    }
    for (int b = 0; b < blurs.count; ++b) {
      for (int i = Q; i < W; i *= 2) mass[b] += S::rotate(mass[b], i);
      if constexpr (P::kRounds) {
        Weight* const qT = reinterpret_cast<Weight*>(turned);
        for (int i = 0; i < Q; ++i) {
          for (int c = 0; c < words<Key>(rows.width); ++c) qT[c * Q + i] = queries.q[i][c];
        }
        std::memset(more, 0, sizeof(float) * Q * value_width);
        Weigh<W, Value>::template add<Q>(blurs.at[b].slope, qT, Q, rows.width, more, value_width);
        for (int i = 0; i < Q; ++i) {
          const F by = S::splat(mass[b][i] * scale);
          for (int c = i * value_width; c < (i + 1) * value_width; c += W) {
            S::store(out + c, S::load(out + c) + S::load(more + c) * by);
          }
        }
      } else {
        for (int i = 0; i < Q; ++i) {
          for (int c = 0; c < rows.width; ++c) turned[c * Q + i] = q[i * width + c] * (mass[b][i] * kLn2);
        }
        Weigh<W>::template add<Q>(blurs.at[b].slope, turned, Q, rows.width, out, value_width);
      }
    }
    for (int i = Q; i < W; i *= 2) total += S::rotate(total, i);
    const F lse = (base + S::log2(total)) * kLn2;
    for (int i = 0; i < Q; ++i) {
      const float share = total[i] == 0.f ? 0.f : 1.f / total[i];
      for (int c = 0; c < rows.value_width; ++c) queries.out[i][c] = out[i * value_width + c] * share;
      *queries.lse[i] = lse[i];
    }
  }

 private:
  // The scores of Q queries for R keys of a chunk, one per lane. W accumulators, each reduced across lanes at the end.
  static INLINE F scores(const Chunk<P>& chunk, int first, const Word* q, int width, const float* factor) {
    typename N::Sum sum[W];
    UNROLL for (int i = 0; i < W; ++i) sum[i] = typename N::Sum{};
    for (int c = 0; c < width; c += W) {
      typename N::Vec x[Q];
      UNROLL for (int i = 0; i < Q; ++i) x[i] = N::load(q + i * width + c);
      UNROLL for (int r = 0; r < R; ++r) {
        const typename N::Vec k = N::load(chunk.key[first + r] + c);
        UNROLL for (int i = 0; i < Q; ++i) sum[r * Q + i] = N::add(sum[r * Q + i], x[i], k);
      }
    }
    F part[W], bias{};
    UNROLL for (int i = 0; i < W; ++i) {
      part[i] = S::floats(sum[i]);
      bias[i] = chunk.bias[first + i / Q];
    }
    F score = S::sums(part);
    if constexpr (P::kBytes) {
      UNROLL for (int i = 0; i < W; ++i) score[i] = (score[i] + float(chunk.offset[first + i / Q])) * chunk.scale[first + i / Q];
    }
    if constexpr (P::kRounds) {
      UNROLL for (int i = 0; i < W; ++i) score[i] *= factor[i % Q];
    }
    return score + bias;
  }

  // Packs the weights of `count` keys, two keys per word. p has room for one more key.
  static INLINE void pack(float* p, int count, uint32_t* to) {
    for (int i = 0; i < Q && count % 2; ++i) p[count * Q + i] = 0.f;
    for (int r = 0; r < count; r += 2) {
      for (int i = 0; i < Q; ++i) to[r / 2 * Q + i] = pair_of(p[r * Q + i], p[(r + 1) * Q + i]);
    }
  }

  // The key of each lane, from 0 to R - 1.
  static INLINE I lanes_of_keys() {
    I key{};
    UNROLL for (int i = 0; i < W; ++i) key[i] = i / Q;
    return key;
  }
};

}  // namespace attendless::ATTENDLESS_ISA
