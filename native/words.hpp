// Numbers in words of 32 bits: one float, two bfloat16 or four bytes. Every product of the kernels is a sum over words,
// so that one micro-kernel (Tile::dot, FewQueries, Weigh, OwnList) serves every element type.
//
// Words<W, Number> has
//     Word, kNumbers           the word's type, and how many numbers it holds
//     Vec, Sum, Start          vectors of W words, and of W sums; what one sum starts with
//     load, splat              words from memory, one for each lane or one for all
//     across, last             a word for each lane of kNumbers rows that lie apart, a number from each; of one row alone
//     add                      sum + Σ of the products of two words' numbers
//     exp2                     2^x, to be rounded to such a number
// and, of several numbers,
//     rounded                  a word for each lane of kNumbers floats
//
// The products of two bfloat16 are exact in a float, and each is added with one rounding, the second number's first.
// AVX512-BF16 does the same in one instruction, but takes numbers below 2^-126 for 0 and may round a pair once.
#pragma once

#include "simd.hpp"

namespace attendless::ATTENDLESS_ISA {

template <class N>
struct WordOf {
  using Word = uint32_t;
  static constexpr int kNumbers = 4 / int(sizeof(N));
};
template <>
struct WordOf<float> {
  using Word = float;
  static constexpr int kNumbers = 1;
};

// Words that hold so many numbers.
template <class Number>
INLINE constexpr int words(int count) {
  return (count + WordOf<Number>::kNumbers - 1) / WordOf<Number>::kNumbers;
}

// How keys and values are kept, and what scores are products of.
struct Single {
  using Key = float;
  using Value = float;
  using Score = float;
  static constexpr bool kRounds = false, kBytes = false;
};
struct Half {
  using Key = Bf16;
  using Value = Bf16;
  using Score = Bf16;
  static constexpr bool kRounds = true, kBytes = false;  // weights too, to bfloat16
};
struct Byte {  // as Half, with products of bytes (bytes.hpp)
  using Key = Bf16;
  using Value = Bf16;
  using Score = int8_t;
  static constexpr bool kRounds = true, kBytes = true;
};

// 1 in both halves of a word, or in one of them.
constexpr uint32_t kOnes = 0x3f803f80u, kFirstOne = 0x3f80u, kSecondOne = 0x3f800000u;

// Two numbers that bfloat16 holds, as a word.
INLINE uint32_t pair_of(float first, float second) {
  uint32_t bits[2];
  std::memcpy(bits, &first, sizeof first);
  std::memcpy(bits + 1, &second, sizeof second);
  return bits[0] >> 16 | (bits[1] & 0xffff0000u);
}

template <int W, class Number>
struct Words;

template <int W>
struct Words<W, float> : WordOf<float> {
  using S = Simd<W>;
  using Number = float;
  using Vec = typename S::F;
  using Sum = typename S::F;
  using Start = float;

  static INLINE Vec load(const Word* from) { return S::load(from); }
  static INLINE Vec splat(Word x) { return S::splat(x); }
  static INLINE Vec across(const Number* const* row, int c) { return S::load(row[0] + c); }
  static INLINE Vec last(const Number* row, int c) { return S::load(row + c); }
  static INLINE Sum add(Sum sum, const Vec& a, const Vec& b) { return sum + a * b; }
  static INLINE Sum exp2(Sum x) { return S::exp2(x); }
};

template <int W>
struct Words<W, Bf16> : WordOf<Bf16> {
  using S = Simd<W>;
  using F = typename S::F;
  using U = typename S::U;
  using Number = Bf16;
  using Sum = F;
  using Start = float;
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
  static_assert(W == 16);
  using Vec = __m512i;
  static INLINE Vec load(const Word* from) { return _mm512_loadu_si512(from); }
  static INLINE Vec splat(Word x) { return _mm512_set1_epi32(int32_t(x)); }
  static INLINE Vec across(const Number* const* row, int c) {
    const Vec first = _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(row[0] + c)));
    const Vec second = _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(row[1] + c)));
    return _mm512_permutex2var_epi16(first, by_turns(), second);
  }
  static INLINE Vec last(const Number* row, int c) {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + c)));
  }
  static INLINE Sum add(Sum sum, const Vec& a, const Vec& b) {
    return (Sum)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
  }
  // As Simd's, with a relative error below 3e-6.
  static INLINE F exp2(F x) {
    const __m512 y = _mm512_max_ps(_mm512_set1_ps(-160.f), (__m512)x);  // of a NaN, the second
    const __m512 n = _mm512_roundscale_ps(y, 0), f = _mm512_sub_ps(y, n);
    const F p = (((9.5701e-3f * (F)f + 5.591786e-2f) * (F)f + 2.4024745e-1f) * (F)f + 6.9312181e-1f) * (F)f + 0.99999926f;
    return (F)_mm512_scalef_ps((__m512)p, n);
  }
  static INLINE Vec rounded(F first, F second) {
    const Vec halves = (Vec)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first), lane = lanes();
    const Vec order = _mm512_or_si512(lane, _mm512_slli_epi32(_mm512_add_epi32(lane, _mm512_set1_epi32(16)), 16));
    return _mm512_permutexvar_epi16(order, halves);
  }
  static INLINE void store(Word* to, const Vec& x) { _mm512_storeu_si512(to, x); }

 private:
  static INLINE Vec lanes() { return _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0); }
  // 0, 32, 1, 33, …: a number of the first row, one of the second.
  static INLINE Vec by_turns() {
    const Vec lane = lanes();
    return _mm512_or_si512(lane, _mm512_slli_epi32(_mm512_add_epi32(lane, _mm512_set1_epi32(32)), 16));
  }
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  static_assert(W == 4);
  using Vec = bfloat16x8_t;
  static INLINE Vec load(const Word* from) { return vreinterpretq_bf16_u32(vld1q_u32(from)); }
  static INLINE Vec splat(Word x) {
    uint32x4_t words = vdupq_n_u32(x);
    asm("" : "+w"(words));  // GCC 12 writes a constant of bfloat16 as one of another type of 16 bits
    return vreinterpretq_bf16_u32(words);
  }
  static INLINE Vec across(const Number* const* row, int c) { return zipped(four(row[0] + c), four(row[1] + c)); }
  static INLINE Vec last(const Number* row, int c) { return zipped(four(row + c), vdupq_n_u16(0)); }
  static INLINE Sum add(Sum sum, const Vec& a, const Vec& b) { return (Sum)vbfdotq_f32((float32x4_t)sum, a, b); }
  static INLINE F exp2(F x) { return S::exp2(x); }
  static INLINE Vec rounded(F first, F second) {
    return vreinterpretq_bf16_u32((uint32x4_t)S::paired(S::nearest_half(first), S::nearest_half(second)));
  }
  static INLINE void store(Word* to, const Vec& x) { vst1q_u32(to, vreinterpretq_u32_bf16(x)); }

 private:
  static INLINE uint16x8_t four(const Number* from) {
    uint64_t bits;
    std::memcpy(&bits, from, sizeof bits);
    return vreinterpretq_u16_u64(vdupq_n_u64(bits));
  }
  static INLINE Vec zipped(uint16x8_t first, uint16x8_t second) { return vreinterpretq_bf16_u16(vzip1q_u16(first, second)); }
#else
  struct Vec {  // the two numbers of each word, widened
    F first, second;
  };
  static INLINE Vec load(const Word* from) { return split(S::load(from)); }
  static INLINE Vec splat(Word x) { return split(S::splat(x)); }
  static INLINE Vec across(const Number* const* row, int c) { return {S::load(row[0] + c), S::load(row[1] + c)}; }
  static INLINE Vec last(const Number* row, int c) { return {S::load(row + c), F{}}; }
  static INLINE Sum add(Sum sum, const Vec& a, const Vec& b) {
    sum += a.second * b.second;
    return sum + a.first * b.first;
  }
  static INLINE F exp2(F x) { return S::exp2(x); }
  static INLINE Vec rounded(F first, F second) { return {S::nearest_half(first), S::nearest_half(second)}; }
  static INLINE void store(Word* to, const Vec& x) { S::store(to, S::paired(x.first, x.second)); }

 private:
  static INLINE Vec split(U words) { return {(F)(words << 16), (F)(words & 0xffff0000u)}; }
#endif
};

// Bytes: the first factor's have no sign, the second's have one. Sums are whole numbers.
template <int W>
struct Words<W, int8_t> : WordOf<int8_t> {
  using S = Simd<W>;
  using Number = int8_t;
  using Sum = typename S::I;
  using Start = int32_t;
#if defined(__AVX512VNNI__)
  static_assert(W == 16);
  using Vec = __m512i;
  static INLINE Vec load(const Word* from) { return _mm512_loadu_si512(from); }
  static INLINE Vec splat(Word x) { return _mm512_set1_epi32(int32_t(x)); }
  static INLINE Sum add(Sum sum, const Vec& a, const Vec& b) { return (Sum)_mm512_dpbusd_epi32((__m512i)sum, a, b); }
#else
  using Vec = typename S::U;
  static INLINE Vec load(const Word* from) { return S::load(from); }
  static INLINE Vec splat(Word x) { return S::splat(x); }
  static INLINE Sum add(Sum sum, const Vec& a, const Vec& b) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
    if constexpr (W == 4) return (Sum)vusdotq_s32((int32x4_t)sum, (uint8x16_t)a, (int8x16_t)b);
#endif
    UNROLL for (int i = 0; i < 32; i += 8) sum += (Sum)(a >> i & 255u) * ((Sum)(b << (24 - i)) >> 24);
    return sum;
  }
#endif
};

}  // namespace attendless::ATTENDLESS_ISA
