// Threads and scratch memory for the units.
#pragma once

#include <cstddef>
#include <cstdint>

namespace attendless {

struct Team {
  int rank, size;
  void wait() const;  // until every member of the team is here
};

// Run `body` on up to `threads` threads of the OpenMP runtime PyTorch uses. In a forked child, where that runtime's
// threads are gone, it runs on the calling thread alone.
void run_parallel(int threads, void (*body)(void* context, Team), void* context);

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
