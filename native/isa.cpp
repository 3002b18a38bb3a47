// One instruction set's kernels. CMake compiles this file several times, each with its flags, its ATTENDLESS_ISA (a
// name) and its ATTENDLESS_WIDTH (floats in a vector). `wide` is avx512's width compiled for AVX2: on machines without
// AVX-512 it tests that code.
//
// A new kernel needs a header like block.hpp, an entry in Kernels, and a line here.
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

void foveal(const Foveal& args) { Run<FovealHead<W>>(args, false); }
void foveal_backward(const Foveal& args) { Run<FovealHead<W>>(args, true); }
void block(const Block& args) { Run<BlockHead<W>>(args, false); }
void block_backward(const Block& args) { Run<BlockHead<W>>(args, true); }
void gather(const Gather& args) { Run<GatherHead<W>>(args, false); }
void gather_backward(const Gather& args) { Run<GatherHead<W>>(args, true); }
void sparsifiner(const Sparsifiner& args) { Run<SparsifinerHead<W>>(args, false); }
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
