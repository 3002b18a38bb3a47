// Bump allocation of scratch memory. A Cursor returns consecutive pieces, each a whole number of 64-byte cache lines. A
// Cursor without memory only counts, so the code that lays out the memory also computes its size (`counted`).
//
// Under the address sanitizer, a poisoned gap follows every piece, so that an overrun into the next piece is reported.
#pragma once

#include "simd.hpp"

#if defined(__SANITIZE_ADDRESS__)
#define ATTENDLESS_ASAN
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define ATTENDLESS_ASAN
#endif
#endif

#if defined(ATTENDLESS_ASAN)
#include <sanitizer/asan_interface.h>
#endif

namespace attendless::ATTENDLESS_ISA {

// Rounds up to a multiple of 16: one cache line of 32-bit words, and a multiple of every vector width.
template <class N>
INLINE N padded(N count) {
  return (count + 15) / 16 * 16;
}

class Cursor {
  float* memory_ = nullptr;
  [[maybe_unused]] int64_t room_ = 0;
  int64_t used_ = 0;

 public:
  INLINE Cursor() {}  // counts only
  INLINE Cursor(float* memory, int64_t floats) : memory_(memory), room_(floats) {}

  INLINE int64_t used() const { return used_; }

  INLINE float* floats(int64_t count) {
    const int64_t from = used_;
    used_ += padded(count) + kGap;
    if (!memory_) return nullptr;
    guard(memory_ + from, count);
    return memory_ + from;
  }
  INLINE int32_t* ints(int64_t count) { return reinterpret_cast<int32_t*>(floats(count)); }
  template <class To = const float*>
  INLINE To* pointers(int64_t count) {
    return reinterpret_cast<To*>(floats(2 * count));  // a pointer has at most 8 bytes
  }
  // Reserves a piece that callees lay out later, possibly with different layouts in successive calls.
  INLINE Cursor part(int64_t count) {
    float* const from = floats(count);
    return from ? Cursor(from, count) : Cursor();
  }

 private:
#if defined(ATTENDLESS_ASAN)
  static constexpr int64_t kGap = 16;
  void guard(float* piece, int64_t count) const {
    float* const end = memory_ + used_;
    if (used_ > room_) __builtin_trap();
    __asan_unpoison_memory_region(piece, sizeof(float) * size_t(count));
    __asan_poison_memory_region(piece + count, sizeof(float) * size_t(end - piece - count));
  }
#else
  static constexpr int64_t kGap = 0;
  INLINE void guard(float*, int64_t) const {
#if !defined(NDEBUG)
    if (used_ > room_) __builtin_trap();
#endif
  }
#endif
};

// The number of floats that `lay_out` takes from a cursor.
template <class LayOut>
INLINE int64_t counted(LayOut lay_out) {
  Cursor memory;
  lay_out(memory);
  return memory.used();
}

}  // namespace attendless::ATTENDLESS_ISA
