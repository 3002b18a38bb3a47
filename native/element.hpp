// Element types of tensors. attendless.sparse.descriptions.ELEMENTS lists the same types; operations.hpp asserts it.
// attendless.sparse.table lists the types that each operation reads.
#pragma once

#include <cstdint>

namespace attendless {

enum class Element : uint8_t { f32, bf16, i8, i32, i64, other };

// bf16: the upper half of a float. simd.hpp converts between bf16 and fp32; sums are fp32.
struct Bf16 {
  uint16_t bits;
};

template <class T>
constexpr Element kElement = Element::other;
template <>
inline constexpr Element kElement<float> = Element::f32;
template <>
inline constexpr Element kElement<Bf16> = Element::bf16;
template <>
inline constexpr Element kElement<int8_t> = Element::i8;
template <>
inline constexpr Element kElement<int32_t> = Element::i32;
template <>
inline constexpr Element kElement<int64_t> = Element::i64;

constexpr const char* name_of(Element element) {
  constexpr const char* names[] = {"f32", "bf16", "i8", "i32", "i64", "another type"};
  return names[int(element)];
}

}  // namespace attendless
