// Threads and scratch memory for the units.
#pragma once

#include <cstdint>

namespace attendless {

// Run `body` with ranks 0, 1, … on up to `threads` threads of the OpenMP runtime PyTorch uses. In a forked child, where
// that runtime's threads are gone, it runs on the calling thread alone.
void run_parallel(int threads, void (*body)(void* context, int rank), void* context);

// Let another thread run.
void give_way();

// 64-byte aligned floats, given back at the end of the scope.
class Scratch {
 public:
  explicit Scratch(int64_t floats);
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  float* data() const;

 private:
  float* data_;
};

}  // namespace attendless
