// Aligned allocation of scratch memory. A separate file, because instruction sets must not share inline functions.
#include "memory.hpp"

#include <cstdlib>
#include <new>

namespace attendless {

Memory::Memory(int64_t floats) {
  void* memory = nullptr;
  if (posix_memalign(&memory, 64, size_t(floats) * sizeof(float))) throw std::bad_alloc();
  data_ = static_cast<float*>(memory);
}

Memory::~Memory() { std::free(data_); }
float* Memory::data() const { return data_; }

}  // namespace attendless
