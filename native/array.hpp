// An array as it lies in memory, whoever it belongs to: Python, OpenVINO, a test.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "bf16.hpp"

namespace attendless {

enum class Lies { anyhow, packed };  // packed: in the order of its axes, without gaps

template <class T, size_t rank, Lies lies = Lies::packed>
class Array {
 public:
  using Shape = std::array<size_t, rank>;
  using Strides = std::array<int64_t, rank>;  // in elements

  Array() = default;
  Array(T* data, const Shape& shape) : data_(data), shape_(shape) {
    int64_t step = 1;
    for (size_t axis = rank; axis-- > 0; step *= int64_t(shape[axis])) strides_[axis] = step;
  }
  Array(T* data, const Shape& shape, const Strides& strides) : data_(data), shape_(shape), strides_(strides) {
    static_assert(lies == Lies::anyhow, "a packed array's strides follow from its shape");
  }

  T* data() const { return data_; }
  size_t shape(size_t axis) const { return shape_[axis]; }
  int64_t stride(size_t axis) const { return strides_[axis]; }
  size_t size() const {
    size_t product = 1;
    for (const size_t length : shape_) product *= length;
    return product;
  }

 private:
  T* data_ = nullptr;
  Shape shape_{};
  Strides strides_{};
};

using Heads = Array<float, 4, Lies::anyhow>;   // [B, H, N, channels]
using HalfHeads = Array<Bf16, 4, Lies::anyhow>;
using Tokens = Array<float, 3, Lies::anyhow>;  // [B, N, channels]
using Lse = Array<float, 3>;                   // [B, H, N]
using Bias = Array<float, 2>;                  // [B, N]
using Tables = Array<float, 3>;                // [1 or B, rows, columns]: one for all images, or one for each
using Places = Array<int32_t, 2>;              // [B, patches]
using Chosen = Array<int32_t, 4>;              // [B, H, tiles, budget]
using Counts = Array<int32_t, 3>;              // [B, H, N]
using Floats = Array<float, 1>;
using Indices = Array<int32_t, 1>;
using Longs = Array<int64_t, 2>;               // [B, patches or cells]

// [B, H, N, channels] of floats or of bfloat16: what a forward pass takes and gives.
struct AnyHeads : Array<void, 4, Lies::anyhow> {
  bool bf16 = false;

  AnyHeads() = default;
  template <class T>
  AnyHeads(const Array<T, 4, Lies::anyhow>& x)
      : Array(x.data(), {x.shape(0), x.shape(1), x.shape(2), x.shape(3)},
              {x.stride(0), x.stride(1), x.stride(2), x.stride(3)}),
        bf16(std::is_same_v<T, Bf16>) {}
};

}  // namespace attendless
