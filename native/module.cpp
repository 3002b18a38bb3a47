// The Python module attendless._native. Tensors are DLPack capsules, and the GIL is released while a kernel runs. The
// module does not depend on PyTorch: attendless.sparse.native passes the tensors and allocates the results.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "checks.hpp"
#include "dispatch.hpp"
#include "operations.hpp"
#include "parallel.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace attendless {
namespace {

using Floats = Array<float, 1>;

Element element_of(nb::dlpack::dtype type) {
  const auto is = [&](nb::dlpack::dtype_code code, int bits) {
    return type.code == uint8_t(code) && type.bits == bits && type.lanes == 1;
  };
  if (is(nb::dlpack::dtype_code::Float, 32)) return Element::f32;
  if (is(nb::dlpack::dtype_code::Bfloat, 16)) return Element::bf16;
  if (is(nb::dlpack::dtype_code::Int, 8)) return Element::i8;
  if (is(nb::dlpack::dtype_code::Int, 32)) return Element::i32;
  if (is(nb::dlpack::dtype_code::Int, 64)) return Element::i64;
  return Element::other;
}

// The positional arguments of one call from Python: visits the arguments of an operation and fills them in. Holds
// references to the tensors until it is destroyed.
class FromPython {
 public:
  explicit FromPython(const nb::args& given) : given_(given) { held_.reserve(given.size()); }

  template <class Any>
  void tensor(const char* name, std::optional<Any>& array, Forms = {}) {
    if (given_[checked(name)].is_none()) {
      ++next_;
    } else {
      tensor(name, array.emplace());
    }
  }

  template <class Any>
  void tensor(const char* name, Any& array, Forms = {}) {
    const nb::handle source = take(name);
    nb::ndarray<nb::device::cpu> found;
    require(!source.is_none() && nb::try_cast(source, found, false), name, " must be a tensor on the CPU");
    const Element element = element_of(found.dtype());
    bool known = false;
    for (const Element one : Any::kElements) known |= one == element;
    require(known, name, " cannot be ", name_of(element), ": ", wanted<Any>());
    require(found.ndim() == Any::kRank, name, " must have ", Any::kRank, " axes, not ", found.ndim());
    fill(array, found, element, name);
    held_.push_back(std::move(found));
  }

  template <class Number>
  void attribute(const char* name, Number& value) {
    require(nb::try_cast(take(name), value, true), name, " must be a number of 64 bits");
  }

  template <class Plan>
  void attribute(const char* name, Fields<Plan>& value) {
    require(nb::try_cast(take(name), value.numbers, true), name, " must be a list of integers");
  }

  template <class Any, class Size>
  void result(const char* name, std::optional<Any>& array, const Size& shape) {
    tensor(name, array);
    require(!array || array->shape() == shape(), name, " has the wrong shape");
  }

  template <class Any, class Size>
  void result(const char* name, Any& array, const Size& shape) {
    tensor(name, array);
    require(array.shape() == shape(), name, " has the wrong shape");
  }

  void end() const { require(next_ == given_.size(), given_.size(), " arguments were given, ", next_, " expected"); }

 private:
  size_t checked(const char* name) const {
    require(next_ < given_.size(), name, " is missing");
    return next_;
  }

  nb::handle take(const char* name) {
    const nb::handle found = given_[checked(name)];
    ++next_;
    return found;
  }

  template <class Any>
  static std::string wanted() {
    std::string text;
    for (const Element one : Any::kElements) text += std::string(text.empty() ? "the kernel takes " : " or ") + name_of(one);
    return text;
  }

  template <class T, size_t rank, Storage storage, class Found>
  static void fill(Array<T, rank, storage>& array, const Found& found, Element, const char* name) {
    const auto [shape, strides] = sizes<rank>(found);
    if constexpr (storage == Storage::packed) {
      int64_t step = 1;
      for (size_t axis = rank; axis-- > 0; step *= int64_t(shape[axis])) {
        require(shape[axis] == 1 || strides[axis] == step || found.size() == 0, name, " must be contiguous");
      }
      array = {static_cast<T*>(found.data()), shape};
    } else {
      array = {static_cast<T*>(found.data()), shape, strides};
    }
  }

  template <size_t rank, Element... known, class Found>
  static void fill(OneOf<rank, known...>& array, const Found& found, Element element, const char*) {
    const auto [shape, strides] = sizes<rank>(found);
    array = {found.data(), shape, strides, element};
  }

  template <size_t rank, class Found>
  static std::pair<Shape<rank>, std::array<int64_t, rank>> sizes(const Found& found) {
    std::pair<Shape<rank>, std::array<int64_t, rank>> all;
    for (size_t axis = 0; axis < rank; ++axis) {
      all.first[axis] = found.shape(axis);
      all.second[axis] = found.stride(axis);
    }
    return all;
  }

  const nb::args& given_;
  size_t next_ = 0;
  std::vector<nb::ndarray<nb::device::cpu>> held_;
};

// The arguments and results of an operation as text. A test compares the text with attendless.sparse.table.
struct Signature {
  std::string text;

  template <class Any>
  void tensor(const char* name, const std::optional<Any>&, Forms = {}) {
    tensor((std::string(name) + "?").c_str(), Any());
  }
  template <class Any>
  void tensor(const char* name, const Any&, Forms = {}) {
    text += std::string(name) + " [" + std::to_string(Any::kRank) + "]";
    for (const Element one : Any::kElements) text += std::string(" ") + name_of(one);
    text += Any::kStorage == Storage::packed ? " packed, " : ", ";
  }
  template <class Number>
  void attribute(const char* name, const Number&) {
    text += std::string(name) + ", ";
  }
  template <class Any, class Size>
  void result(const char* name, const Any& array, const Size&) {
    tensor(name, array);
  }
};

template <class Arguments>
std::string signature() {
  Arguments arguments;
  Signature signature;
  arguments.visit(signature);
  signature.attribute("threads", arguments.threads);
  arguments.visit_results(signature);
  return signature.text;
}

template <class Arguments>
void bind(nb::module_& m) {
  m.def(Arguments::kName, [](const nb::args& given) {
    Arguments arguments;
    FromPython from(given);
    arguments.visit(from);
    from.attribute("threads", arguments.threads);
    arguments.visit_results(from);
    from.end();
    const nb::gil_scoped_release unlocked;
    run(arguments);
  });
}

template <class... Arguments>
void bind_all(nb::module_& m, List<Arguments...>) {
  (bind<Arguments>(m), ...);
  m.def("signatures", [] { return std::vector<std::pair<std::string, std::string>>{{Arguments::kName, signature<Arguments>()}...}; },
        "The name and the arguments of each operation.");
}

void power_of_two(const nb::args& given) {
  Floats from, to;
  FromPython arrays(given);
  arrays.tensor("source", from);
  arrays.tensor("target", to);
  require(from.size() == to.size(), "both arrays must be equally long");
  kernels().exp2(from.data(), to.data(), int64_t(from.size()));
}

int threads_running(int threads) {
  std::atomic<int> running{0};
  run_parallel(std::clamp(threads, 1, kMostThreads), [](void* count, int) { ++*static_cast<std::atomic<int>*>(count); },
               &running);
  return running;
}

}  // namespace
}  // namespace attendless

NB_MODULE(_native, m) {
  using namespace attendless;
  m.doc() = "Attention kernels for CPUs. The functions take the arguments of native/operations.hpp in order.";
  m.def("paths", &isas, "Instruction sets this machine can run, best first.");
  m.def("path", [] { return std::string(kernels().name); }, "The instruction set in use.");
  m.def("use_path", &use_isa, "name"_a, "Use this instruction set from now on.");
  m.def("why_own_threads", &why_own_threads, "Why each call starts its own threads; empty: it uses OpenMP's.");
  m.def("threads_running", &threads_running, "threads"_a, "How many threads take part if this many are asked for.",
        nb::call_guard<nb::gil_scoped_release>());
  m.def("exp2", &power_of_two, "The kernels' own 2^x: source, target.");
  bind_all(m, Operations());
}
