// Weighted sums of rows for several queries: the PV product. Lanes are channels, so one loaded row serves Q queries,
// and one broadcast weight serves a vector of channels.
//
// Loop order: blocks of channels (kVectors<Q> vectors), then rows (kNumbers at a time), then queries. Q · kVectors<Q>
// accumulators stay in registers over all rows.
#pragma once

#include "words.hpp"

namespace attendless::ATTENDLESS_ISA {

template <int W, class Number = float>
struct Weigh {
  using S = Simd<W>;
  using F = typename S::F;
  using N = Words<W, Number>;
  using Word = typename N::Word;
  // Block size for callers with many queries: with kVectors below, weights and rows take as many loads as products take
  // cycles. bf16 rows are interleaved again for each block, so with 16 lanes the block is larger.
  static constexpr int kQueries = W == 16 && N::kNumbers > 1 ? 8 : 4;
  // Vectors of channels per block: as many accumulators as registers can hold beside the row and the weight.
  template <int Q>
  static constexpr int kVectors = (W == 16 ? 16 : 12) / Q < 4 ? (W == 16 ? 16 : 12) / Q : 4;

  // out[query][c] += Σ_r row[r][c] · p[r][query] over `count` rows, for Q queries and every channel c < width, a
  // multiple of 16. p is [words of rows][stride]: a word holds the weights of kNumbers consecutive rows, and the last
  // word is padded with 0.
  template <int Q>
  static __attribute__((noinline)) void add(const Number* const* row, const Word* p, int stride, int count, float* out,
                                            int width) {
    int c = 0;
    for (; c + kVectors<Q> * W <= width; c += kVectors<Q> * W) some<Q, kVectors<Q>>(row, p, stride, count, out, c, width);
    for (; c < width; c += W) some<Q, 1>(row, p, stride, count, out, c, width);
  }

 private:
  template <int Q, int K>
  static INLINE void some(const Number* const* row, const Word* p, int stride, int count, float* out, int c, int width) {
    F sum[Q][K];
    UNROLL for (int i = 0; i < Q; ++i) {
      UNROLL for (int j = 0; j < K; ++j) sum[i][j] = S::load(out + i * width + c + j * W);
    }
    typename N::Vec value[K];
    const auto add = [&](const Word* weight) INLINE_LAMBDA {
      UNROLL for (int i = 0; i < Q; ++i) {
        const typename N::Vec w = N::splat(weight[i]);
        UNROLL for (int j = 0; j < K; ++j) sum[i][j] = N::add(sum[i][j], value[j], w);
      }
    };
    int r = 0;
    for (; r + N::kNumbers <= count; r += N::kNumbers, p += stride) {
      UNROLL for (int j = 0; j < K; ++j) value[j] = N::across(row + r, c + j * W);
      add(p);
    }
    if (r < count) {
      UNROLL for (int j = 0; j < K; ++j) value[j] = N::last(row[r], c + j * W);
      add(p);
    }
    UNROLL for (int i = 0; i < Q; ++i) {
      UNROLL for (int j = 0; j < K; ++j) S::store(out + i * width + c + j * W, sum[i][j]);
    }
  }
};

}  // namespace attendless::ATTENDLESS_ISA
