// Scratch memory: a 64-byte aligned array of floats, freed by the destructor.
#pragma once

#include <cstdint>

namespace attendless {

class Memory {
 public:
  explicit Memory(int64_t floats);  // throws std::bad_alloc
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  float* data() const;  // not inline: code for different instruction sets must not share functions (simd.hpp)

 private:
  float* data_;
};

}  // namespace attendless
