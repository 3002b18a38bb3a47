// Non-owning tensor views, with element type and rank in the type. Python, OpenVINO, ONNX Runtime or a test owns the
// memory.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "element.hpp"

namespace attendless {

enum class Storage { strided, packed };  // packed: row-major without gaps

template <size_t rank>
using Shape = std::array<size_t, rank>;

template <class T, size_t axes, Storage storage = Storage::packed>
class Array {
 public:
  static constexpr size_t kRank = axes;
  static constexpr Storage kStorage = storage;
  static constexpr std::array<Element, 1> kElements = {kElement<T>};
  using Strides = std::array<int64_t, axes>;  // in elements

  Array() = default;
  Array(T* data, const Shape<axes>& shape) : data_(data), shape_(shape) {
    int64_t step = 1;
    for (size_t axis = axes; axis-- > 0; step *= int64_t(shape[axis])) strides_[axis] = step;
  }
  Array(T* data, const Shape<axes>& shape, const Strides& strides) : data_(data), shape_(shape), strides_(strides) {
    static_assert(storage == Storage::strided, "the strides of a packed array follow from its shape");
  }

  T* data() const { return data_; }
  const Shape<axes>& shape() const { return shape_; }
  const Strides& strides() const { return strides_; }
  size_t shape(size_t axis) const { return shape_[axis]; }
  int64_t stride(size_t axis) const { return strides_[axis]; }
  size_t size() const {
    size_t product = 1;
    for (const size_t length : shape_) product *= length;
    return product;
  }

 private:
  T* data_ = nullptr;
  Shape<axes> shape_{};
  Strides strides_{};
};

// A strided view whose element type is known at run time.
template <size_t axes>
struct AnyArray : Array<void, axes, Storage::strided> {
  Element element = Element::other;

  AnyArray() = default;
  AnyArray(void* data, const Shape<axes>& shape, const typename AnyArray::Strides& strides, Element element)
      : Array<void, axes, Storage::strided>(data, shape, strides), element(element) {}
  template <class T>
  AnyArray(const Array<T, axes, Storage::strided>& x) : AnyArray(x.data(), x.shape(), x.strides(), kElement<T>) {}
};

// An AnyArray restricted to the given element types.
template <size_t axes, Element... known>
struct OneOf : AnyArray<axes> {
  static constexpr std::array<Element, sizeof...(known)> kElements = {known...};
  using AnyArray<axes>::AnyArray;
};

using Heads = AnyArray<4>;                              // [B, H, N, channels]
using FloatHeads = Array<float, 4, Storage::strided>;   // [B, H, N, channels] in f32
using Tokens = Array<float, 3, Storage::strided>;       // [B, N, channels]
using Lse = Array<float, 3>;                            // [B, H, N]
using Bias = Array<float, 2>;                           // [B, N]
using Tables = Array<float, 3>;                         // [1 or B, rows, columns]: 1 if all images share a table
using Places = Array<int32_t, 2>;                       // [B, patches]
using Chosen = Array<int32_t, 4>;                       // [B, H, tiles, budget]
using Counts = Array<int32_t, 3>;                       // [B, H, N]
using Indices = Array<int32_t, 1>;
using Longs = Array<int64_t, 2>;                        // [B, patches or cells]

}  // namespace attendless
