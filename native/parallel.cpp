// Threads of the Python module and of the harness: OpenMP, or threads started for one call.
#include "parallel.hpp"

#include <atomic>
#include <system_error>
#include <thread>
#include <vector>

#include <pthread.h>
#include <sched.h>

#if defined(_OPENMP)
#include <omp.h>
#endif

namespace attendless {
namespace {

// A forked child has no OpenMP threads, but its OpenMP runtime would wait for them.
std::atomic<bool> forked{false};
[[maybe_unused]] const int unwatched = pthread_atfork(nullptr, nullptr, [] { forked = true; });

void run_on_own_threads(int threads, void (*body)(void*, int), void* context) {
  std::vector<std::thread> others;
  others.reserve(size_t(threads) - 1);
  try {
    for (int rank = 1; rank < threads; ++rank) others.emplace_back(body, context, rank);
  } catch (const std::system_error&) {
    // The system provides no more threads: those that have started do all the work.
  }
  body(context, 0);
  for (std::thread& other : others) other.join();
}

}  // namespace

const char* why_own_threads() {
#if defined(_OPENMP)
  return forked      ? "this process was forked, and OpenMP's threads stayed behind"
         : unwatched ? "the system does not tell when a process forks"
                     : "";
#else
  return "the kernels were compiled without OpenMP";
#endif
}

void run_parallel(int threads, void (*body)(void*, int), void* context) {
  if (threads <= 1) return body(context, 0);
#if defined(_OPENMP)
  if (!*why_own_threads()) {
    // Uses a team of the size that PyTorch uses, because libgomp ends and starts threads if the team size changes.
    // Surplus threads return at once.
    const int most = omp_get_max_threads(), team = most > threads ? most : threads;
#pragma omp parallel num_threads(team)
    if (omp_get_thread_num() < threads) body(context, omp_get_thread_num());
    return;
  }
#endif
  run_on_own_threads(threads, body, context);
}

void give_way() { sched_yield(); }

}  // namespace attendless
