// One softmax over a list of keys for Q queries, too few to fill lanes: here the lanes are channels, and a vector of
// scores holds R keys × Q queries.
#pragma once

#include "kv_table.hpp"
#include "weigh.hpp"

namespace attendless::ATTENDLESS_ISA {

template <int W, int Q>
struct FewQueries {
  using S = Simd<W>;
  using F = typename S::F;
  using I = typename S::I;
  static constexpr int R = W / Q;

  static void forward(const KvTable& rows, const int32_t* list, int count, const Queries& queries, float scale,
                      const Blurs& blurs, Cursor scratch) {
    const int width = padded(rows.width), value_width = padded(rows.value_width);
    float* const q = scratch.floats(Q * width);
    float* const out = scratch.floats(Q * value_width);
    float* const p = scratch.floats(Q * kChunk);
    float* const turned = scratch.floats(Q * width);
    for (int i = 0; i < Q; ++i) {
      for (int c = 0; c < width; ++c) q[i * width + c] = c < rows.width ? queries.q[i][c] * (scale * kLog2e) : 0.f;
    }
    std::memset(out, 0, sizeof(float) * Q * value_width);
    F most = S::splat(-kInfinity), base = most, total{}, mass[2] = {};
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
        const F factor = S::exp2(base - S::finite(most));
        total *= factor;
        for (F& each : mass) each *= factor;
        base = most;
        for (int i = 0; i < Q; ++i) {
          for (int c = 0; c < value_width; c += W) {
            float* const here = out + i * value_width + c;
            S::store(here, S::load(here) * factor[i]);
          }
        }
      }
      for (int i = 0; i < chunk.count * Q; i += W) {
        const F x = S::exp2(S::load(p + i) - S::finite(base));
        total += x;
        for (int b = 0; b < blurs.count; ++b) {
          const I key = lanes_of_keys() + (at + i / Q);
          mass[b] += (key >= blurs.at[b].begin) & (key < blurs.at[b].end) ? x : F{};
        }
        S::store(p + i, x);
      }
      Weigh<W>::template add<Q>(chunk.value, p, Q, chunk.count, out, value_width);
    }
    for (int b = 0; b < blurs.count; ++b) {
      for (int i = Q; i < W; i *= 2) mass[b] += S::rotate(mass[b], i);
      for (int i = 0; i < Q; ++i) {
        for (int c = 0; c < rows.width; ++c) turned[c * Q + i] = q[i * width + c] * (mass[b][i] * kLn2);
      }
      Weigh<W>::template add<Q>(blurs.at[b].slope, turned, Q, rows.width, out, value_width);
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
  // The dot products of R rows with Q queries, one in each lane.
  static INLINE F dots(const float* const* row, const float* bias, const float* q, int width) {
    F sum[W], start{};
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
    return S::sums(sum) + start;
  }

  // Which of a vector's R keys each lane belongs to.
  static INLINE I lanes_of_keys() {
    I key{};
    UNROLL for (int i = 0; i < W; ++i) key[i] = i / Q;
    return key;
  }
};

}  // namespace attendless::ATTENDLESS_ISA
