// Of a few rows (`hold`), the one with the largest cosine to each of many others (`seek`).
//
// The rows held are normalised and transposed, so that the lanes of a vector are rows, and several of those that seek
// are compared at once. Only the best so far is kept: products are never written. A row counts from the first of equals,
// and one with NaN in it is passed over.
#pragma once

#include "scratch.hpp"

namespace attendless::ATTENDLESS_ISA {

constexpr float kShortest = 1e-12f;  // what F.normalize takes for the length of shorter rows

template <int W>
class Alike {
  using S = Simd<W>;
  using F = typename S::F;
  using I = typename S::I;
  static constexpr int kAtOnce = 6;  // rows that seek; with two vectors of rows held, sums for twelve

  const int width_;
  float* const table_;  // vectors of W rows one after the other; in each, channel by channel
  int blocks_ = 0;

 public:
  static constexpr int kMost = 512;  // rows held: at 64 channels half of a second-level cache of 256 KB

  INLINE Alike(int width, int rows, Cursor& memory)
      : width_(width), table_(memory.floats(int64_t(padded(least(rows, kMost))) * width)) {}

  // Hold rows 0 … count - 1, at most kMost. Where they do not fill a vector, the last is repeated: an equal that comes
  // later, it is never found.
  template <class Row>
  INLINE void hold(int count, Row row) {
    blocks_ = (count + W - 1) / W;
    for (int block = 0; block < blocks_; ++block) {
      const float* rows[W];
      UNROLL for (int i = 0; i < W; ++i) rows[i] = row(least(block * W + i, count - 1));
      lay_out(rows, table_ + int64_t(block) * W * width_);
    }
  }

  // found(i, product, which) for each of `count` rows: its largest product with a row held, which is row `which`. The
  // product is -inf if there is none but NaN.
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

  // The products with B blocks of rows held. Each is one sum in the order of channels, wherever it stands, so that
  // equal rows have equal products.
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
