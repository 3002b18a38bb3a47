// Top-k of a row of scores: the indices of the `budget` largest, in ascending order. Of equal scores, the lower index
// is taken first.
//
// Searches the k-th largest score by interpolation and bisection: each step counts the scores above a threshold. Then
// compresses the indices of the scores that reach the threshold. The row stays in the L1 cache, and the passes over it
// have no unpredictable branches. Sorting or partitioning would mispredict about every second element.
#pragma once

#include "simd.hpp"

namespace attendless::ATTENDLESS_ISA {

// The positions of the set bits of each byte: permutation indices that move the selected lanes to the front.
struct Positions {
  int32_t of[256][8];
  constexpr Positions() : of() {
    for (int byte = 0; byte < 256; ++byte) {
      for (int bit = 0, n = 0; bit < 8; ++bit) {
        if (byte >> bit & 1) of[byte][n++] = bit;
      }
    }
  }
};
constexpr Positions kPositions;

template <int W>
struct Select {
  using S = Simd<W>;
  using F = typename S::F;
  using I = typename S::I;
#if defined(__AVX512F__)
  static constexpr int kPacked = W == 16 ? 16 : 8;  // lanes per compress-store
#else
  static constexpr int kPacked = 8;
#endif
  using P = Simd<kPacked>;

  // Writes the indices of the `budget` largest of `count` scores to `chosen`.
  //     score   modified; size padded to 16
  //     bias    -inf excludes an index while others are left; size padded to 16
  //     own     `owned` indices that are taken first
  //     index   scratch memory; size padded to 16, plus 8. If all scores are taken and one is -inf, the padding reaches
  //             the threshold too, and its indices follow the others.
  // NaN counts as the largest score.
  static void largest(float* score, const float* bias, int count, const int32_t* own, int owned, int budget,
                      int32_t* index, int32_t* chosen) {
    const int length = (count + 15) / 16 * 16;
    for (int i = count; i < length; ++i) score[i] = -kInfinity;
    F low = S::splat(kInfinity), high = S::splat(-kInfinity);
    for (int i = 0; i < length; i += W) {
      F x = S::load(score + i);
      x = x != x ? S::splat(kInfinity) : x;
      x = S::load(bias + i) == -kInfinity ? S::splat(-kInfinity) : x;
      low = x < low ? x : low;
      high = x > high ? x : high;
      S::store(score + i, x);
    }
    for (int i = 0; i < owned; ++i) score[own[i]] = kInfinity;
    const Threshold threshold = owned < budget
                                    ? search(score, count, length, budget, -S::largest(-low), S::largest(high), evenly)
                                    : Threshold{kInfinity, at_least(score, length, kInfinity)};
    emit(score, length, threshold, budget, index, count_from);
    std::memcpy(chosen, index, sizeof(int32_t) * budget);
  }

  // The scores above 0 found so far, and their indices (`number`).
  struct Positive {
    float* value;  // both arrays have a size padded to 16
    int32_t* number;
    int count;

    // Appends those of `length` scores (a multiple of 16) that are above 0. Indices start at `first`. NaN is not above
    // 0.
    INLINE void add(const float* score, int length, int first) {
      count += append_all(length, [&](int i) { return S::above(S::load(score + i), F{}); }, number + count,
                          [&](int i) { return count_from(first + i); }, value + count,
                          [&](int i) { return P::load(score + i); });
    }
  };

  // The `budget` largest of `found`, or all if there are fewer. Returns how many were chosen. `chosen` has room for
  // `budget` + 16 indices.
  static int largest(const Positive& found, int budget, int32_t* chosen) {
    if (found.count <= budget) {
      std::memcpy(chosen, found.number, sizeof(int32_t) * found.count);
      return found.count;
    }
    const int length = (found.count + 15) / 16 * 16;
    for (int i = found.count; i < length; ++i) found.value[i] = 0.f;
    F high{};
    for (int i = 0; i < length; i += W) high = S::max(high, S::load(found.value + i));
    const Threshold threshold = search(found.value, found.count, length, budget, 0.f, S::largest(high), by_ratio);
    return emit(found.value, length, threshold, budget, chosen, [&](int i) { return P::load(found.number + i); });
  }

  // The n-th largest of `count` scores: the n largest reach it, and others only as ties. Ignores NaN. Compares each
  // score with all others, so it is for short rows. The size of `scratch` is padded to 16.
  static float reached_by(int n, const float* score, int count, float* scratch) {
    const int length = (count + 15) / 16 * 16;
    for (int i = 0; i < length; ++i) scratch[i] = i < count ? score[i] : -kInfinity;
    float least_of = kInfinity;
    for (int j = 0; j < count; ++j) {
      const F own = S::splat(score[j]);
      int larger = 0;
      for (int i = 0; i < length; i += W) larger += __builtin_popcount(S::above(S::load(scratch + i), own));
      least_of = larger < n && score[j] < least_of ? score[j] : least_of;
    }
    return least_of;
  }

 private:
  // A threshold, and the number of scores ≥ value.
  struct Threshold {
    float value;
    int reached;
  };

  // The number of scores ≥ threshold. Padding is -inf, so it is counted only if the threshold is -inf.
  static INLINE int at_least(const float* score, int length, float threshold) {
    const F bound = S::splat(threshold);
    if constexpr (kPacked == 16) {
      int count = 0;
      for (int i = 0; i < length; i += 16) count += __builtin_popcount(S::reaching(S::load(score + i), bound));
      return count;
    }
    I found[16 / W];
    UNROLL for (int j = 0; j < 16 / W; ++j) found[j] = I{};
    for (int i = 0; i < length; i += 16) {
      UNROLL for (int j = 0; j < 16 / W; ++j) found[j] -= S::load(score + i + j * W) >= bound;
    }
    UNROLL for (int j = 1; j < 16 / W; ++j) found[0] += found[j];
    return S::sum(found[0]);
  }

  // Maps floats to integers of the same order, so that bisection halves the number of floats between two bounds. The
  // mapping of bits is its own inverse (`value`).
  static INLINE int32_t order(float x) {
    int32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits ^ ((bits >> 31) & 0x7fffffff);
  }
  static INLINE float value(int32_t key) {
    const int32_t bits = key ^ ((key >> 31) & 0x7fffffff);
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
  }

  // Interpolation at `part` between two bounds, given as ordered integers. `evenly` is linear in the score. `by_ratio`
  // is for positive scores and is linear in the bits of the float, which are nearly its logarithm.
  static INLINE int64_t evenly(int64_t low, int64_t high, float part) {
    return order((1.f - part) * value(int32_t(low)) + part * value(int32_t(high)));
  }
  static INLINE int64_t by_ratio(int64_t low, int64_t high, float part) {
    const int64_t far = high - (kOctaves << 23);  // few scores are more than kOctaves factors of 2 below the bound
    low = far > low ? far : low;
    return low + int64_t(part * float(high - low));
  }
  static constexpr int64_t kOctaves = 12;

  // A threshold that exactly `budget` scores reach. If ties prevent it: the largest threshold that more than `budget`
  // scores reach. All `count` > `budget` scores lie between `smallest` and `greatest`; `between` interpolates.
  template <class Between>
  static INLINE Threshold search(const float* score, int count, int length, int budget, float smallest, float greatest,
                                 Between between) {
    int64_t low = order(smallest), high = order(greatest);
    int below = count, above = 0;  // number of scores ≥ low, and > high
    for (int step = 0; low < high; ++step) {
      int64_t middle = (low + high + 1) >> 1;
      if (step < 16) {  // interpolates roots of counts, because scores are sparse near the largest; then bisects
        const float part = step % 4 < 3 ? (root(below) - root(budget)) / (root(below) - root(above)) : 0.5f;
        const int64_t guess = between(low, high, part);
        if (guess > low && guess <= high) middle = guess;
      }
      const int found = least(count, at_least(score, length, value(int32_t(middle))));
      if (found == budget) return {value(int32_t(middle)), found};
      if (found > budget) {
        low = middle;
        below = found;
      } else {
        high = middle - 1;
        above = found;
      }
    }
    return {value(int32_t(low)), below};
  }

  static INLINE float root(int x) { return __builtin_sqrtf(float(x)); }

  // Writes the indices of the scores that reach the threshold, and returns how many. If more than `budget` reach it,
  // only the first of the scores equal to the threshold are taken. `numbers(i)` is the vector of kPacked indices from i
  // on.
  template <class Numbers>
  static INLINE int emit(const float* score, int length, const Threshold& threshold, int budget, int32_t* to,
                         Numbers numbers) {
    const F bound = S::splat(threshold.value);
    if (threshold.reached <= budget) {
      return append_all(length, [&](int i) { return S::reaching(S::load(score + i), bound); }, to, numbers);
    }
    int room = budget;
    for (int i = 0; i < length; i += W) room += S::sum(S::load(score + i) > bound);
    const auto found = [&](int i) {
      const F x = S::load(score + i);
      uint32_t bits = S::above(x, bound);
      for (uint32_t equal = S::bits(x == bound); equal && room > 0; equal &= equal - 1, --room) bits |= equal & -equal;
      return bits;
    };
    return append_all(length, found, to, numbers);
  }

  // Compress-store. `more` are pairs (to, numbers): appends the lanes of numbers(i) whose bit of found(i) is set to
  // `to`. Writes kPacked lanes at a time, so `to` needs room behind the last entry. Returns the number of entries.
  template <class Found, class... More>
  static INLINE int append_all(int length, Found found, More... more) {
    int n = 0;
    for (int i = 0; i < length; i += 16) {
      uint32_t bits = 0;
      UNROLL for (int j = 0; j < 16; j += W) bits |= found(i + j) << j;
      UNROLL for (int j = 0; j < 16; j += kPacked) {
        const uint32_t some = kPacked == 16 ? bits : bits >> j & 255;
        append(n, i + j, some, more...);
        n += __builtin_popcount(some);
      }
    }
    return n;
  }
  template <class T, class From, class... More>
  static INLINE void append(int n, int i, uint32_t bits, T* to, From from, More... more) {
    P::store(to + n, packed(from(i), bits));
    if constexpr (sizeof...(more)) append(n, i, bits, more...);
  }
  // Moves the lanes whose bits are set to the front.
  template <class V>
  static INLINE V packed(V x, uint32_t bits) {
#if defined(__AVX512F__)
    if constexpr (kPacked == 16) return (V)_mm512_maskz_compress_epi32(__mmask16(bits), (__m512i)x);
#endif
    return P::pick(x, P::load(kPositions.of[bits & 255]));
  }
  static INLINE typename P::I count_from(int i) {
    typename P::I lane;
    UNROLL for (int j = 0; j < kPacked; ++j) lane[j] = j;
    return lane + i;
  }
};

}  // namespace attendless::ATTENDLESS_ISA
