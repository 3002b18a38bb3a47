// Element types: the kinds of numbers tensors hold. attendless.sparse.descriptions.ELEMENTS names the same ones, which
// operations.hpp asserts. Which of them a kernel reads is up to the operation; see attendless.sparse.table.
#pragma once

#include <cstdint>

namespace attendless {

enum class Element : uint8_t { f32, bf16, i8, i32, i64, other };

// bfloat16: the upper half of a float. Kernels convert it where they read and write (simd.hpp), and compute in floats.
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
