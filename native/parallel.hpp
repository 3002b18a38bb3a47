// Threads for the kernels. parallel.cpp (Python, harness), openvino.cpp and onnxruntime.cpp each define these
// functions.
#pragma once

namespace attendless {

// Runs `body` with ranks 0, 1, … on up to `threads` threads and waits for all. Not every rank runs if the system
// provides fewer threads, so `body` must take its work from a shared counter. In parallel.cpp, the threads are those of
// PyTorch's OpenMP runtime; if they are not available, each call starts its own, at about 20 µs per thread.
void run_parallel(int threads, void (*body)(void* context, int rank), void* context);

// The reason why each call starts its own threads; empty if threads are reused.
const char* why_own_threads();

// Yields the processor to another thread.
void give_way();

}  // namespace attendless
