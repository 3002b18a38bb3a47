// Scratch memory: 64-byte aligned floats, given back at the end of the scope.
#pragma once

#include <cstdint>

namespace attendless {

class Memory {
 public:
  explicit Memory(int64_t floats);  // throws std::bad_alloc
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  float* data() const;  // not inline: instruction sets share no code

 private:
  float* data_;
};

}  // namespace attendless
