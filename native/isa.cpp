// The kernels of one instruction set. CMake compiles this file once per instruction set, with its own flags,
// ATTENDLESS_ISA (the name) and ATTENDLESS_WIDTH (floats per vector). `wide` compiles the AVX-512 width for AVX2, to
// test that code on machines without AVX-512. avx512bf16 differs from avx512 only in the products of bf16 and int8
// (words.hpp) and in rounding to bf16 (simd.hpp). armv86 differs from portable only in these products.
//
// A new kernel needs a header like block.hpp, an entry in Kernels, and a function here.
#include "block.hpp"
#include "foveal.hpp"
#include "gather.hpp"
#include "merge.hpp"
#include "schedule.hpp"
#include "sparsifiner.hpp"

#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)

namespace attendless::ATTENDLESS_ISA {
namespace {

constexpr int W = ATTENDLESS_WIDTH;

// The type of the queries selects the precision of the forward pass. Backward passes are fp32.
template <template <int, class> class Worker, class Args>
void run(const Args& args) {
  if (args.problem.q.element == Element::bf16) {
    Run<Worker<W, Half>>(args, false);
  } else {
    Run<Worker<W, Single>>(args, false);
  }
}

void foveal(const Foveal& args) {
  if (args.bytes) {
    Run<FovealHead<W, Byte>>(args, false);
  } else {
    run<FovealHead>(args);
  }
}
void foveal_backward(const Foveal& args) { Run<FovealHead<W, Single>>(args, true); }
void block(const Block& args) { run<BlockHead>(args); }
void block_backward(const Block& args) { Run<BlockHead<W, Single>>(args, true); }
void gather(const Gather& args) { run<GatherHead>(args); }
void gather_backward(const Gather& args) { Run<GatherHead<W, Single>>(args, true); }
void sparsifiner(const Sparsifiner& args) { run<SparsifinerHead>(args); }
void merge(const Merge& args) { MergeRun<W> run(args); }

void exp2(const float* from, float* to, int64_t count) {
  for (int64_t i = 0; i < count; i += W) {
    float lane[W] = {};
    const int64_t n = least<int64_t>(W, count - i);
    std::memcpy(lane, from + i, sizeof(float) * n);
    Simd<W>::store(lane, Simd<W>::exp2(Simd<W>::load(lane)));
    std::memcpy(to + i, lane, sizeof(float) * n);
  }
}

}  // namespace

extern const Kernels kernels;
const Kernels kernels = {TEXT(ATTENDLESS_ISA), foveal, foveal_backward, block, block_backward, gather,
                         gather_backward, sparsifiner, merge, exp2};

}  // namespace attendless::ATTENDLESS_ISA
