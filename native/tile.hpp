// Micro-kernels for a tile of queries. A tile holds one query per vector lane, with its channels transposed to
// xT [channels][lanes]. Keys and values are rows at arbitrary addresses; their numbers are broadcast against the lanes.
// Rows are not repacked into panels, and a softmax over keys needs no reduction across lanes.
//
//     dot        scores:           for each block of rows, for each channel: broadcast, multiply, add
//     combine    query gradients:  for each block of channels, for each row
//     scatter    row gradients:    for each block of rows, for each vector of channels, for each lane
//     gather, spread               transpose [lanes][channels] to [channels][lanes], and back
#pragma once

#include "words.hpp"

namespace attendless::ATTENDLESS_ISA {

template <int W, int V>  // V vectors of W lanes
struct Tile {
  using S = Simd<W>;
  using F = typename S::F;
  static constexpr int kVectors = V, kLanes = W * V;
  // Rows (or channels) per block: enough accumulators to hide FMA latency, and few enough to stay in registers.
  static constexpr int kBlock = (kLanes < 16 ? 8 : 12) / V;

  struct Lanes {
    F at[V];
    static INLINE Lanes load(const float* from) {
      Lanes x;
      UNROLL for (int j = 0; j < V; ++j) x.at[j] = S::load(from + j * W);
      return x;
    }
    static INLINE Lanes splat(float value) {
      Lanes x;
      UNROLL for (int j = 0; j < V; ++j) x.at[j] = S::splat(value);
      return x;
    }
    INLINE void store(float* to) const {
      UNROLL for (int j = 0; j < V; ++j) S::store(to + j * W, at[j]);
    }
  };

  // out[r][lane] = start[r] + Σ_c row[r][c] · xT[c][lane] for kBlock rows of `width` words; a null `start` means 0. Not
  // inlined: kBlock pointers and their accumulators need all registers.
  template <class Number = float>
  static __attribute__((noinline)) void dot(const typename WordOf<Number>::Word* const* row,
                                            const typename Words<W, Number>::Start* start,
                                            const typename WordOf<Number>::Word* xT, int width, float* out, int64_t out_stride) {
    using N = Words<W, Number>;
    using Word = typename N::Word;
    const Word* r[kBlock];
    UNROLL for (int i = 0; i < kBlock; ++i) r[i] = row[i];
    typename N::Sum sum[kBlock][V];
    UNROLL for (int i = 0; i < kBlock; ++i) {
      UNROLL for (int j = 0; j < V; ++j) sum[i][j] = S::splat(start ? start[i] : typename N::Start{});
    }
    const Word* const end = xT + int64_t(width) * kLanes;
    const auto add = [&](const Word* x, int c) INLINE_LAMBDA {
      typename N::Vec lanes[V];
      UNROLL for (int j = 0; j < V; ++j) lanes[j] = N::load(x + j * W);
      UNROLL for (int i = 0; i < kBlock; ++i) {
        const typename N::Vec value = N::splat(r[i][c]);
        UNROLL for (int j = 0; j < V; ++j) sum[i][j] = N::add(sum[i][j], lanes[j], value);
      }
    };
    for (; xT + 4 * kLanes <= end; xT += 4 * kLanes) {
      UNROLL for (int c = 0; c < 4; ++c) add(xT + c * kLanes, c);
      UNROLL for (int i = 0; i < kBlock; ++i) {
        r[i] += 4;
        asm("" : "+r"(r[i]));  // keeps one pointer per row: compilers rebase addresses otherwise, and spill
      }
    }
    for (; xT < end; xT += kLanes) {
      add(xT, 0);
      UNROLL for (int i = 0; i < kBlock; ++i) ++r[i];
    }
    UNROLL for (int i = 0; i < kBlock; ++i) {
      UNROLL for (int j = 0; j < V; ++j) S::store(out + i * out_stride + j * W, S::floats(sum[i][j]));
    }
  }

  // accT[c][lane] += Σ_r row[r][c] · p[r][lane] over `count` rows, for every channel c < width.
  static INLINE void combine(const float* const* row, const float* p, int count, int width, float* accT) {
    int c = 0;
    for (; c + kBlock <= width; c += kBlock) combine_channels<kBlock>(row, p, count, c, accT);
    combine_rest<kBlock - 1>(row, p, count, c, width - c, accT);
  }

  // row[r][c] += Σ_lane p[r][lane] · x[lane][c] over the first `lanes` lanes. x is [lanes][width], and width is a
  // multiple of 16. Vectors hold channels here. If `repeats`, two entries of `row` may alias, so rows are processed one
  // at a time.
  static INLINE void scatter(float* const* row, const float* p, int count, bool repeats, const float* x, int lanes,
                             int width) {
    int r = 0;
    for (; !repeats && r + 6 <= count; r += 6) scatter_rows<6>(row + r, p + r * kLanes, x, lanes, width);
    for (; r < count; ++r) scatter_rows<1>(row + r, p + r * kLanes, x, lanes, width);
  }

  // xT[c][lane] = row[lane][c], in words. Lanes from `count` on are 0.
  static INLINE void gather(const uint32_t* const* row, int count, int width, uint32_t* xT) {
    for (int c = 0; c < width; c += W) {  // rows are padded
      for (int l = 0; l < kLanes; l += W) {
        F x[W];
        UNROLL for (int i = 0; i < W; ++i) x[i] = l + i < count ? (F)S::load(row[l + i] + c) : F{};
        S::transpose(x);
        UNROLL for (int i = 0; i < W; ++i) S::store(xT + int64_t(c + i) * kLanes + l, (typename S::U)x[i]);
      }
    }
  }

  // xT[c][lane] = factor · row[lane][c]. Lanes from `count` on are 0.
  static INLINE void gather(const float* const* row, int count, int width, float factor, float* xT) {
    for (int l = 0; l < kLanes; l += W) {
      int c = 0;
      for (; c + W <= width; c += W) {
        F x[W];
        UNROLL for (int i = 0; i < W; ++i) x[i] = l + i < count ? S::load(row[l + i] + c) * factor : F{};
        S::transpose(x);
        UNROLL for (int i = 0; i < W; ++i) S::store(xT + int64_t(c + i) * kLanes + l, x[i]);
      }
      for (; c < width; ++c) {
        for (int i = 0; i < W; ++i) xT[int64_t(c) * kLanes + l + i] = l + i < count ? row[l + i][c] * factor : 0.f;
      }
    }
  }

  // row[lane][c] = factor[lane] · xT[c][lane] for the first `count` lanes: the inverse of `gather`.
  static INLINE void spread(float* const* row, int count, int width, const Lanes& factor, const float* xT) {
    for (int j = 0; j < V && j * W < count; ++j) {
      const int l = j * W, used = least(W, count - l);
      int c = 0;
      for (; c + W <= width; c += W) {
        F x[W];
        UNROLL for (int i = 0; i < W; ++i) x[i] = S::load(xT + int64_t(c + i) * kLanes + l) * factor.at[j];
        S::transpose(x);
        UNROLL for (int i = 0; i < W; ++i) {
          if (i < used) S::store(row[l + i] + c, x[i]);
        }
      }
      for (; c < width; ++c) {
        for (int i = 0; i < used; ++i) row[l + i][c] = xT[int64_t(c) * kLanes + l + i] * factor.at[j][i];
      }
    }
  }

 private:
  template <int K>
  static INLINE void combine_channels(const float* const* row, const float* p, int count, int c, float* accT) {
    Lanes sum[K];
    UNROLL for (int i = 0; i < K; ++i) sum[i] = Lanes::load(accT + int64_t(c + i) * kLanes);
    for (int r = 0; r < count; ++r) {
      const float* values = row[r] + c;
      asm("" : "+r"(values));  // keeps one pointer per row, as in `dot`
      const Lanes weight = Lanes::load(p + int64_t(r) * kLanes);
      UNROLL for (int i = 0; i < K; ++i) {
        const F value = S::splat(values[i]);
        UNROLL for (int j = 0; j < V; ++j) sum[i].at[j] += value * weight.at[j];
      }
    }
    UNROLL for (int i = 0; i < K; ++i) sum[i].store(accT + int64_t(c + i) * kLanes);
  }

  template <int K>
  static INLINE void combine_rest(const float* const* row, const float* p, int count, int c, int rest, float* accT) {
    if constexpr (K > 0) {
      if (rest == K) return combine_channels<K>(row, p, count, c, accT);
      combine_rest<K - 1>(row, p, count, c, rest, accT);
    }
  }

  template <int K>
  static INLINE void scatter_rows(float* const* row, const float* p, const float* x, int lanes, int width) {
    constexpr int kWide = 16 / W > 2 ? 2 : 16 / W;
    for (int c = 0; c < width; c += kWide * W) {
      F sum[K][kWide];
      UNROLL for (int i = 0; i < K; ++i) {
        UNROLL for (int j = 0; j < kWide; ++j) sum[i][j] = S::load(row[i] + c + j * W);
      }
      for (int l = 0; l < lanes; ++l) {
        F channel[kWide];
        UNROLL for (int j = 0; j < kWide; ++j) channel[j] = S::load(x + int64_t(l) * width + c + j * W);
        UNROLL for (int i = 0; i < K; ++i) {
          const F weight = S::splat(p[i * kLanes + l]);
          UNROLL for (int j = 0; j < kWide; ++j) sum[i][j] += weight * channel[j];
        }
      }
      UNROLL for (int i = 0; i < K; ++i) {
        UNROLL for (int j = 0; j < kWide; ++j) S::store(row[i] + c + j * W, sum[i][j]);
      }
    }
  }
};

}  // namespace attendless::ATTENDLESS_ISA
