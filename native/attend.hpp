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
    Lanes most = Lanes::splat(-kInfinity), total = Lanes::splat(0.f);
    for (int at = 0; at < count; at += kChunk) {
      const Chunk chunk(rows, list + at, count - at);
      const Lanes before = most;
      for (int r = 0; r < chunk.count; r += T::kBlock) {
        T::dot(chunk.key + r, chunk.bias + r, qT, rows.width, p + r * L, L, &most);
      }
      rescale(before, most, total, outT, rows.value_width);
      for (int r = 0; r < chunk.count; ++r) {
        Lanes x = Lanes::load(p + r * L);
        UNROLL for (int j = 0; j < T::kVectors; ++j) {
          x.at[j] = S::exp2(x.at[j] - finite(most.at[j]));
          total.at[j] += x.at[j];
        }
        x.store(p + r * L);
      }
      T::combine(chunk.value, p, chunk.count, rows.value_width, outT);
    }
    Lanes share;
    float log_total[L];
    UNROLL for (int j = 0; j < T::kVectors; ++j) {
      share.at[j] = total.at[j] == 0.f ? F{} : 1.f / total.at[j];  // nothing to look at gives 0, as PyTorch does
      S::store(log_total + j * S::kWidth, most.at[j]);
    }
    for (int i = 0; i < queries.count; ++i) {
      const float sum = total.at[i / S::kWidth][i % S::kWidth];
      *queries.lse[i] = log_total[i] * kLn2 + __builtin_logf(sum);
    }
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

  static INLINE void rescale(const Lanes& before, const Lanes& most, Lanes& total, float* outT, int width) {
    bool changed = false;
    UNROLL for (int j = 0; j < T::kVectors; ++j) changed |= S::any(most.at[j] != before.at[j]);
    if (!changed) return;
    Lanes factor;
    UNROLL for (int j = 0; j < T::kVectors; ++j) {
      factor.at[j] = S::exp2(before.at[j] - finite(most.at[j]));
      total.at[j] *= factor.at[j];
    }
    for (int c = 0; c < width; ++c) {
      Lanes x = Lanes::load(outT + c * L);
      UNROLL for (int j = 0; j < T::kVectors; ++j) x.at[j] *= factor.at[j];
      x.store(outT + c * L);
    }
  }
};

// Channels in lanes: for one query alone, whose list nobody shares.
template <int W>
struct Single {
  using S = Simd<W>;
  using F = typename S::F;

  static void forward(const Rows& rows, const int32_t* list, int count, const float* query, float* result, float* lse,
                      float scale, float* scratch) {
    const int width = padded(rows.width), value_width = padded(rows.value_width);
    float* const q = scratch;
    float* const out = q + width;
    float p[kChunk];
    for (int c = 0; c < width; ++c) q[c] = c < rows.width ? query[c] * (scale * kLog2e) : 0.f;
    std::memset(out, 0, sizeof(float) * value_width);
    float most = -kInfinity, total = 0.f;
    for (int at = 0; at < count; at += kChunk) {
      const Chunk chunk(rows, list + at, count - at);
      F high = S::splat(most);
      for (int r = 0; r < chunk.count; r += W) {
        const F s = dots(chunk.key + r, q, width) + S::load(chunk.bias + r);
        high = S::max(high, s);
        S::store(p + r, s);
      }
      for (int r = chunk.count; r < kChunk; ++r) p[r] = -kInfinity;
      const float before = most;
      most = S::largest(high);
      const float base = most == -kInfinity ? 0.f : most;
      if (most != before) {
        const F factor = S::exp2(S::splat(before - base));
        total *= factor[0];
        for (int c = 0; c < value_width; c += W) S::store(out + c, S::load(out + c) * factor);
      }
      F sum{};
      for (int r = 0; r < kChunk; r += W) {
        const F x = S::exp2(S::load(p + r) - S::splat(base));
        sum += x;
        S::store(p + r, x);
      }
      total += S::sum(sum);
      int c = 0;
      for (; c + 8 * W <= value_width; c += 8 * W) combine<8>(chunk, p, out, c);
      for (; c + 2 * W <= value_width; c += 2 * W) combine<2>(chunk, p, out, c);
      for (; c < value_width; c += W) combine<1>(chunk, p, out, c);
    }
    const float share = total == 0.f ? 0.f : 1.f / total;
    for (int c = 0; c < rows.value_width; ++c) result[c] = out[c] * share;
    *lse = most * kLn2 + __builtin_logf(total);
  }

 private:
  // The dot products of W rows with q, one in each lane.
  static INLINE F dots(const float* const* row, const float* q, int width) {
    F sum[W];
    UNROLL for (int i = 0; i < W; ++i) sum[i] = F{};
    for (int c = 0; c < width; c += W) {
      const F x = S::load(q + c);
      UNROLL for (int i = 0; i < W; ++i) sum[i] += x * S::load(row[i] + c);
    }
    S::transpose(sum);
    UNROLL for (int half = W / 2; half; half /= 2) {
      UNROLL for (int i = 0; i < half; ++i) sum[i] += sum[i + half];
    }
    return sum[0];
  }

  template <int K>
  static INLINE void combine(const Chunk& chunk, const float* p, float* out, int c) {
    F sum[K];
    UNROLL for (int i = 0; i < K; ++i) sum[i] = S::load(out + c + i * W);
    for (int r = 0; r < chunk.count; ++r) {
      const F weight = S::splat(p[r]);
      UNROLL for (int i = 0; i < K; ++i) sum[i] += weight * S::load(chunk.value[r] + c + i * W);
    }
    UNROLL for (int i = 0; i < K; ++i) S::store(out + c + i * W, sum[i]);
  }
};

// Both, by the size of the group: a few queries alone, up to eight in half the lanes, up to sixteen in all.
template <int W>
struct Attend {
  using Full = Group<Tile<W, kGroup / W>>;
  using Half = Group<Tile<(W < 8 ? W : 8), 8 / (W < 8 ? W : 8)>>;
  static constexpr int kAlone = 4;

  static void forward(const Rows& rows, const int32_t* list, int count, const Queries& queries, float scale,
                      float* scratch) {
    if (queries.count > 8) return Full::forward(rows, list, count, queries, scale, scratch);
    if (queries.count > kAlone) return Half::forward(rows, list, count, queries, scale, scratch);
    for (int i = 0; i < queries.count; ++i) {
      Single<W>::forward(rows, list, count, queries.q[i], queries.out[i], queries.lse[i], scale, scratch);
    }
  }

  static void backward(const Rows& rows, const Rows& grads, const int32_t* list, int count, const Queries& queries,
                       float scale, float* scratch) {
    const auto backward = queries.count > 8 ? Full::backward : Half::backward;
    backward(rows, grads, list, count, queries, scale, scratch);
  }
};

}  // namespace attendless::ATTENDLESS_UNIT
