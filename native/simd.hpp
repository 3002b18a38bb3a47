// Simd<W>: vectors of W 32-bit lanes and the operations on them that the kernels use. The types are the compiler's
// vector extensions, so that one source serves every instruction set. Contents, in order: load and store (fp32, bf16,
// bytes), rounding, masks and reductions, exp2 and log2, lane permutations, transposition.
//
// isa.cpp compiles this code once per instruction set, each time in its own namespace, ATTENDLESS_ISA. If two
// instruction sets shared a function, the linker would keep one copy, which may contain instructions that the machine
// lacks. For the same reason, code in these namespaces uses no function templates of the standard library.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#include "element.hpp"

#if defined(__AVX512F__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#include <arm_neon.h>
#endif

#ifndef ATTENDLESS_ISA
#error "compile through isa.cpp, which names the instruction set"
#endif

#define INLINE inline __attribute__((always_inline))
#define INLINE_LAMBDA __attribute__((always_inline))
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 32")
#endif

namespace attendless::ATTENDLESS_ISA {

constexpr float kInfinity = __builtin_inff();
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

template <class T>
INLINE T least(T a, T b) {
  return a < b ? a : b;
}

// Prefetches `width` elements, one request per 64-byte cache line.
template <class T>
INLINE void prefetch(const T* row, int width) {
  for (int c = 0; c < width; c += 64 / int(sizeof(T))) __builtin_prefetch(row + c);
}

INLINE float value(float x) { return x; }
INLINE float value(Bf16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}

#if defined(__AVX2__)
typedef float Floats8 __attribute__((vector_size(32)));
typedef int32_t Ints8 __attribute__((vector_size(32)));
#endif

template <int W>
struct Simd {
  static constexpr int kWidth = W;
  typedef float F __attribute__((vector_size(4 * W)));
  typedef int32_t I __attribute__((vector_size(4 * W)));
  typedef uint32_t U __attribute__((vector_size(4 * W)));
  typedef uint16_t H __attribute__((vector_size(2 * W)));
  typedef uint8_t B __attribute__((vector_size(W)));

  static INLINE F load(const float* from) {
    F x;
    std::memcpy(&x, from, sizeof x);
    return x;
  }
  static INLINE void store(float* to, F x) { std::memcpy(to, &x, sizeof x); }
  static INLINE F load(const Bf16* from) {
    H half;
    std::memcpy(&half, from, sizeof half);
    return (F)(convert<U>(half) << 16);
  }
  // Rounds to nearest, ties to even. NaN stays NaN, even if its payload lies in the truncated bits only. The
  // AVX512-BF16 instruction treats subnormal inputs (below 2^-126) as 0.
  static INLINE void store(Bf16* to, F x) {
#if defined(__AVX512BF16__)
    if constexpr (W == 16) {
      const auto half = _mm512_cvtneps_pbh((__m512)x);
      std::memcpy(static_cast<void*>(to), &half, sizeof half);
      return;
    }
#endif
    const H half = convert<H>(halved(x));
    std::memcpy(to, &half, sizeof half);
  }
  // x rounded to bf16, as a float.
  static INLINE F nearest_half(F x) {
#if defined(__AVX512BF16__)
    if constexpr (W == 16) {
      return (F)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)x)), 16);
    }
#endif
    return (F)(halved(x) << 16);
  }
  // Packs two floats that are exact in bf16 into each word: `first` in the low half, `second` in the high half.
  static INLINE U paired(F first, F second) { return (U)first >> 16 | ((U)second & 0xffff0000u); }
  // Rounds to the nearest integer. ±inf is returned unchanged.
  static INLINE F whole(F x) {
    const F shift = splat(12582912.f);  // as in exp2
    const F rounded = (x + shift) - shift;
    return x == x - 1.f ? x : rounded;
  }
  // Converts to the nearest int32, for |x| ≤ 2^22.
  static INLINE I nearest(F x) { return (I)(x + 12582912.f) - 0x4b400000; }  // as in exp2
  static INLINE F floats(I x) { return convert<F>(x); }
  static INLINE F floats(F x) { return x; }
  static INLINE void store_bytes(uint8_t* to, I x) {
    const B bytes = convert<B>(x);
    std::memcpy(to, &bytes, sizeof bytes);
  }
  static INLINE I load(const int32_t* from) {
    I x;
    std::memcpy(&x, from, sizeof x);
    return x;
  }
  static INLINE void store(int32_t* to, I x) { std::memcpy(to, &x, sizeof x); }
  static INLINE U load(const uint32_t* from) {
    U x;
    std::memcpy(&x, from, sizeof x);
    return x;
  }
  static INLINE void store(uint32_t* to, U x) { std::memcpy(to, &x, sizeof x); }
  // Broadcast. x - 0 is x for every x, whereas x + 0 maps -0 to +0, so the compiler emits a broadcast without
  // arithmetic.
  static INLINE F splat(float x) { return x - F{}; }
  static INLINE I splat(int32_t x) { return x - I{}; }
  static INLINE U splat(uint32_t x) { return x - U{}; }

  // Ignores NaN in `b`: the exponential of the score propagates the NaN to the result.
  static INLINE F max(F a, F b) { return b > a ? b : a; }

  // The value to subtract from scores whose maximum is `most`. A maximum of -inf (no finite score so far) becomes 0,
  // because -inf - -inf is NaN.
  static INLINE F finite(F most) { return most == -kInfinity ? F{} : most; }

  static INLINE bool any(I mask) {
    int64_t part[W / 2], all = 0;
    std::memcpy(part, &mask, sizeof mask);
    UNROLL for (int i = 0; i < W / 2; ++i) all |= part[i];
    return all != 0;
  }

  // One bit per lane of a mask; lane 0 is bit 0.
  static INLINE uint32_t bits(I mask) {
    uint32_t all = 0;
#if defined(__AVX2__)
    if constexpr (W % 8 == 0) {
      Floats8 part[W / 8];
      std::memcpy(part, &mask, sizeof mask);
      UNROLL for (int i = 0; i < W / 8; ++i) all |= uint32_t(__builtin_ia32_movmskps256(part[i])) << (8 * i);
      return all;
    }
#endif
    int32_t lane[W];
    store(lane, mask);
    UNROLL for (int i = 0; i < W; ++i) all |= uint32_t(lane[i] & 1) << i;
    return all;
  }

  // `bits` of a > b and of a ≥ b. AVX-512 compares into a mask register, so a vector mask would be an extra conversion.
  static INLINE uint32_t above(F a, F b) {
#if defined(__AVX512F__)
    if constexpr (W == 16) return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GT_OQ);
#endif
    return bits(a > b);
  }
  static INLINE uint32_t reaching(F a, F b) {
#if defined(__AVX512F__)
    if constexpr (W == 16) return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GE_OQ);
#endif
    return bits(a >= b);
  }

  static INLINE float sum(F x) {
    float lane[W];
    store(lane, x);
    UNROLL for (int half = W / 2; half; half /= 2) {
      UNROLL for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
    }
    return lane[0];
  }

  static INLINE int32_t sum(I x) {
#if defined(__AVX512F__)
    if constexpr (W == 16) return _mm512_reduce_add_epi32((__m512i)x);
#endif
    int32_t lane[W];
    uint32_t total = 0;  // unsigned: wraps around as vector addition does
    store(lane, x);
    UNROLL for (int i = 0; i < W; ++i) total += uint32_t(lane[i]);
    return int32_t(total);
  }

  static INLINE int32_t largest(I x) {
#if defined(__AVX512F__)
    if constexpr (W == 16) return _mm512_reduce_max_epi32((__m512i)x);
#endif
    int32_t lane[W];
    store(lane, x);
    int32_t best = lane[0];
    UNROLL for (int i = 1; i < W; ++i) best = lane[i] > best ? lane[i] : best;
    return best;
  }

  static INLINE float largest(F x) {
    float lane[W], best;
    store(lane, x);
    best = lane[0];
    UNROLL for (int i = 1; i < W; ++i) best = lane[i] > best ? lane[i] : best;
    return best;
  }

  // 2^x with a relative error of about 1e-7. Splits x = n + f with |f| ≤ ½, evaluates a minimax polynomial for 2^f
  // (exact at 0) and writes n into the exponent. The result is 0 for x ≤ -127 and NaN for NaN. The result for x > 127
  // is arbitrary: such arguments occur only if a caller passes an `lse` that the forward pass did not compute.
  static INLINE F exp2(F x) {
    const F lowest = splat(-127.f), shift = splat(12582912.f);  // 1.5 · 2^23: adding it rounds to an integer
    const F y = lowest > x ? lowest : x;
    const F rounded = y + shift;
    const F f = y - (rounded - shift);
    // Estrin's scheme: evaluates pairs of terms, because Horner's scheme is one latency-bound FMA chain.
    const F square = f * f;
    const F first = 6.93147214968e-1f * f + 1.f;
    const F second = 5.55031055101e-2f * f + 2.40226527829e-1f;
    const F third = 1.55946781613e-4f * square + (1.34066439024e-3f * f + 9.61769297299e-3f);
    const F p = (third * square + second) * square + first;
    return p * (F)(((U)rounded << 23) + (127u << 23));
  }

  // log2 x for x ≥ 0: x = m · 2^e with √½ ≤ m < √2, and log m = 2 artanh s with s = (m - 1) / (m + 1), |s| < 0.18.
  static INLINE F log2(F x) {
    const I above = (I)x - splat(0x3f3504f3);  // bits of √½
    const I exponent = above >> 23;
    const F m = (F)((I)x - (exponent << 23));
    const F s = (m - 1.f) / (m + 1.f), square = s * s;
    F p = splat(0.3205989f);  // coefficients: (2 / ln 2) / 9, then / 7, / 5, / 3, / 1
    p = p * square + 0.4121986f;
    p = p * square + 0.5770780f;
    p = p * square + 0.9617967f;
    p = p * square + 2.8853901f;
    const F whole = (F)(exponent + splat(0x4b400000)) - 12582912.f;  // converts int to float, as in exp2
    const F result = p * s + whole;
    return x > 0.f ? result : x == 0.f ? splat(-kInfinity) : x;
  }

  // Lane i of the result is lane (i + by) mod W.
  static INLINE F rotate(F x, int by) {
    float lane[2 * W];
    store(lane, x);
    store(lane + W, x);
    return load(lane + by);
  }

  // Lane i of the result is lane positions[i].
  static INLINE F pick(F x, I positions) {
#if defined(__AVX2__)
    if constexpr (W == 8) {
      Floats8 from;
      Ints8 at;
      std::memcpy(&from, &x, sizeof x);
      std::memcpy(&at, &positions, sizeof at);
      from = __builtin_ia32_permvarsf256(from, at);
      std::memcpy(&x, &from, sizeof x);
      return x;
    }
#endif
    float from[W], to[W];
    int32_t at[W];
    store(from, x);
    store(at, positions);
    UNROLL for (int i = 0; i < W; ++i) to[i] = from[at[i]];
    return load(to);
  }
  static INLINE I pick(I x, I positions) { return (I)pick((F)x, positions); }

  // Lane i of the result is the sum of the lanes of x[i]. Tree reduction: adds adjacent vectors, then pairs, then
  // fours.
  static INLINE F sums(F (&x)[W]) { return sums_from<1>(x); }

  // Transposes a W × W matrix in place: swaps off-diagonal blocks of size 1, 2, 4, …
  static INLINE void transpose(F (&x)[W]) { transpose_from<1>(x); }

 private:
  template <class To, class From>  // a template, because GCC 12 rejects vectors whose length is a dependent value
  static INLINE To convert(From x) {
    return __builtin_convertvector(x, To);
  }
  // The bf16 bits of x in the low half of each word: to nearest, ties to even; NaN becomes quiet.
  static INLINE U halved(F x) {
    const U bits = (U)x, nearest = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    return x == x ? nearest : bits >> 16 | 0x40u;
  }
  template <int S>
  static INLINE F sums_from(F (&x)[W]) {
    if constexpr (S < W) {
      UNROLL for (int i = 0; i < W / (2 * S); ++i) {
        const F a = x[2 * i], b = x[2 * i + 1];
        x[i] = upper<S>(a, b, std::make_integer_sequence<int, W>()) +
               lower<S>(a, b, std::make_integer_sequence<int, W>());
      }
      return sums_from<2 * S>(x);
    }
    return x[0];
  }
  template <int S>
  static INLINE void transpose_from(F (&x)[W]) {
    if constexpr (S < W) {
      UNROLL for (int i = 0; i < W; ++i) {
        if (i & S) continue;
        const F a = x[i], b = x[i + S];
        x[i] = upper<S>(a, b, std::make_integer_sequence<int, W>());
        x[i + S] = lower<S>(a, b, std::make_integer_sequence<int, W>());
      }
      transpose_from<2 * S>(x);
    }
  }
  template <int S, int... j>
  static INLINE F upper(F a, F b, std::integer_sequence<int, j...>) {
    return shuffle<(j & S ? W + j - S : j)...>(a, b);
  }
  template <int S, int... j>
  static INLINE F lower(F a, F b, std::integer_sequence<int, j...>) {
    return shuffle<(j & S ? W + j : j + S)...>(a, b);
  }
  template <int... index>
  static INLINE F shuffle(F a, F b) {
#if defined(__has_builtin) && __has_builtin(__builtin_shufflevector)
    return __builtin_shufflevector(a, b, index...);
#else  // GCC before 12
    return F{(index < W ? a[index % W] : b[index % W])...};
#endif
  }
};

}  // namespace attendless::ATTENDLESS_ISA
