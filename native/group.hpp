// One softmax over a list of keys for a group of queries that fill the lanes: forward, and backward.
//
// Keys are taken kChunk at a time: scores, the running maximum and sum, then the values, so that what is reused stays
// in the first-level cache and nothing grows with the list. Scores are kept in units of log 2, the factor folded into
// the queries and the biases.
#pragma once

#include "kv_table.hpp"
#include "tile.hpp"

namespace attendless::ATTENDLESS_ISA {

template <class T>
struct Group {
  using S = typename T::S;
  using F = typename S::F;
  using Lanes = typename T::Lanes;
  static constexpr int L = T::kLanes;

  // Scratch: a query's channels, values' channels and a chunk's scores, transposed or not; the last four are for the
  // backward pass.
  struct Memory {
    float *keysT, *valuesT, *scores;
    float *keys, *grads, *values, *slopes;
    INLINE Memory(Cursor& memory, int width, int value_width)
        : keysT(memory.floats(L * padded(width))),
          valuesT(memory.floats(L * padded(value_width))),
          scores(memory.floats(L * kChunk)),
          keys(memory.floats(L * padded(width))),
          grads(memory.floats(L * padded(width))),
          values(memory.floats(L * padded(value_width))),
          slopes(memory.floats(L * kChunk)) {}
  };

  static void forward(const KvTable& rows, const int32_t* list, int count, const Queries& queries, float scale,
                      Cursor scratch) {
    const Memory memory(scratch, rows.width, rows.value_width);
    float *const qT = memory.keysT, *const outT = memory.valuesT, *const p = memory.scores;
    T::gather(queries.q, queries.count, rows.width, scale * kLog2e, qT);
    std::memset(outT, 0, sizeof(float) * L * rows.value_width);
    Lanes most = Lanes::splat(-kInfinity), base = most, total = Lanes::splat(0.f);
    for (int at = 0; at < count; at += kChunk) {
      const Chunk chunk(rows, list + at, count - at);
      for (int r = 0; r < chunk.count; r += T::kBlock) {
        const float* ahead[2 * T::kBlock];
        for (int i = 0; i < T::kBlock; ++i) {
          ahead[i] = chunk.value[r + i];
          ahead[T::kBlock + i] = rows.key(list[least(at + r + i + T::kBlock, count - 1)]);
        }
        T::dot(chunk.key + r, chunk.bias + r, qT, rows.width, p + r * L, L, &most, ahead);
      }
      rescale(base, most, total, outT, rows.value_width);
      for (int r = 0; r < chunk.count; ++r) {
        Lanes x = Lanes::load(p + r * L);
        UNROLL for (int j = 0; j < T::kVectors; ++j) {
          x.at[j] = S::exp2(x.at[j] - S::finite(base.at[j]));
          total.at[j] += x.at[j];
        }
        x.store(p + r * L);
      }
      T::combine(chunk.value, p, chunk.count, rows.value_width, outT);
    }
    Lanes share;
    float lse[L];
    UNROLL for (int j = 0; j < T::kVectors; ++j) {
      share.at[j] = total.at[j] == 0.f ? F{} : 1.f / total.at[j];  // nothing to look at gives 0, as PyTorch does
      S::store(lse + j * S::kWidth, (base.at[j] + S::log2(total.at[j])) * kLn2);
    }
    for (int i = 0; i < queries.count; ++i) *queries.lse[i] = lse[i];
    T::spread(queries.out, queries.count, rows.value_width, share, outT);
  }

  // Adds to `grads` (the same rows as `rows`) and writes each query's gradient. `repeats`: the list may name a row more
  // than once.
  static void backward(const KvTable& rows, const KvTable& grads, const int32_t* list, int count,
                       const Queries& queries, float scale, bool repeats, Cursor scratch) {
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
      shift[i] = kInfinity;  // an unused lane, or a query that sees nothing: every weight is 0
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
    for (int at = 0; at < count; at += kChunk) {
      const Chunk chunk(rows, list + at, count - at), grad(grads, list + at, count - at);
      for (int r = 0; r < chunk.count; r += T::kBlock) {
        T::dot(chunk.key + r, chunk.bias + r, qT, rows.width, p + r * L, L);
        T::dot(chunk.value + r, nullptr, gT, rows.value_width, slope + r * L, L);
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
      T::combine(chunk.key, slope, chunk.count, rows.width, q_gradT);
      T::scatter(grad.value, p, chunk.count, repeats, g, queries.count, value_width);
      T::scatter(grad.key, slope, chunk.count, repeats, q, queries.count, width);
    }
    T::spread(queries.q_grad, queries.count, rows.width, Lanes::splat(scale), q_gradT);
  }

 private:
  // Weights are 2^(score - base). The base follows the largest score, but only once it lags far behind: until then
  // weights are large and no less exact, and what was summed can stay as it is.
  static INLINE void rescale(Lanes& base, const Lanes& most, Lanes& total, float* outT, int width) {
    bool behind = false;
    UNROLL for (int j = 0; j < T::kVectors; ++j) behind |= S::any(most.at[j] > base.at[j] + 8.f);
    if (!behind) return;
    Lanes factor;
    UNROLL for (int j = 0; j < T::kVectors; ++j) {
      factor.at[j] = S::exp2(base.at[j] - S::finite(most.at[j]));
      total.at[j] *= factor.at[j];
    }
    base = most;
    for (int c = 0; c < width; ++c) {
      Lanes x = Lanes::load(outT + c * L);
      UNROLL for (int j = 0; j < T::kVectors; ++j) x.at[j] *= factor.at[j];
      x.store(outT + c * L);
    }
  }
};

}  // namespace attendless::ATTENDLESS_ISA
