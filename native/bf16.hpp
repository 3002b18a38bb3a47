// bfloat16, the upper half of a 32-bit float. Kernels read and write it, and compute in floats; how is in simd.hpp.
#pragma once

#include <cstdint>

namespace attendless {

struct Bf16 {
  uint16_t bits;
};

}  // namespace attendless
