// Softmax attention of one group of queries over one list of keys, with one query per lane: forward and backward pass.
//
// Forward loop order (online softmax):
//     for each chunk of kChunk keys
//         scores [keys][lanes] = K qT, by Tile::dot
//         update the running maximum; rescale sums and results if the maximum has grown by more than 8
//         weights = 2^(score - base); bf16: rounded, two keys per word
//         results [lanes][value channels] += weights · V, by Weigh::add
//     for each blur: results += mass · scale · q H
//     divide the results by the sum of the weights
// The working set of a chunk stays in the L1 cache, and scratch memory does not grow with the list.
//
// Scores are in base 2: log2 e is folded into the queries (bf16: into the factor of the scores) and into the biases.
#pragma once

#include "bytes.hpp"
#include "tile.hpp"
#include "weigh.hpp"

namespace attendless::ATTENDLESS_ISA {

template <class T, class P>
struct Group {
  using S = typename T::S;
  using Key = typename P::Key;
  using Value = typename P::Value;
  using Score = typename P::Score;
  using Word = typename WordOf<Score>::Word;
  using Weight = typename WordOf<Value>::Word;
  using N = Words<S::kWidth, Value>;
  using Rows = Weigh<S::kWidth, Value>;
  using F = typename S::F;
  using Lanes = typename T::Lanes;
  static constexpr int L = T::kLanes;

  // Scratch memory. Shapes, with channels padded to 16 words:
  //     keysT    [key channels][L]     queries
  //     valuesT  [value channels][L]   backward: output gradients; bf16 forward: q H, as [L][value channels]
  //     scores   [kChunk][L]           scores, then weights
  //     keys     [L][key channels]     backward: queries; forward: mass · q (fp32) or bf16 queries (int8), transposed
  //     grads    [key channels][L]     backward: query gradients
  //     values   [L][value channels]   forward: results; backward: output gradients
  //     slopes   [kChunk][L]           backward: gradients of the scores
  //     turns    [key channels][L]     backward, per blur: H times the output gradients, then mass · q
  //     weights  [kChunk / 2][L]       bf16: weights of two keys per word
  struct Memory {
    float *keysT, *valuesT, *scores;
    float *keys, *grads, *values, *slopes, *turns[2];
    uint32_t* weights;
    INLINE Memory(Cursor& memory, int width, int value_width)
        : keysT(memory.floats(L * padded(width))),
          valuesT(memory.floats(L * padded(value_width))),
          scores(memory.floats(L * kChunk)),
          keys(memory.floats(L * padded(width))),
          grads(memory.floats(L * padded(width))),
          values(memory.floats(L * padded(value_width))),
          slopes(memory.floats(L * kChunk)),
          weights(reinterpret_cast<uint32_t*>(memory.floats(P::kRounds ? L * kChunk / 2 : 0))) {
      for (float*& turn : turns) turn = memory.floats(L * (padded(width) + kGroup));
    }
  };

  static void forward(const KvTable<P>& rows, const int32_t* list, int count, const Queries<P>& queries, float scale,
                      const Blurs<P>& blurs, Cursor scratch) {
    const Memory memory(scratch, rows.width, rows.value_width);
    const int score_words = words<Score>(rows.width), value_width = padded(rows.value_width);
    Word* const qT = reinterpret_cast<Word*>(memory.keysT);
    float *const out = memory.values, *const p = memory.scores;
    Lanes factor = Lanes::splat(scale * kLog2e);  // multiplies the scores; in fp32, `gather` applies it to the queries
    Weight* const halves = reinterpret_cast<Weight*>(P::kBytes ? memory.keys : memory.keysT);
    if constexpr (P::kRounds) {
      T::gather(queries.q, queries.count, KvTable<P>::key_words(rows.width), halves);
      UNROLL for (int j = 0; j < T::kVectors && P::kBytes; ++j) {
        factor.at[j] *= Bytes<S::kWidth>::of_queries(halves + j * S::kWidth, score_words, L, qT + j * S::kWidth);
      }
    } else {
      T::gather(queries.q, queries.count, rows.width, scale * kLog2e, qT);
    }
    std::memset(out, 0, sizeof(float) * L * value_width);
    Lanes most = Lanes::splat(-kInfinity), base = most, sums[3];
    UNROLL for (int i = 0; i < 3; ++i) sums[i] = Lanes::splat(0.f);
    Lanes& total = sums[0];
    for (int at = 0; at < count; at += kChunk) {
      const Chunk<P> chunk(rows, list + at, count - at);
      for (int r = 0; r < chunk.count; r += T::kBlock) {
        if (rows.distant) prefetch_rows(rows, list + at + kChunk + r, least(T::kBlock, count - at - kChunk - r));
        T::template dot<Score>(chunk.key + r, chunk.starts(r), qT, score_words, p + r * L, L);
      }
      for (int r = 0; r < chunk.count; ++r) {
        Lanes x = Lanes::load(p + r * L);
        UNROLL for (int j = 0; j < T::kVectors; ++j) {
          if constexpr (P::kBytes) x.at[j] *= chunk.scale[r];
          if constexpr (P::kRounds) x.at[j] = x.at[j] * factor.at[j] + chunk.bias[r];
          most.at[j] = S::max(most.at[j], x.at[j]);
        }
        if constexpr (P::kRounds) x.store(p + r * L);
      }
      rescale(base, most, sums, out, value_width);
      const Weight* const w = weights(p, chunk.count, base, total, memory);
      for (int b = 0; b < blurs.count; ++b) add_mass(blurs.at[b], at, chunk.count, w, sums[1 + b]);
      weigh(chunk.value, w, chunk.count, out, value_width);
    }
    for (int b = 0; b < blurs.count; ++b) {
      if constexpr (P::kRounds) {
        float* const turned = memory.valuesT;
        std::memset(turned, 0, sizeof(float) * L * value_width);
        weigh(blurs.at[b].slope, halves, rows.width, turned, value_width);
        add_turned(turned, sums[1 + b], scale, value_width, out);
      } else {
        scaled(qT, rows.width, sums[1 + b], kLn2, memory.keys);
        weigh(blurs.at[b].slope, memory.keys, rows.width, out, value_width);
      }
    }
    float share[L], lse[L];
    UNROLL for (int j = 0; j < T::kVectors; ++j) {
      // A query without a visible key has result 0, as in PyTorch.
      S::store(share + j * S::kWidth, total.at[j] == 0.f ? F{} : 1.f / total.at[j]);
      S::store(lse + j * S::kWidth, (base.at[j] + S::log2(total.at[j])) * kLn2);
    }
    for (int i = 0; i < queries.count; ++i) {
      *queries.lse[i] = lse[i];
      multiply(out + i * value_width, share[i], rows.value_width, queries.out[i]);
    }
  }

  // Adds key, value and bias gradients to `grads`, which has the same rows as `rows`, and writes the gradient of each
  // query. `repeats`: the list may name a row more than once.
  //
  // Recomputes the weights from `lse`, chunk by chunk. With g the output gradient of a query, the gradient of a score
  // is weight · (g · v - g · out). Rows of a blur also add the derivative of the correction, g · (scale · q H), to g ·
  // v.
  static void backward(const KvTable<P>& rows, const KvTable<P>& grads, const int32_t* list, int count,
                       const Queries<P>& queries, float scale, bool repeats, const Blurs<P>& blurs, Cursor scratch) {
    const int width = padded(rows.width), value_width = padded(rows.value_width);
    const Memory memory(scratch, rows.width, rows.value_width);
    float *const qT = memory.keysT, *const q = memory.keys, *const q_gradT = memory.grads;
    float *const gT = memory.valuesT, *const g = memory.values;
    float *const p = memory.scores, *const slope = memory.slopes;
    T::gather(queries.q, queries.count, rows.width, scale * kLog2e, qT);
    T::gather(queries.out_grad, queries.count, rows.value_width, 1.f, gT);
    std::memset(q, 0, sizeof(float) * L * width);
    std::memset(g, 0, sizeof(float) * L * value_width);
    std::memset(q_gradT, 0, sizeof(float) * L * width);
    float shift[L], mean[L];
    for (int i = 0; i < L; ++i) {
      shift[i] = kInfinity;  // unused lane, or query without a visible key: every weight is 0
      mean[i] = 0.f;
      if (i >= queries.count) continue;
      if (*queries.lse[i] != -kInfinity) shift[i] = *queries.lse[i] * kLog2e;
      for (int c = 0; c < rows.width; ++c) q[i * width + c] = queries.q[i][c] * scale;
      for (int c = 0; c < rows.value_width; ++c) {
        g[i * value_width + c] = queries.out_grad[i][c];
        mean[i] += queries.out_grad[i][c] * queries.out[i][c];
      }
    }
    const Lanes shifts = Lanes::load(shift), means = Lanes::load(mean);
    Lanes mass[2], gain[2];
    for (int b = 0; b < blurs.count; ++b) {
      mass[b] = Lanes::splat(0.f);
      gain[b] = turn(blurs.at[b].slope, qT, gT, rows, memory.turns[b]);
    }
    for (int at = 0; at < count; at += kChunk) {
      const Chunk<P> chunk(rows, list + at, count - at), grad(grads, list + at, count - at);
      for (int r = 0; r < chunk.count; r += T::kBlock) {
        T::dot(chunk.key + r, chunk.bias + r, qT, rows.width, p + r * L, L);
        T::dot(chunk.value + r, nullptr, gT, rows.value_width, slope + r * L, L);
      }
      for (int b = 0; b < blurs.count; ++b) {
        const Blur<P>& blur = blurs.at[b];
        for (int r = most_of(blur.begin - at, 0); r < least(blur.end - at, chunk.count); ++r) {
          add(slope + r * L, gain[b]);
        }
      }
      for (int r = 0; r < chunk.count; ++r) {
        Lanes x = Lanes::load(p + r * L), y = Lanes::load(slope + r * L);
        F sum{};
        UNROLL for (int j = 0; j < T::kVectors; ++j) {
          x.at[j] = S::exp2(x.at[j] - shifts.at[j]);
          y.at[j] = x.at[j] * (y.at[j] - means.at[j]);
          sum += y.at[j];
        }
        x.store(p + r * L);
        y.store(slope + r * L);
        grads.bias[list[at + r]] += S::sum(sum);
      }
      for (int b = 0; b < blurs.count; ++b) add_mass(blurs.at[b], at, chunk.count, p, mass[b]);
      T::combine(chunk.key, slope, chunk.count, rows.width, q_gradT);
      T::scatter(grad.value, p, chunk.count, repeats, g, queries.count, value_width);
      T::scatter(grad.key, slope, chunk.count, repeats, q, queries.count, width);
    }
    for (int b = 0; b < blurs.count; ++b) {
      for (int c = 0; c < rows.width; ++c) {
        Lanes x = Lanes::load(memory.turns[b] + c * L);
        UNROLL for (int j = 0; j < T::kVectors; ++j) x.at[j] *= mass[b].at[j];
        add(q_gradT + c * L, x);
      }
      scaled(qT, rows.width, mass[b], kLn2, memory.turns[b]);
      T::scatter(blurs.at[b].grad, memory.turns[b], rows.width, false, g, queries.count, value_width);
    }
    T::spread(queries.q_grad, queries.count, rows.width, Lanes::splat(scale), q_gradT);
  }

 private:
  static INLINE void prefetch_rows(const KvTable<P>& rows, const int32_t* list, int count) {
    for (int i = 0; i < count; ++i) {
      prefetch(rows.key(list[i]), rows.width);
      prefetch(rows.value(list[i]), rows.value_width);
    }
  }

  static INLINE void weigh(const Value* const* row, const Weight* p, int count, float* out, int width) {
    constexpr int Q = Rows::kQueries;
    static_assert(L % Q == 0);
    for (int i = 0; i < L; i += Q) Rows::template add<Q>(row, p + i, L, count, out + i * width, width);
  }

  // Computes the weights 2^(score - base) and adds them to `total`. fp32 weights replace the scores; bf16 weights are
  // rounded and packed, two rows per word. The weight after an odd last row is 0.
  static INLINE const Weight* weights(float* p, int count, const Lanes& base, Lanes& total,
                                      [[maybe_unused]] const Memory& memory) {
    const auto weight = [&](int r, int j) INLINE_LAMBDA {
      return N::exp2(S::load(p + r * L + j * S::kWidth) - S::finite(base.at[j]));
    };
    if constexpr (P::kRounds) {
      if (count % 2) Lanes::splat(-kInfinity).store(p + count * L);
      const auto ones = N::splat(kOnes);
      for (int r = 0; r < count; r += 2) {
        UNROLL for (int j = 0; j < T::kVectors; ++j) {
          const auto both = N::rounded(weight(r, j), weight(r + 1, j));
          total.at[j] = N::add(total.at[j], both, ones);
          N::store(memory.weights + r / 2 * L + j * S::kWidth, both);
        }
      }
      return memory.weights;
    } else {
      for (int r = 0; r < count; ++r) {
        UNROLL for (int j = 0; j < T::kVectors; ++j) {
          const F x = weight(r, j);
          total.at[j] += x;
          S::store(p + r * L + j * S::kWidth, x);
        }
      }
      return p;
    }
  }

  // out[lane][c] += turned[lane][c] · mass[lane] · scale
  static INLINE void add_turned(const float* turned, const Lanes& mass, float scale, int width, float* out) {
    float factor[L];
    mass.store(factor);
    for (int i = 0; i < L; ++i) {
      const F by = S::splat(factor[i] * scale);
      for (int c = i * width; c < (i + 1) * width; c += S::kWidth) {
        S::store(out + c, S::load(out + c) + S::load(turned + c) * by);
      }
    }
  }

  static INLINE void multiply(const float* x, float factor, int width, float* to) {
    int c = 0;
    for (; c + S::kWidth <= width; c += S::kWidth) S::store(to + c, S::load(x + c) * factor);
    for (; c < width; ++c) to[c] = x[c] * factor;
  }

  static INLINE int most_of(int a, int b) { return a > b ? a : b; }

  static INLINE void add(float* to, const Lanes& what) {
    Lanes x = Lanes::load(to);
    UNROLL for (int j = 0; j < T::kVectors; ++j) x.at[j] += what.at[j];
    x.store(to);
  }

  // to[c][lane] = xT[c][lane] · by[lane] · factor
  static INLINE void scaled(const float* xT, int width, const Lanes& by, float factor, float* to) {
    for (int c = 0; c < width; ++c) {
      Lanes x = Lanes::load(xT + c * L);
      UNROLL for (int j = 0; j < T::kVectors; ++j) x.at[j] *= by.at[j] * factor;
      x.store(to + c * L);
    }
  }

  // mass[lane] += the weights of the rows of `blur` in the chunk that starts at list position `at`.
  static INLINE void add_mass(const Blur<P>& blur, int at, int count, const Weight* p, Lanes& mass) {
    int r = most_of(blur.begin - at, 0);
    const int end = least(blur.end - at, count);
    if constexpr (P::kRounds) {
      const auto add = [&](uint32_t ones) INLINE_LAMBDA {
        UNROLL for (int j = 0; j < T::kVectors; ++j) {
          mass.at[j] = N::add(mass.at[j], N::load(p + r / 2 * L + j * S::kWidth), N::splat(ones));
        }
      };
      if (r < end && r % 2) add(kSecondOne), ++r;
      for (; r + 2 <= end; r += 2) add(kOnes);
      if (r < end) add(kFirstOne);
    } else {
      for (; r < end; ++r) {
        const Lanes x = Lanes::load(p + r * L);
        UNROLL for (int j = 0; j < T::kVectors; ++j) mass.at[j] += x.at[j];
      }
    }
  }

  // turnT[c][lane] = Σ_e slope[c][e] · gT[e][lane]. Returns scale · Σ_c q[c] · turnT[c] per lane: the derivative of
  // g · result with respect to the mass of the blur.
  static INLINE Lanes turn(const float* const* slope, const float* qT, const float* gT,
                           const KvTable<P>& rows, float* turnT) {
    Lanes sum = Lanes::splat(0.f);
    for (int c = 0; c < rows.width; c += T::kBlock) T::dot(slope + c, nullptr, gT, rows.value_width, turnT + c * L, L);
    for (int c = 0; c < rows.width; ++c) {
      const Lanes x = Lanes::load(qT + c * L), y = Lanes::load(turnT + c * L);
      UNROLL for (int j = 0; j < T::kVectors; ++j) sum.at[j] += x.at[j] * y.at[j] * kLn2;
    }
    return sum;
  }

  // Lazy rescaling. Weights are 2^(score - base). `base` is set to the running maximum only if a lane lags behind by
  // more than 8: weights up to 2^8 are as accurate, and most chunks then need no rescaling. If weights are rounded to
  // bf16, `base` is an integer, so that the rounding does not depend on `base`.
  static INLINE void rescale(Lanes& base, const Lanes& most, Lanes (&sums)[3], float* out, int width) {
    bool behind = false;
    UNROLL for (int j = 0; j < T::kVectors; ++j) behind |= S::any(most.at[j] > base.at[j] + 8.f);
    if (!behind) return;
    float factor[L];
    UNROLL for (int j = 0; j < T::kVectors; ++j) {
      const F next = P::kRounds ? S::whole(most.at[j]) : most.at[j];
      const F shrink = S::exp2(base.at[j] - S::finite(next));
      UNROLL for (int i = 0; i < 3; ++i) sums[i].at[j] *= shrink;
      S::store(factor + j * S::kWidth, shrink);
      base.at[j] = next;
    }
    for (int i = 0; i < L; ++i) multiply(out + i * width, factor[i], width, out + i * width);
  }
};

}  // namespace attendless::ATTENDLESS_ISA
