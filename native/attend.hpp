// One softmax over a list of keys, for a group of queries that share the list: forward, and backward.
//
// Keys are rows of a table, named by number. They are taken kChunk at a time: scores, the running maximum and sum, then
// the values, so that what is reused stays in the first-level cache and nothing grows with the list. Scores are kept in
// units of log 2, the factor folded into the queries and the biases.
#pragma once

#include "tile.hpp"

namespace attendless::ATTENDLESS_UNIT {

constexpr int kChunk = 48;  // a multiple of every Tile::kBlock and of every W
constexpr int kGroup = 16;  // queries at most in one tile of lanes

template <class N>
INLINE N padded(N count) {
  return (count + 15) / 16 * 16;
}

// A head's keys and values (or their gradients). Rows are padded with zeros to a multiple of 16 channels.
struct Rows {
  float *k, *v;
  float* bias;  // of each row: in units of log 2, or its gradient
  int width, value_width;
  INLINE float* key(int64_t row) const { return k + row * padded(width); }
  INLINE float* value(int64_t row) const { return v + row * padded(value_width); }
};

// Up to kGroup queries: where their rows lie in the caller's tensors.
struct Queries {
  int count;
  const float* q[kGroup];
  float *out[kGroup], *lse[kGroup];
  const float* out_grad[kGroup];
  float* q_grad[kGroup];

  // For the forward pass: those from `first` on, at most `size`; the last is repeated in what is left of `size`.
  INLINE Queries some(int first, int size) const {
    Queries part;
    part.count = least(size, count - first);
    for (int i = 0; i < size; ++i) {
      const int from = least(first + i, count - 1);
      part.q[i] = q[from];
      part.out[i] = out[from];
      part.lse[i] = lse[from];
    }
    return part;
  }
};

// The next kChunk keys of a list; the last is repeated so that micro-kernels may take whole blocks.
struct Chunk {
  int count;
  float *key[kChunk], *value[kChunk];
  float bias[kChunk];

  INLINE Chunk(const Rows& rows, const int32_t* list, int left) : count(least(kChunk, left)) {
    for (int i = 0; i < kChunk; ++i) {
      const int32_t row = list[least(i, count - 1)];
      key[i] = rows.key(row);
      value[i] = rows.value(row);
      bias[i] = rows.bias[row];
    }
  }
};

// Floats of scratch that any of the functions below needs.
INLINE int64_t group_scratch(int width, int value_width) {
  return int64_t(kGroup) * (3 * padded(width) + 2 * padded(value_width) + 2 * kChunk);
}

// Queries in lanes: for groups that fill them.
template <class T>
struct Group {
  using S = typename T::S;
  using F = typename S::F;
  using Lanes = typename T::Lanes;
  static constexpr int L = T::kLanes;

  static void forward(const Rows& rows, const int32_t* list, int count, const Queries& queries, float scale,
                      float* scratch) {
    float* const qT = scratch;
    float* const outT = qT + L * padded(rows.width);
    float* const p = outT + L * padded(rows.value_width);
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
          x.at[j] = S::exp2(x.at[j] - finite(base.at[j]));
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

  // Adds to `grads` (the same rows as `rows`) and writes each query's gradient.
  static void backward(const Rows& rows, const Rows& grads, const int32_t* list, int count, const Queries& queries,
                       float scale, float* scratch) {
    const int width = padded(rows.width), value_width = padded(rows.value_width);
    float* const qT = scratch;
    float* const q = qT + L * width;
    float* const q_gradT = q + L * width;
    float* const gT = q_gradT + L * width;
    float* const g = gT + L * value_width;
    float* const p = g + L * value_width;
    float* const slope = p + L * kChunk;
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
      T::scatter(grad.value, p, chunk.count, g, queries.count, value_width);
      T::scatter(grad.key, slope, chunk.count, q, queries.count, width);
    }
    T::spread(queries.q_grad, queries.count, rows.width, Lanes::splat(scale), q_gradT);
  }

 private:
  // A list with nothing to see so far has no maximum: its scores are shifted by 0 and stay at weight 0.
  static INLINE F finite(F most) { return most == -kInfinity ? F{} : most; }

  // Weights are 2^(score - base). The base follows the largest score, but only once it lags far behind: until then
  // weights are large and no less exact, and what was summed can stay as it is.
  static INLINE void rescale(Lanes& base, const Lanes& most, Lanes& total, float* outT, int width) {
    bool behind = false;
    UNROLL for (int j = 0; j < T::kVectors; ++j) behind |= S::any(most.at[j] > base.at[j] + 8.f);
    if (!behind) return;
    Lanes factor;
    UNROLL for (int j = 0; j < T::kVectors; ++j) {
      factor.at[j] = S::exp2(base.at[j] - finite(most.at[j]));
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

// Channels in lanes: for Q queries, too few to fill the lanes. A vector of scores holds R keys × Q queries.
template <int W, int Q>
struct Few {
  using S = Simd<W>;
  using F = typename S::F;
  static constexpr int R = W / Q;

  static void forward(const Rows& rows, const int32_t* list, int count, const Queries& queries, float scale,
                      float* scratch) {
    const int width = padded(rows.width), value_width = padded(rows.value_width);
    float* const q = scratch;
    float* const out = q + Q * width;
    float* const p = out + Q * value_width;
    for (int i = 0; i < Q; ++i) {
      for (int c = 0; c < width; ++c) q[i * width + c] = c < rows.width ? queries.q[i][c] * (scale * kLog2e) : 0.f;
    }
    std::memset(out, 0, sizeof(float) * Q * value_width);
    F most = S::splat(-kInfinity), base = most, total{};
    for (int at = 0; at < count; at += kChunk) {
      const Chunk chunk(rows, list + at, count - at);
      for (int r = 0; r < chunk.count; r += R) {
        const F s = dots(chunk.key + r, chunk.bias + r, q, width);
        most = S::max(most, s);
        S::store(p + r * Q, s);
      }
      for (int i = chunk.count * Q; i % W; ++i) p[i] = -kInfinity;  // repeated keys that fill the last vector
      if (S::any(most > base + 8.f)) {
        for (int i = Q; i < W; i *= 2) most = S::max(most, S::rotate(most, i));  // each query's over its R lanes
        const F factor = S::exp2(base - finite(most));
        total *= factor;
        base = most;
        for (int i = 0; i < Q; ++i) {
          for (int c = 0; c < value_width; c += W) {
            float* const here = out + i * value_width + c;
            S::store(here, S::load(here) * factor[i]);
          }
        }
      }
      for (int i = 0; i < chunk.count * Q; i += W) {
        const F x = S::exp2(S::load(p + i) - finite(base));
        total += x;
        S::store(p + i, x);
      }
      int c = 0;
      for (; c + R * W <= value_width; c += R * W) combine<R>(chunk, p, out, c, value_width);
      for (; c < value_width; c += W) combine<1>(chunk, p, out, c, value_width);
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
  static INLINE F finite(F most) { return most == -kInfinity ? F{} : most; }

  // The dot products of R rows with Q queries, one in each lane.
  static INLINE F dots(const float* const* row, const float* bias, const float* q, int width) {
    F sum[W], start;
    UNROLL for (int i = 0; i < W; ++i) {
      sum[i] = F{};
      start[i] = bias[i / Q];
    }
    for (int c = 0; c < width; c += W) {
      F x[Q];
      UNROLL for (int i = 0; i < Q; ++i) x[i] = S::load(q + i * width + c);
      UNROLL for (int r = 0; r < R; ++r) {
        const F k = S::load(row[r] + c);
        UNROLL for (int i = 0; i < Q; ++i) sum[r * Q + i] += x[i] * k;
      }
    }
    S::transpose(sum);
    UNROLL for (int half = W / 2; half; half /= 2) {
      UNROLL for (int i = 0; i < half; ++i) sum[i] += sum[i + half];
    }
    return sum[0] + start;
  }

  // K vectors of channels for all queries.
  template <int K>
  static INLINE void combine(const Chunk& chunk, const float* p, float* out, int c, int width) {
    F sum[Q][K];
    UNROLL for (int i = 0; i < Q; ++i) {
      UNROLL for (int j = 0; j < K; ++j) sum[i][j] = S::load(out + i * width + c + j * W);
    }
    for (int r = 0; r < chunk.count; ++r) {
      F value[K];
      UNROLL for (int j = 0; j < K; ++j) value[j] = S::load(chunk.value[r] + c + j * W);
      UNROLL for (int i = 0; i < Q; ++i) {
        const F weight = S::splat(p[r * Q + i]);
        UNROLL for (int j = 0; j < K; ++j) sum[i][j] += weight * value[j];
      }
    }
    UNROLL for (int i = 0; i < Q; ++i) {
      UNROLL for (int j = 0; j < K; ++j) S::store(out + i * width + c + j * W, sum[i][j]);
    }
  }
};

// Both, by the size of the group.
template <int W>
struct Attend {
  using Full = Group<Tile<W, kGroup / W>>;
  using Half = Group<Tile<(W < 8 ? W : 8), 8 / (W < 8 ? W : 8)>>;

  static void forward(const Rows& rows, const int32_t* list, int count, const Queries& queries, float scale,
                      float* scratch) {
    if (queries.count > 8) return Full::forward(rows, list, count, queries, scale, scratch);
    for (int i = 0; i < queries.count; i += 4) {
      const Queries four = queries.some(i, 4);
      const auto forward = four.count == 1 ? Few<W, 1>::forward : four.count == 2 ? Few<W, 2>::forward : Few<W, 4>::forward;
      forward(rows, list, count, four, scale, scratch);
    }
  }

  static void backward(const Rows& rows, const Rows& grads, const int32_t* list, int count, const Queries& queries,
                       float scale, float* scratch) {
    const auto backward = queries.count > 8 ? Full::backward : Half::backward;
    backward(rows, grads, list, count, queries, scale, scratch);
  }
};

}  // namespace attendless::ATTENDLESS_UNIT
