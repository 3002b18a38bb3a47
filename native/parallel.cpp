#include "parallel.hpp"

#include <cstdlib>
#include <new>

#include <sched.h>

#if defined(_OPENMP)
#include <atomic>

#include <omp.h>
#include <pthread.h>
#endif

namespace attendless {

#if defined(_OPENMP)
namespace {
std::atomic<bool> forked{false};
const int unwatched = pthread_atfork(nullptr, nullptr, [] { forked = true; });
}  // namespace

void run_parallel(int threads, void (*body)(void*, int), void* context) {
  if (threads <= 1 || forked || unwatched) return body(context, 0);
#pragma omp parallel num_threads(threads)
  body(context, omp_get_thread_num());
}
#else
void run_parallel(int, void (*body)(void*, int), void* context) { body(context, 0); }
#endif

void give_way() { sched_yield(); }

Scratch::Scratch(int64_t floats) {
  void* memory = nullptr;
  if (posix_memalign(&memory, 64, size_t(floats) * sizeof(float))) throw std::bad_alloc();
  data_ = static_cast<float*>(memory);
}
Scratch::~Scratch() { std::free(data_); }
float* Scratch::data() const { return data_; }

}  // namespace attendless
