// The `budget` largest of a row of scores, in ascending order of index; of equal scores the lower index first.
//
// A threshold is searched by counting, which is a dozen passes over a row that stays in the first-level cache and has no
// branches to mispredict, where sorting or partitioning would mispredict at every other element.
#pragma once

#include "simd.hpp"

namespace attendless::ATTENDLESS_UNIT {

template <int W>
struct Select {
  using S = Simd<W>;
  using F = typename S::F;
  using I = typename S::I;

  // `score` has room for a multiple of 16 and is changed; a `bias` of -inf marks what must not be taken while anything
  // else is left; `own` are taken first. NaN counts as the largest score. `index` has room for `count` numbers and one.
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
    float threshold = kInfinity;
    if (owned < budget) threshold = search(score, count, length, budget, -S::largest(-low), S::largest(high));
    emit(score, count, length, threshold, budget, index);
    std::memcpy(chosen, index, sizeof(int32_t) * budget);
  }

 private:
  // Padding is -inf, so it is counted only when everything is.
  static INLINE int at_least(const float* score, int length, float threshold) {
    const F bound = S::splat(threshold);
    I found{};
    for (int i = 0; i < length; i += W) found -= S::load(score + i) >= bound;
    return S::sum(found);
  }

  // Floats as integers of the same order, to halve the interval between any two of them; its own inverse.
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

  // The largest threshold that at least `budget` scores reach, or any that exactly `budget` do.
  static INLINE float search(const float* score, int count, int length, int budget, float smallest, float greatest) {
    int64_t low = order(smallest), high = order(greatest);
    for (int step = 0; low < high; ++step) {
      int64_t middle = (low + high + 1) >> 1;
      if (step < 16) {  // scores lie more evenly than the integers their bits are
        const int64_t half = order(0.5f * value(int32_t(low)) + 0.5f * value(int32_t(high)));
        if (half > low && half <= high) middle = half;
      }
      const int found = least(count, at_least(score, length, value(int32_t(middle))));
      if (found == budget) return value(int32_t(middle));
      if (found > budget) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    return value(int32_t(low));
  }

  // Indices above the threshold, and as many of the first that equal it as the budget has room for.
  static INLINE void emit(const float* score, int count, int length, float threshold, int budget, int32_t* index) {
    int n = 0;
    if (at_least(score, length, threshold) == budget) {
      for (int i = 0; i < count; ++i) {
        index[n] = i;
        n += score[i] >= threshold;
      }
      return;
    }
    int room = budget;
    for (int i = 0; i < count; ++i) room -= score[i] > threshold;
    for (int i = 0; i < count; ++i) {
      index[n] = i;
      n += score[i] > threshold || (score[i] == threshold && room-- > 0);
    }
  }
};

}  // namespace attendless::ATTENDLESS_UNIT
