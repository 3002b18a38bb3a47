#include "parallel.hpp"

#include <atomic>
#include <cstdlib>
#include <new>

#if defined(_OPENMP)
#include <omp.h>
#include <pthread.h>
#endif

namespace attendless {

#if defined(_OPENMP)
namespace {
std::atomic<bool> forked{false};
const int watch = pthread_atfork(nullptr, nullptr, [] { forked = true; });
}  // namespace

void Team::wait() const {
  if (size > 1) {
#pragma omp barrier
  }
}

void run_parallel(int threads, void (*body)(void*, Team), void* context) {
  if (threads <= 1 || forked || watch != 0) return body(context, {0, 1});
#pragma omp parallel num_threads(threads)
  body(context, {omp_get_thread_num(), omp_get_num_threads()});
}
#else
void Team::wait() const {}

void run_parallel(int, void (*body)(void*, Team), void* context) { body(context, {0, 1}); }
#endif

Scratch::Scratch(int64_t floats) {
  void* memory = nullptr;
  if (posix_memalign(&memory, 64, size_t(floats) * sizeof(float))) throw std::bad_alloc();
  data_ = static_cast<float*>(memory);
}
Scratch::~Scratch() { std::free(data_); }
float* Scratch::data() const { return data_; }

}  // namespace attendless
