// One call of an operator by a runtime: finds inputs by name, converts tensors to arrays, and places results in the
// memory of the runtime.
//
// Inputs are positional, and optional inputs may be missing; the attribute `given` lists the names of the inputs in
// order. Attention operators accept queries, keys and values in three layouts, so that no copy is necessary:
//     q, k, v     [B, H, N, D]      order = "BHND"; the result is [B, H, N, E]
//     q, k, v     [B, N, H, D]      order = "BNHD"; the result is [B, N, H, E]
//     qkv         [B, N, 3, H, D]   one tensor, the output of the qkv projection; the result is [B, N, H, E]
#pragma once

#include <algorithm>
#include <deque>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "checks.hpp"
#include "operations.hpp"

namespace attendless::operators {

// A tensor of a runtime.
struct Tensor {
  Element element;
  std::vector<size_t> shape;
  std::vector<int64_t> strides;  // in elements; empty: packed
  void* data;

  size_t size() const {
    size_t product = 1;
    for (const size_t length : shape) product *= length;
    return product;
  }
};

// The attributes that every operator has.
struct Inputs {
  std::string given, order = "BHND";

  template <class Visitor>
  void visit(Visitor& visitor) {
    visitor.on_attribute("given", given);
    visitor.on_attribute("order", order);
  }

  std::vector<std::string> names() const {
    std::vector<std::string> found(1);
    for (const char letter : given) {
      if (letter == ',') {
        found.emplace_back();
      } else {
        found.back() += letter;
      }
    }
    return found;
  }

  std::optional<size_t> find(const std::string& name) const {
    const std::vector<std::string> all = names();
    const auto found = std::find(all.begin(), all.end(), name);
    return found == all.end() ? std::nullopt : std::optional<size_t>(found - all.begin());
  }

  bool tokens_first() const { return order == "BNHD" || find("qkv"); }

  void check(size_t inputs, const std::vector<std::string>& known) const {
    require(order == "BHND" || order == "BNHD", "order must be BHND or BNHD, not '", order, "'");
    const std::vector<std::string> all = names();
    require(all.size() == inputs, "given='", given, "' names ", all.size(), " inputs, but there are ", inputs);
    for (size_t i = 0; i < all.size(); ++i) {
      require(std::count(known.begin(), known.end(), all[i]) == 1, "no input is called '", all[i], "'");
      require(std::count(all.begin(), all.end(), all[i]) == 1, "'", all[i], "' is given twice");
    }
  }
};

// The tensors of one evaluation: visits the arguments of an operation and fills them in. Integers may have 32 or 64
// bits, because OpenVINO narrows some integers of a model. Floats are f32; queries, keys and values may be bf16.
class Call {
 public:
  // Returns the memory of the runtime for result `number` with the given shape.
  using Place = std::function<Tensor(size_t number, const std::vector<size_t>& shape)>;
  const int threads;

  Call(const Inputs& names, std::vector<Tensor> inputs, Place place, int threads)
      : threads(threads), names_(names), inputs_(std::move(inputs)), place_(std::move(place)) {
    require(names.names().size() == inputs_.size(), "given='", names.given, "', but ", inputs_.size(), " tensors came");
  }

  ~Call() {
    for (const auto& [narrow, wide] : narrowed_) std::copy(wide->begin(), wide->end(), narrow);
  }

  template <class Any>
  void tensor(const char* name, std::optional<Any>& array, Forms forms = {}) {
    if (names_.find(name)) tensor(name, array.emplace(), forms);
  }

  template <Element... known>
  void tensor(const char* name, OneOf<4, known...>& array, Forms forms = {}) {
    static_cast<AnyArray<4>&>(array) = heads<known...>(name, forms);
  }

  template <class T, size_t rank, Storage storage>
  void tensor(const char* name, Array<T, rank, storage>& array, Forms forms = {}) {
    if constexpr (std::is_same_v<Array<T, rank, storage>, FloatHeads>) {
      const AnyArray<4> found = heads<Element::f32>(name, forms);
      array = {static_cast<float*>(found.data()), found.shape(), found.strides()};
    } else {
      const Tensor& given = input(name);
      const bool omitted = forms.omits >= 0 && given.shape.size() + 1 == rank;
      array = array_of<T, rank, storage>(omitted ? with_axis(given, size_t(forms.omits)) : given, name);
    }
  }

  template <class Number>
  void attribute(const char*, const Number&) {}  // attributes were set when the model was read

  // Nodes do not compute optional results.
  template <class Any, class Size>
  void result(const char*, std::optional<Any>&, const Size&) {}

  // The result of an attention has the layout of its queries.
  template <Element... known, class Size>
  void result(const char* name, OneOf<4, known...>& array, const Size& shape) {
    const bool turned = names_.tokens_first();
    const auto [B, H, N, E] = shape();
    const Tensor there = next(turned ? std::vector{B, N, H, E} : std::vector{B, H, N, E});
    const AnyArray<4> out = any_of<4, known...>(there, name);
    static_cast<AnyArray<4>&>(array) = turned ? with_heads_first(out) : out;
  }

  template <class T, size_t rank, Storage storage, class Size>
  void result(const char* name, Array<T, rank, storage>& array, const Size& size) {
    const Shape<rank> shape = size();
    const Tensor there = next({shape.begin(), shape.end()});
    if constexpr (std::is_same_v<Array<T, rank, storage>, Longs>) {
      if (there.element == Element::i32) {
        auto wide = std::make_unique<std::vector<int64_t>>(there.size());
        array = Longs(wide->data(), shape);
        narrowed_.emplace_back(static_cast<int32_t*>(there.data), std::move(wide));
        return;
      }
    }
    array = array_of<T, rank, storage>(there, name);
  }

 private:
  Tensor next(const std::vector<size_t>& shape) { return place_(results_++, shape); }

  const Tensor& input(const char* name) const {
    const std::optional<size_t> place = names_.find(name);
    require(place.has_value(), "the input '", name, "' is missing: given='", names_.given, "'");
    return inputs_[*place];
  }

  // q, k, v or the keys of a merge as [B, H, N, channels], from any of the three layouts.
  template <Element... known>
  AnyArray<4> heads(const char* name, Forms forms) const {
    if (forms.part >= 0 && names_.find("qkv")) return part<known...>(forms.part);
    const Tensor& given = input(name);
    const bool omitted = forms.omits >= 0 && given.shape.size() == 3;
    const AnyArray<4> found = any_of<4, known...>(omitted ? with_axis(given, size_t(forms.omits)) : given, name);
    return forms.part >= 0 && !omitted && names_.tokens_first() ? with_heads_first(found) : found;
  }

  // q (0), k (1) or v (2) of the packed tensor, as a strided view.
  template <Element... known>
  AnyArray<4> part(int which) const {
    const AnyArray<5> all = any_of<5, known...>(input("qkv"), "qkv");
    require(all.shape(2) == 3, "qkv must be [batch, tokens, 3, heads, channels]");
    const int64_t bytes = all.element == Element::bf16 ? sizeof(Bf16) : sizeof(float);
    return {static_cast<char*>(all.data()) + which * all.stride(2) * bytes,
            {all.shape(0), all.shape(3), all.shape(1), all.shape(4)},
            {all.stride(0), all.stride(3), all.stride(1), all.stride(4)},
            all.element};
  }

  // A view of a tensor whose element type is one of `known`.
  template <size_t rank, Element... known>
  AnyArray<rank> any_of(const Tensor& tensor, const char* name) const {
    if constexpr (((known == Element::bf16) || ...)) {
      if (tensor.element == Element::bf16) return array_of<Bf16, rank, Storage::strided>(tensor, name);
    }
    return array_of<float, rank, Storage::strided>(tensor, name);
  }

  static Tensor with_axis(Tensor x, size_t axis) {
    x.shape.insert(x.shape.begin() + int64_t(axis), 1);
    if (!x.strides.empty()) x.strides.insert(x.strides.begin() + int64_t(axis), 0);
    return x;
  }

  static AnyArray<4> with_heads_first(const AnyArray<4>& x) {
    return {x.data(),
            {x.shape(0), x.shape(2), x.shape(1), x.shape(3)},
            {x.stride(0), x.stride(2), x.stride(1), x.stride(3)},
            x.element};
  }

  template <class T, size_t rank, Storage storage>
  Array<T, rank, storage> array_of(const Tensor& tensor, const char* name) const {
    require(tensor.shape.size() == rank, name, " must have ", rank, " axes, not ", tensor.shape.size());
    Shape<rank> sizes{};
    std::copy(tensor.shape.begin(), tensor.shape.end(), sizes.begin());
    T* const data = elements<T>(tensor, name);
    if constexpr (storage == Storage::strided) {
      if (!tensor.strides.empty()) {
        typename Array<T, rank, storage>::Strides strides{};
        std::copy(tensor.strides.begin(), tensor.strides.end(), strides.begin());
        return {data, sizes, strides};
      }
    }
    require(tensor.strides.empty(), name, " must be contiguous");
    return {data, sizes};
  }

  template <class T>
  T* elements(const Tensor& tensor, const char* name) const {
    if (tensor.element == kElement<T>) return static_cast<T*>(tensor.data);
    if constexpr (std::is_integral_v<T>) {
      if (tensor.element == Element::i64) return converted<T, int64_t>(tensor);
      if (tensor.element == Element::i32) return converted<T, int32_t>(tensor);
    }
    fail(name, " must be ", name_of(kElement<T>), ", not ", name_of(tensor.element));
  }

  // Converts integers with saturation: an index that does not fit the narrower type stays out of range.
  template <class To, class From>
  To* converted(const Tensor& tensor) const {
    require(tensor.strides.empty(), "integers must be contiguous");
    const From* const from = static_cast<const From*>(tensor.data);
    auto& kept = std::get<std::deque<std::vector<To>>>(kept_);
    kept.emplace_back(tensor.size());
    std::transform(from, from + tensor.size(), kept.back().begin(), [](From x) {
      return To(std::clamp<int64_t>(x, std::numeric_limits<To>::min(), std::numeric_limits<To>::max()));
    });
    return kept.back().data();
  }

  const Inputs& names_;
  const std::vector<Tensor> inputs_;
  const Place place_;
  size_t results_ = 0;
  mutable std::tuple<std::deque<std::vector<int32_t>>, std::deque<std::vector<int64_t>>> kept_;
  std::vector<std::pair<int32_t*, std::unique_ptr<std::vector<int64_t>>>> narrowed_;
};

}  // namespace attendless::operators
