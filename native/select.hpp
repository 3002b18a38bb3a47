// The `budget` largest of a row of scores, in ascending order of index; of equal scores the lower index first.
//
// A threshold is searched by counting, which is a handful of passes over a row that stays in the first-level cache and
// has no branches to mispredict, where sorting or partitioning would mispredict at every other element.
#pragma once

#include "simd.hpp"

namespace attendless::ATTENDLESS_UNIT {

template <int W>
struct Select {
  using S = Simd<W>;
  using F = typename S::F;
  using I = typename S::I;
  static constexpr int32_t kForced = INT32_MAX, kNever = INT32_MIN;

  // Floats as integers of the same order. NaN comes after everything, as in torch.sort.
  static INLINE I order(F x) {
    const I bits = (I)(x + 0.f);  // -0 becomes 0: they are equal
    return x != x ? S::splat(kForced - 1) : bits ^ ((bits >> 31) & 0x7fffffff);
  }
  static INLINE float value(int32_t key) {
    const int32_t bits = key ^ ((key >> 31) & 0x7fffffff);
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
  }

  // `score` has room for a multiple of 16 and is used up; `bias` of -inf marks what must not be taken while anything
  // else is left; `own` are taken first.
  static void largest(float* score, const float* bias, int count, const int32_t* own, int owned, int budget,
                      int32_t* chosen) {
    int32_t* const key = reinterpret_cast<int32_t*>(score);
    const int length = (count + 15) / 16 * 16;
    I low = S::splat(kForced), high = S::splat(kNever);
    for (int i = 0; i < length; i += W) {
      const F x = S::load(bias + i) == -kInfinity ? S::splat(-kInfinity) : S::load(score + i);
      const I k = order(x);
      low = k < low ? k : low;
      high = k > high ? k : high;
      S::store(key + i, k);
    }
    for (int i = count; i < length; ++i) key[i] = kNever;
    for (int i = 0; i < owned; ++i) key[own[i]] = kForced;
    int32_t least_key = kForced, most_key = kNever;
    for (int i = 0; i < W; ++i) {
      least_key = low[i] < least_key ? low[i] : least_key;
      most_key = high[i] > most_key ? high[i] : most_key;
    }
    const int32_t threshold = owned >= budget ? kForced : search(key, length, budget, least_key, most_key);
    emit(key, length, threshold, budget - at_least(key, length, int64_t(threshold) + 1), chosen);
  }

 private:
  static INLINE int at_least(const int32_t* key, int length, int64_t threshold) {
    if (threshold > kForced) return 0;
    const I bound = S::splat(int32_t(threshold));
    I found{};
    for (int i = 0; i < length; i += W) found -= S::load(key + i) >= bound;
    int sum = 0;
    for (int i = 0; i < W; ++i) sum += found[i];
    return sum;
  }

  // The largest threshold that at least `budget` keys reach, or any that exactly `budget` do.
  static INLINE int32_t search(const int32_t* key, int length, int budget, int32_t low, int32_t high) {
    for (int step = 0; low < high; ++step) {
      int64_t middle = (int64_t(low) + high + 1) >> 1;
      // Halving the scores' range closes in on scores that lie evenly, halving the integers' on any at all.
      if (step < 16) {
        const float half = 0.5f * value(low) + 0.5f * value(high);
        int32_t bits;
        std::memcpy(&bits, &half, sizeof bits);
        bits ^= (bits >> 31) & 0x7fffffff;
        if (bits > low && bits <= high) middle = bits;
      }
      const int found = at_least(key, length, middle);
      if (found == budget) return int32_t(middle);
      if (found > budget) {
        low = int32_t(middle);
      } else {
        high = int32_t(middle - 1);
      }
    }
    return low;
  }

  // Indices above the threshold, and the first `ties` of those that equal it.
  static INLINE void emit(const int32_t* key, int length, int32_t threshold, int ties, int32_t* chosen) {
    const I bound = S::splat(threshold);
    for (int i = 0; i < length; i += W) {
      const I reached = S::load(key + i) >= bound;
      const typename S::Bytes flags = __builtin_convertvector(reached, typename S::Bytes);
      uint64_t part[(W + 7) / 8] = {};
      std::memcpy(part, &flags, sizeof flags);
      UNROLL for (int j = 0; j < (W + 7) / 8; ++j) {
        for (uint64_t left = part[j] & 0x0101010101010101u; left; left &= left - 1) {
          const int at = i + 8 * j + __builtin_ctzll(left) / 8;
          if (key[at] == threshold && --ties < 0) continue;
          *chosen++ = at;
        }
      }
    }
  }
};

}  // namespace attendless::ATTENDLESS_UNIT
