// One call of an operator by a runtime: inputs by name, tensors as arrays, results where the runtime wants them.
//
// Inputs are positional and some may be left out; the attribute `given` names those that are there, in order. Attention
// operators take queries, keys and values in one of three ways, so that nobody has to copy them into another:
//     q, k, v     [B, H, N, D]      order = "BHND", as is the result
//     q, k, v     [B, N, H, D]      order = "BNHD", as is the result
//     qkv         [B, N, 3, H, D]   one tensor, as a model's projection leaves it; the result is [B, N, H, E]
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

#include "array.hpp"
#include "checks.hpp"

namespace attendless::operators {

enum class Type { f32, i32, i64, other };

inline const char* name_of(Type type) {
  return type == Type::f32 ? "float32" : type == Type::i32 ? "int32" : type == Type::i64 ? "int64" : "another";
}

template <class T>
constexpr Type type_of() {
  return std::is_same_v<T, float> ? Type::f32 : std::is_same_v<T, int32_t> ? Type::i32 : Type::i64;
}

// A runtime's tensor.
struct Tensor {
  Type type;
  std::vector<size_t> shape;
  std::vector<int64_t> strides;  // in elements; empty: packed
  void* data;

  size_t size() const {
    size_t product = 1;
    for (const size_t length : shape) product *= length;
    return product;
  }
};

// Attributes every operator has.
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

// One evaluation's tensors as arrays. Numbers are taken and left in 32 or 64 bits: OpenVINO narrows some of a model's.
class Call {
 public:
  // Where the runtime wants a result of this number and shape.
  using Place = std::function<Tensor(size_t number, const std::vector<size_t>& shape)>;
  const int threads;

  Call(const Inputs& names, std::vector<Tensor> inputs, Place place, int threads)
      : threads(threads), names_(names), inputs_(std::move(inputs)), place_(std::move(place)) {
    require(names.names().size() == inputs_.size(), "given='", names.given, "', but ", inputs_.size(), " tensors came");
  }

  ~Call() {
    for (const auto& [narrow, wide] : narrowed_) std::copy(wide->begin(), wide->end(), narrow);
  }

  size_t rank(const std::string& name) const { return tensor(name).shape.size(); }

  // [batch, heads, tokens, channels], of q, k, v or a merge's keys.
  Heads heads(const std::string& name) const {
    if (names_.find("qkv")) {
      const auto all = get<Array<float, 5, Lies::anyhow>>("qkv");
      require(all.shape(2) == 3, "qkv must be [batch, tokens, 3, heads, channels]");
      const int64_t which = name == "q" ? 0 : name == "v" ? 2 : 1;
      return {all.data() + which * all.stride(2),
              {all.shape(0), all.shape(3), all.shape(1), all.shape(4)},
              {all.stride(0), all.stride(3), all.stride(1), all.stride(4)}};
    }
    const Heads found = get<Heads>(name);
    return names_.tokens_first() ? with_heads_first(found) : found;
  }

  template <class Wanted>
  Wanted get(const std::string& name) const {
    return array(tensor(name), name, static_cast<const Wanted*>(nullptr));
  }

  template <class Wanted>
  std::optional<Wanted> maybe(const std::string& name) const {
    if (!names_.find(name)) return std::nullopt;
    return get<Wanted>(name);
  }

  template <class Wanted>
  Wanted result(size_t number, const std::vector<size_t>& shape) {
    return array(place_(number, shape), "the result", static_cast<const Wanted*>(nullptr));
  }

  // Where an attention of these heads writes.
  Heads attended(const Heads& q, const Heads& v) {
    const size_t B = q.shape(0), H = q.shape(1), N = q.shape(2), E = v.shape(3);
    const bool turned = names_.tokens_first();
    const Heads out = result<Heads>(0, turned ? std::vector{B, N, H, E} : std::vector{B, H, N, E});
    return turned ? with_heads_first(out) : out;
  }

  Longs longs_out(size_t number, size_t rows, size_t columns) {
    const Tensor there = place_(number, {rows, columns});
    if (there.type == Type::i64) return Longs(static_cast<int64_t*>(there.data), {rows, columns});
    const Places narrow = array(there, "the result", static_cast<const Places*>(nullptr));
    auto wide = std::make_unique<std::vector<int64_t>>(rows * columns);
    int64_t* const data = wide->data();
    narrowed_.emplace_back(narrow.data(), std::move(wide));
    return Longs(data, {rows, columns});
  }

 private:
  const Tensor& tensor(const std::string& name) const {
    const std::optional<size_t> place = names_.find(name);
    require(place.has_value(), "the input '", name, "' is missing: given='", names_.given, "'");
    return inputs_[*place];
  }

  static Heads with_heads_first(const Heads& x) {
    return {x.data(),
            {x.shape(0), x.shape(2), x.shape(1), x.shape(3)},
            {x.stride(0), x.stride(2), x.stride(1), x.stride(3)}};
  }

  template <class T, size_t rank, Lies lies>
  Array<T, rank, lies> array(const Tensor& tensor, const std::string& name, const Array<T, rank, lies>*) const {
    require(tensor.shape.size() == rank, name, " must have ", rank, " axes, not ", tensor.shape.size());
    typename Array<T, rank, lies>::Shape sizes{};
    std::copy(tensor.shape.begin(), tensor.shape.end(), sizes.begin());
    T* const data = elements<T>(tensor, name);
    if constexpr (lies == Lies::anyhow) {
      if (!tensor.strides.empty()) {
        typename Array<T, rank, lies>::Strides strides{};
        std::copy(tensor.strides.begin(), tensor.strides.end(), strides.begin());
        return {data, sizes, strides};
      }
    }
    require(tensor.strides.empty(), name, " must lie in memory without gaps");
    return {data, sizes};
  }

  template <class T>
  T* elements(const Tensor& tensor, const std::string& name) const {
    if (tensor.type == type_of<T>()) return static_cast<T*>(tensor.data);
    if constexpr (std::is_integral_v<T>) {
      if (tensor.type == Type::i64) return converted<T, int64_t>(tensor);
      if (tensor.type == Type::i32) return converted<T, int32_t>(tensor);
    }
    fail(name, " must be ", name_of(type_of<T>()), ", not ", name_of(tensor.type));
  }

  // What does not fit becomes the largest or smallest number that does: as wrong as it was.
  template <class To, class From>
  To* converted(const Tensor& tensor) const {
    require(tensor.strides.empty(), "numbers must lie in memory without gaps");
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
  mutable std::tuple<std::deque<std::vector<int32_t>>, std::deque<std::vector<int64_t>>> kept_;
  std::vector<std::pair<int32_t*, std::unique_ptr<std::vector<int64_t>>>> narrowed_;
};

}  // namespace attendless::operators
