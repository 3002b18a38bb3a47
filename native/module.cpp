// The Python module: arrays in and out, with the interpreter's lock released while the kernels run. It knows nothing of
// PyTorch; attendless.sparse.native hands it tensors as NumPy arrays and allocates the results.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <string>
#include <type_traits>

#include "api.hpp"
#include "dispatch.hpp"
#include "geometry.hpp"
#include "parallel.hpp"

namespace nb = nanobind;
using namespace nb::literals;

// An array of Python's as one of ours. It is held until the call returns. NumPy knows no bfloat16: its bits come as
// int16.
namespace nanobind::detail {

template <class T, size_t rank, attendless::Lies lies>
struct type_caster<attendless::Array<T, rank, lies>> {
  using Ours = attendless::Array<T, rank, lies>;
  using Number = std::conditional_t<std::is_same_v<T, attendless::Bf16>, int16_t, T>;
  using Theirs = std::conditional_t<lies == attendless::Lies::packed,
                                    nb::ndarray<Number, nb::ndim<rank>, nb::c_contig, nb::device::cpu>,
                                    nb::ndarray<Number, nb::ndim<rank>, nb::device::cpu>>;
  NB_TYPE_CASTER(Ours, make_caster<Theirs>::Name)

  bool from_python(handle source, uint8_t flags, cleanup_list* cleanup) noexcept {
    if (!held.from_python(source, flags, cleanup)) return false;
    const Theirs& array = held.value;
    T* const data = reinterpret_cast<T*>(array.data());
    typename Ours::Shape shape;
    typename Ours::Strides strides;
    for (size_t axis = 0; axis < rank; ++axis) {
      shape[axis] = array.shape(axis);
      strides[axis] = array.stride(axis);
    }
    if constexpr (lies == attendless::Lies::packed) {
      value = Ours(data, shape);
    } else {
      value = Ours(data, shape, strides);
    }
    return true;
  }

 private:
  make_caster<Theirs> held;
};

template <>
struct type_caster<attendless::AnyHeads> {
  NB_TYPE_CASTER(attendless::AnyHeads, make_caster<attendless::Heads>::Name)

  bool from_python(handle source, uint8_t flags, cleanup_list* cleanup) noexcept {
    if (floats.from_python(source, flags, cleanup)) {
      value = floats.value;
    } else if (halves.from_python(source, flags, cleanup)) {
      value = halves.value;
    } else {
      return false;
    }
    return true;
  }

 private:
  make_caster<attendless::Heads> floats;
  make_caster<attendless::HalfHeads> halves;
};

}  // namespace nanobind::detail

namespace attendless {
namespace {

void power_of_two(const Floats& from, const Floats& to) {
  require(from.size() == to.size(), "both arrays must be equally long");
  kernels().exp2(from.data(), to.data(), int64_t(from.size()));
}

int64_t foveal_tiles(const Numbers& layout) { return Layout(layout).tiles(); }

int threads_running(int threads) {
  std::atomic<int> running{0};
  run_parallel(std::clamp(threads, 1, kMostThreads), [](void* count, int) { ++*static_cast<std::atomic<int>*>(count); },
               &running);
  return running;
}

}  // namespace
}  // namespace attendless

// Without `noconvert` nanobind would silently copy an array of another type, and results would go into the copy.
#define ARRAY(name) nb::arg(name).noconvert()
#define MAYBE(name) nb::arg(name).noconvert().none()

NB_MODULE(_native, m) {
  using namespace attendless;
  constexpr nb::call_guard<nb::gil_scoped_release> kUnlocked;
  m.doc() = "Attention kernels for CPUs.";
  m.def("paths", &isas, "Instruction sets this machine can run, best first.");
  m.def("path", [] { return std::string(kernels().name); }, "The instruction set in use.");
  m.def("use_path", &use_isa, "name"_a, "Use this instruction set from now on.");
  m.def("why_own_threads", &why_own_threads, "Why threads are started for each call; empty: they are OpenMP's.");
  m.def("threads_running", &threads_running, "threads"_a, "How many threads take part if so many are asked for.",
        kUnlocked);
  m.def("foveal_tiles", &foveal_tiles, "layout"_a, "Tiles of a layout, which is checked.");
  m.def("exp2", &power_of_two, ARRAY("source"), ARRAY("target"), "The kernels' own 2^x.");
  m.def("foveal_select", &foveal_select, ARRAY("q"), ARRAY("k"), MAYBE("key_bias"), MAYBE("places"), "layout"_a,
        "scale"_a, "threads"_a, ARRAY("chosen"), kUnlocked);
  m.def("foveal_attend", &foveal_attend, ARRAY("q"), ARRAY("k"), ARRAY("v"), MAYBE("key_bias"), MAYBE("places"),
        "layout"_a, "scale"_a, "threads"_a, MAYBE("chosen"), "select"_a, ARRAY("out"), ARRAY("lse"), kUnlocked);
  m.def("foveal_backward", &foveal_backward, ARRAY("q"), ARRAY("k"), ARRAY("v"), MAYBE("key_bias"), MAYBE("places"),
        "layout"_a, "scale"_a, "threads"_a, ARRAY("chosen"), ARRAY("out"), ARRAY("lse"), ARRAY("out_grad"),
        ARRAY("q_grad"), ARRAY("k_grad"), ARRAY("v_grad"), MAYBE("bias_grad"), kUnlocked);
  m.def("block_attend", &block_attend, ARRAY("q"), ARRAY("k"), ARRAY("v"), MAYBE("key_bias"), ARRAY("query_start"),
        ARRAY("queries"), ARRAY("key_start"), ARRAY("keys"), "scale"_a, "threads"_a, ARRAY("out"), ARRAY("lse"),
        kUnlocked);
  m.def("block_backward", &block_backward, ARRAY("q"), ARRAY("k"), ARRAY("v"), MAYBE("key_bias"), ARRAY("query_start"),
        ARRAY("queries"), ARRAY("key_start"), ARRAY("keys"), "scale"_a, "threads"_a, ARRAY("out"), ARRAY("lse"),
        ARRAY("out_grad"), ARRAY("q_grad"), ARRAY("k_grad"), ARRAY("v_grad"), MAYBE("bias_grad"), kUnlocked);
  m.def("gather_attend", &gather_attend, ARRAY("q"), ARRAY("k"), ARRAY("v"), MAYBE("key_bias"), ARRAY("indices"),
        MAYBE("counts"), "scale"_a, "threads"_a, ARRAY("out"), ARRAY("lse"), kUnlocked);
  m.def("gather_backward", &gather_backward, ARRAY("q"), ARRAY("k"), ARRAY("v"), MAYBE("key_bias"), ARRAY("indices"),
        MAYBE("counts"), "scale"_a, "threads"_a, ARRAY("out"), ARRAY("lse"), ARRAY("out_grad"), ARRAY("q_grad"),
        ARRAY("k_grad"), ARRAY("v_grad"), MAYBE("bias_grad"), kUnlocked);
  m.def("sparsifiner_select", &sparsifiner_select, ARRAY("coefficients"), ARRAY("basis"), "budget"_a, "prefix"_a,
        "tau"_a, "top"_a, "threads"_a, ARRAY("indices"), ARRAY("counts"), kUnlocked);
  m.def("sparsifiner", &sparsifiner, ARRAY("q"), ARRAY("k"), ARRAY("v"), MAYBE("key_bias"), ARRAY("coefficients"),
        ARRAY("basis"), MAYBE("tail_scores"), MAYBE("tail_values"), MAYBE("share"), "budget"_a, "prefix"_a, "tau"_a,
        "top"_a, "scale"_a, "threads"_a, ARRAY("out"), ARRAY("lse"), kUnlocked);
  m.def("merge", &merge, ARRAY("x"), ARRAY("keys"), MAYBE("importance"), MAYBE("sizes"), MAYBE("cells"),
        MAYBE("owners"), "plan"_a, "protect"_a, "threads"_a, ARRAY("out"), ARRAY("sizes_out"), ARRAY("cells_out"),
        ARRAY("owners_out"), kUnlocked);
}
