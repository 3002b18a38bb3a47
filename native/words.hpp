// Dot products over 32-bit words: one float, two bf16 numbers or four bytes per word. Every product of the kernels is a
// sum over words, so one micro-kernel (Tile::dot, FewQueries, Weigh, OwnList) serves every element type.
//
// Words<W, Number> specialises, for W words per vector:
//     Word, kNumbers           type of a word; numbers per word
//     Vec, Sum, Start          vector of W words; vector of W accumulators; type of an accumulator's initial value
//     load, splat              loads W words; broadcasts one word
//     across(row, c)           interleaves kNumbers rows: lane i holds channel c + i of each row
//     last(row, c)             the same for a single row; the remaining numbers of each word are 0
//     add(sum, a, b)           sum + Σ over the numbers of a word of a · b, per lane
//     exp2                     2^x, accurate enough for a result that is rounded to Number
// and, if kNumbers is 2:
//     rounded(first, second)   rounds two vectors of floats and interleaves them into words
//     store                    stores W words
// Byte words need only load, splat and add.
//
// A product of two bf16 numbers is exact in fp32. The generic `add` rounds once per product and adds the second
// number's product first. AVX512-BF16 computes `add` in one instruction (VDPBF16PS): it treats subnormals (below
// 2^-126) as 0 and may round once per pair.
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

// The number of words that hold `count` numbers.
template <class Number>
INLINE constexpr int words(int count) {
  return (count + WordOf<Number>::kNumbers - 1) / WordOf<Number>::kNumbers;
}

// Precision policies: the element types of packed keys and values, and the type of the operands of QKᵀ.
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
  static constexpr bool kRounds = true, kBytes = false;  // softmax weights are rounded to bf16 as well
};
struct Byte {  // like Half, but QKᵀ multiplies int8 (bytes.hpp)
  using Key = Bf16;
  using Value = Bf16;
  using Score = int8_t;
  static constexpr bool kRounds = true, kBytes = true;
};

// bf16 words (1, 1), (1, 0) and (0, 1); the first number is the low half.
constexpr uint32_t kOnes = 0x3f803f80u, kFirstOne = 0x3f80u, kSecondOne = 0x3f800000u;

// Packs two floats that are exact in bf16 into one word.
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
    const auto half = [&](int i) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row[i] + c)); };
    // Both loads fill 512 bits. GCC 12 spills an accumulator where 256 bits are loaded.
    const Vec both = _mm512_mask_broadcast_i64x4(_mm512_broadcast_i64x4(half(0)), 0xf0, half(1));
    return _mm512_permutexvar_epi16(by_turns(), both);
  }
  static INLINE Vec last(const Number* row, int c) {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + c)));
  }
  static INLINE Sum add(Sum sum, const Vec& a, const Vec& b) {
    return (Sum)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
  }
  // As Simd::exp2, with a relative error below 3e-6: the result is rounded to bf16.
  static INLINE F exp2(F x) {
    const __m512 y = _mm512_max_ps(_mm512_set1_ps(-160.f), (__m512)x);  // returns the second operand for NaN
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
  // Permutation indices 0, 16, 1, 17, …: interleaves the numbers of two rows.
  static INLINE Vec by_turns() {
    const Vec lane = lanes();
    return _mm512_or_si512(lane, _mm512_slli_epi32(_mm512_add_epi32(lane, _mm512_set1_epi32(16)), 16));
  }
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  static_assert(W == 4);
  using Vec = bfloat16x8_t;
  static INLINE Vec load(const Word* from) { return vreinterpretq_bf16_u32(vld1q_u32(from)); }
  static INLINE Vec splat(Word x) {
    uint32x4_t words = vdupq_n_u32(x);
    asm("" : "+w"(words));  // hides constants from GCC 12, which emits bf16 constants as another 16-bit type
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
  struct Vec {  // the two numbers of each word, widened to fp32
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

// int8 products with int32 accumulators: operand `a` of `add` is unsigned, operand `b` is signed.
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
