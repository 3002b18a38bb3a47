// Symmetric int8 quantization of keys and queries, with one scale per row: max |x| / 127. Each function makes two
// passes over a row: maximum of the magnitudes, then rounding.
//
// The int8 dot product takes one unsigned operand (words.hpp), so queries are stored with zero point 128. This adds
// 128 · Σ key bytes to each product. Each key row stores -128 · Σ key bytes as `offset`, the initial value of the
// accumulator.
#pragma once

#include "kv_table.hpp"

namespace attendless::ATTENDLESS_ISA {

template <int W>
struct Bytes {
  using S = Simd<W>;
  using F = typename S::F;
  using I = typename S::I;
  using U = typename S::U;

  // Quantizes `key - centre` of a table row; writes the row's bytes, scale and offset.
  static INLINE void put(const KvTable<Byte>& rows, int64_t row, const float* centre) {
    const Bf16* const key = rows.key(row);
    I sum{};
    rows.scale[row] = of_row([&](int c) INLINE_LAMBDA { return S::load(key + c) - S::load(centre + c); }, rows.width, 0,
                             rows.byte(row), sum);
    rows.offset[row] = int32_t(0u - 128u * uint32_t(S::sum(sum)));
  }

  // Quantizes one query, given as words of bf16. Returns its scale.
  static INLINE float of_query(const uint32_t* halves, int width, uint32_t* to) {
    const Bf16* const query = reinterpret_cast<const Bf16*>(halves);
    I sum{};
    return of_row([&](int c) INLINE_LAMBDA { return S::load(query + c); }, width, 128, reinterpret_cast<uint8_t*>(to), sum);
  }

  // Quantizes W queries, one per lane, with lanes `stride` words apart: [2 · count][stride] bf16 words →
  // [count][stride] byte words. Returns the scales.
  static INLINE F of_queries(const uint32_t* halves, int count, int stride, uint32_t* to) {
    I most{};
    for (int c = 0; c < 2 * count; ++c) {
      const U two = S::load(halves + c * stride);
      most = larger(larger(most, magnitude(first(two))), magnitude(second(two)));
    }
    const F by = inverse((F)most);
    const auto byte = [&](F x) INLINE_LAMBDA { return (U)(S::nearest(x * by) + 128); };
    for (int c = 0; c < count; ++c) {
      const U low = S::load(halves + 2 * c * stride), high = S::load(halves + (2 * c + 1) * stride);
      S::store(to + c * stride,
               byte(first(low)) | byte(second(low)) << 8 | byte(first(high)) << 16 | byte(second(high)) << 24);
    }
    return scale((F)most);
  }

 private:
  // Quantizes one row. numbers(c) loads the vector of channels from c on; `zero` is the zero point. The row is padded
  // with 0 to a multiple of 16 words. Adds the bytes without the zero point to `sum`, and returns the scale.
  template <class Numbers>
  static INLINE float of_row(Numbers numbers, int width, int zero, uint8_t* to, I& sum) {
    const int end = KvTable<Byte>::byte_words(width) * 4;
    width = padded(width);
    I most{};
    for (int c = 0; c < width; c += W) most = larger(most, magnitude(numbers(c)));
    const F largest = (F)S::splat(S::largest(most)), by = inverse(largest);
    for (int c = 0; c < width; c += W) {
      const I byte = S::nearest(numbers(c) * by);
      sum += byte;
      S::store_bytes(to + c, byte + zero);
    }
    std::memset(to + width, 0, size_t(end - width));
    return scale(largest)[0];
  }

  static INLINE F first(U two) { return (F)(two << 16); }
  static INLINE F second(U two) { return (F)(two & 0xffff0000u); }
  // |x| as integer bits: the order of non-negative floats is the order of their bits, with infinity and NaN largest.
  static INLINE I magnitude(F x) { return (I)x & 0x7fffffff; }
  static INLINE I larger(I a, I b) { return b > a ? b : a; }
  static INLINE F inverse(F largest) { return largest > 0.f ? 127.f / largest : F{}; }
  static INLINE F scale(F largest) { return largest * (1.f / 127.f) + (largest - largest); }  // NaN if not finite
};

}  // namespace attendless::ATTENDLESS_ISA
