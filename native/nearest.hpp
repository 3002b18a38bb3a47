// Nearest neighbour by cosine: for each of many query rows (`seek`), the most similar of a few held rows (`hold`).
//
// `hold` normalises and transposes the held rows into blocks [width][W], with one row per lane. Loop order of `seek`:
// for each group of kAtOnce query rows, for each two blocks, for each channel: broadcast, multiply, add. Only the
// running maximum and its index are kept; products are not stored. Of equal products, the first held row is found. Rows
// with NaN are never found.
#pragma once

#include "scratch.hpp"

namespace attendless::ATTENDLESS_ISA {

constexpr float kShortest = 1e-12f;  // lower bound of a norm, as in F.normalize

template <int W>
class Alike {
  using S = Simd<W>;
  using F = typename S::F;
  using I = typename S::I;
  static constexpr int kAtOnce = 6;  // query rows per group; with two blocks of held rows, 12 accumulators

  const int width_;
  float* const table_;  // [blocks][width][W]
  int blocks_ = 0;

 public:
  static constexpr int kMost = 512;  // maximum number of held rows: 128 KB at 64 channels, half of a 256-KB L2 cache

  INLINE Alike(int width, int rows, Cursor& memory)
      : width_(width), table_(memory.floats(int64_t(padded(least(rows, kMost))) * width)) {}

  // Packs rows 0 … count - 1, at most kMost. The last row is repeated to fill a vector; the first of equal rows wins,
  // so the copies are never found.
  template <class Row>
  INLINE void hold(int count, Row row) {
    blocks_ = (count + W - 1) / W;
    for (int block = 0; block < blocks_; ++block) {
      const float* rows[W];
      UNROLL for (int i = 0; i < W; ++i) rows[i] = row(least(block * W + i, count - 1));
      lay_out(rows, table_ + int64_t(block) * W * width_);
    }
  }

  // Calls found(i, product, which) for each of `count` query rows: held row `which` has the largest product with row i.
  // The query rows are not normalised. The product is -inf if all products are NaN.
  template <class Row, class Found>
  INLINE void seek(int count, Row row, Found found) const {
    for (int first = 0; first < count; first += kAtOnce) {
      const float* rows[kAtOnce];
      F best[kAtOnce];
      I block_of_best[kAtOnce];
      UNROLL for (int r = 0; r < kAtOnce; ++r) {
        rows[r] = row(least(first + r, count - 1));
        best[r] = S::splat(-kInfinity);
        block_of_best[r] = I{};
      }
      int block = 0;
      for (; block + 2 <= blocks_; block += 2) compare<2>(rows, block, best, block_of_best);
      if (block < blocks_) compare<1>(rows, block, best, block_of_best);
      const int group = least(kAtOnce, count - first);
      for (int r = 0; r < group; ++r) {
        const float product = largest(best[r]);
        found(first + r, product, first_equal(best[r], block_of_best[r], product));
      }
    }
  }

  static INLINE float length(const float* row, int width) {
    F sum{};
    int c = 0;
    for (; c + W <= width; c += W) sum += S::load(row + c) * S::load(row + c);
    float square = S::sum(sum);
    for (; c < width; ++c) square += row[c] * row[c];
    const float length = __builtin_sqrtf(square);
    return length > kShortest ? length : kShortest;
  }

 private:
  INLINE void lay_out(const float* const (&rows)[W], float* to) const {
    F square{};
    int c = 0;
    for (; c + W <= width_; c += W) {
      F part[W];
      UNROLL for (int i = 0; i < W; ++i) part[i] = S::load(rows[i] + c);
      S::transpose(part);
      UNROLL for (int i = 0; i < W; ++i) {
        square += part[i] * part[i];
        S::store(to + (c + i) * W, part[i]);
      }
    }
    for (; c < width_; ++c) {
      for (int i = 0; i < W; ++i) to[c * W + i] = rows[i][c];
      square += S::load(to + c * W) * S::load(to + c * W);
    }
    float lane[W];
    S::store(lane, square);
    for (int i = 0; i < W; ++i) lane[i] = __builtin_sqrtf(lane[i]);
    const F length = S::load(lane), one = S::splat(1.f), shortest = S::splat(kShortest);
    const F inverse = one / (length > shortest ? length : shortest);
    for (c = 0; c < width_; ++c) S::store(to + c * W, S::load(to + c * W) * inverse);
  }

  // Compares kAtOnce query rows with B blocks of held rows. Each product is one sum in channel order, independent of
  // its position, so that equal rows have equal products.
  template <int B>
  INLINE void compare(const float* const (&rows)[kAtOnce], int block, F (&best)[kAtOnce],
                      I (&block_of_best)[kAtOnce]) const {
    const float* const held = table_ + int64_t(block) * W * width_;
    F sum[kAtOnce][B];
    UNROLL for (int r = 0; r < kAtOnce; ++r) {
      UNROLL for (int b = 0; b < B; ++b) sum[r][b] = F{};
    }
    for (int c = 0; c < width_; ++c) {
      F channel[B];
      UNROLL for (int b = 0; b < B; ++b) channel[b] = S::load(held + (int64_t(b) * width_ + c) * W);
      UNROLL for (int r = 0; r < kAtOnce; ++r) {
        const F x = S::splat(rows[r][c]);
        UNROLL for (int b = 0; b < B; ++b) sum[r][b] += x * channel[b];
      }
    }
    UNROLL for (int r = 0; r < kAtOnce; ++r) {
      UNROLL for (int b = 0; b < B; ++b) {
        const I better = sum[r][b] > best[r];
        best[r] = better ? sum[r][b] : best[r];
        block_of_best[r] = better ? S::splat(int32_t(block + b)) : block_of_best[r];
      }
    }
  }

  static INLINE float largest(F x) {
    float lane[W];
    S::store(lane, x);
    UNROLL for (int half = W / 2; half; half /= 2) {
      UNROLL for (int i = 0; i < half; ++i) lane[i] = lane[i + half] > lane[i] ? lane[i + half] : lane[i];
    }
    return lane[0];
  }

  static INLINE int first_equal(F best, I block, float product) {
    int32_t blocks[W];
    S::store(blocks, block);
    int first = kMost;
    for (uint32_t equal = S::bits(best == S::splat(product)); equal; equal &= equal - 1) {
      const int lane = __builtin_ctz(equal);
      first = least(first, blocks[lane] * W + lane);
    }
    return first;
  }
};

}  // namespace attendless::ATTENDLESS_ISA
