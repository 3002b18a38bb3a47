// Vectors of W floats, written with the compiler's vector extensions so that one source serves every instruction set.
//
// Each unit (see unit.cpp) compiles this code into a namespace of its own: were two units to share a function, the
// linker would keep one copy, perhaps the one with instructions the running machine lacks. For the same reason code
// under ATTENDLESS_UNIT uses no function templates of the standard library.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#ifndef ATTENDLESS_UNIT
#error "compile through unit.cpp, which names the unit"
#endif

#define INLINE inline __attribute__((always_inline))
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 32")
#endif

namespace attendless::ATTENDLESS_UNIT {

constexpr float kInfinity = __builtin_inff();
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

template <class T>
INLINE T least(T a, T b) {
  return a < b ? a : b;
}

template <int W>
struct Simd {
  static constexpr int kWidth = W;
  typedef float F __attribute__((vector_size(4 * W)));
  typedef int32_t I __attribute__((vector_size(4 * W)));
  typedef int8_t Bytes __attribute__((vector_size(W)));

  static INLINE F load(const float* from) {
    F x;
    std::memcpy(&x, from, sizeof x);
    return x;
  }
  static INLINE void store(float* to, F x) { std::memcpy(to, &x, sizeof x); }
  static INLINE I load(const int32_t* from) {
    I x;
    std::memcpy(&x, from, sizeof x);
    return x;
  }
  static INLINE void store(int32_t* to, I x) { std::memcpy(to, &x, sizeof x); }
  // Subtracting zero, unlike adding it, leaves every value as it is, so this is a broadcast and nothing else.
  static INLINE F splat(float x) { return x - F{}; }
  static INLINE I splat(int32_t x) { return x - I{}; }

  // A NaN in `b` is passed over: it reaches the result through the exponentials instead.
  static INLINE F max(F a, F b) { return b > a ? b : a; }

  static INLINE bool any(I mask) {
    int64_t part[W / 2], all = 0;
    std::memcpy(part, &mask, sizeof mask);
    UNROLL for (int i = 0; i < W / 2; ++i) all |= part[i];
    return all != 0;
  }

  static INLINE float sum(F x) {
    float lane[W];
    store(lane, x);
    UNROLL for (int half = W / 2; half; half /= 2) {
      UNROLL for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
    }
    return lane[0];
  }

  static INLINE float largest(F x) {
    float lane[W], best;
    store(lane, x);
    best = lane[0];
    UNROLL for (int i = 1; i < W; ++i) best = lane[i] > best ? lane[i] : best;
    return best;
  }

  // 2^x with a relative error of about 1e-7: x = n + f with |f| ≤ ½, a polynomial for 2^f (minimax, exact at 0), n put
  // into the exponent. Below -126 the result is 0; NaN stays NaN. Arguments above 127 do not occur.
  static INLINE F exp2(F x) {
    const F lowest = splat(-126.f), shift = splat(12582912.f);  // 1.5 · 2^23: adding it rounds to a whole number
    const F y = x < lowest ? lowest : x;
    const F rounded = y + shift;
    const F f = y - (rounded - shift);
    F p = splat(1.55946781613e-4f);
    p = p * f + 1.34066439024e-3f;
    p = p * f + 9.61769297299e-3f;
    p = p * f + 5.55031055101e-2f;
    p = p * f + 2.40226527829e-1f;
    p = p * f + 6.93147214968e-1f;
    p = p * f + 1.f;
    const I exponent = ((I)rounded << 23) + splat(127 << 23);
    const F result = p * (F)exponent;
    return x < lowest ? F{} : result;
  }

  // Rows become columns: blocks of 1, 2, 4, … trade places across the diagonal.
  static INLINE void transpose(F (&x)[W]) { transpose_from<1>(x); }

 private:
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

}  // namespace attendless::ATTENDLESS_UNIT
