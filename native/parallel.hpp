// Threads for the kernels.
#pragma once

namespace attendless {

// Run `body` with ranks 0, 1, … on up to `threads` threads: those of the OpenMP runtime PyTorch uses. Where they cannot
// be had, threads are started for this call, which costs some 20 µs each.
void run_parallel(int threads, void (*body)(void* context, int rank), void* context);

// Why threads are started for each call; empty if OpenMP's are used.
const char* why_own_threads();

// Let another thread run.
void give_way();

}  // namespace attendless
