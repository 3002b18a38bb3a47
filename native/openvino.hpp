// What the operators of openvino.cpp share: inputs by name, tensors as arrays, one class around each.
//
// Inputs are positional and some may be left out; the attribute `given` names those that are there, in order. Attention
// operators take queries, keys and values in one of three ways, so that nobody has to copy them into another:
//     q, k, v     [B, H, N, D]      order = "BHND", as is the result
//     q, k, v     [B, N, H, D]      order = "BNHD", as is the result
//     qkv         [B, N, 3, H, D]   one tensor, as a model's projection leaves it; the result is [B, N, H, E]
#pragma once

#include <algorithm>
#include <deque>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <openvino/core/attribute_visitor.hpp>
#include <openvino/op/op.hpp>
#include <openvino/runtime/tensor.hpp>

#include "array.hpp"
#include "checks.hpp"

namespace attendless::openvino {

struct Result {
  ov::element::Type type;
  ov::PartialShape shape;
};

// Attributes every operator has.
struct Inputs {
  std::string given, order = "BHND";

  void visit(ov::AttributeVisitor& visitor) {
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

// The shapes and types of an operator's inputs, of which some sizes may not be known yet.
class Shapes {
 public:
  Shapes(const Inputs& inputs, const ov::Node& node) : inputs_(inputs), node_(node) {}

  ov::PartialShape of(const std::string& name, int64_t rank) const {
    const std::optional<size_t> place = inputs_.find(name);
    require(place.has_value(), "the input '", name, "' is missing: given='", inputs_.given, "'");
    const ov::element::Type type = node_.get_input_element_type(*place);
    require(type.is_dynamic() || type == ov::element::f32, name, " must be float32, not ", type);
    const ov::PartialShape& shape = node_.get_input_partial_shape(*place);
    require(shape.rank().compatible(rank), name, " must have ", rank, " axes, not ", shape.rank());
    return shape.rank().is_static() ? shape : ov::PartialShape::dynamic(rank);
  }

  // Batch, heads, tokens and channels of q, k, v or a merge's keys, however they are given.
  ov::PartialShape heads(const std::string& name) const {
    if (inputs_.find("qkv")) {
      const ov::PartialShape s = of("qkv", 5);
      require(s[2].compatible(3), "qkv must be [batch, tokens, 3, heads, channels], not ", s);
      return {s[0], s[3], s[1], s[4]};
    }
    const ov::PartialShape s = of(name, 4);
    return inputs_.tokens_first() ? ov::PartialShape{s[0], s[2], s[1], s[3]} : s;
  }

  // The result of an attention: the queries' shape with the values' width.
  std::vector<Result> attended() const {
    ov::PartialShape q = heads("q"), k = heads("k"), v = heads("v");
    require(k.compatible(q), "q is ", q, " (batch, heads, tokens, channels), but k is ", k);
    const ov::Dimension width = v[3];
    v[3] = q[3];
    ov::PartialShape all = q;
    require(ov::PartialShape::merge_into(all, k) && ov::PartialShape::merge_into(all, v),
            "q is ", q, " (batch, heads, tokens, channels), but v is ", v);
    if (inputs_.tokens_first()) return {{ov::element::f32, {all[0], all[2], all[1], width}}};
    return {{ov::element::f32, {all[0], all[1], all[2], width}}};
  }

 private:
  const Inputs& inputs_;
  const ov::Node& node_;
};

// One evaluation's tensors as arrays. Numbers are taken and left in 32 or 64 bits: OpenVINO narrows some of a model's.
class Call {
 public:
  Call(const Inputs& names, const ov::TensorVector& inputs, ov::TensorVector& outputs)
      : names_(names), inputs_(inputs), outputs_(outputs) {
    require(names.names().size() == inputs.size(), "given='", names.given, "', but ", inputs.size(), " tensors came");
  }

  ~Call() {
    for (const auto& [output, wide] : narrowed_) {
      std::copy(wide->begin(), wide->end(), outputs_[output].data<int32_t>());
    }
  }

  size_t rank(const std::string& name) const { return tensor(name).get_shape().size(); }

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
    ov::Tensor& tensor = outputs_.at(number);
    if (tensor.get_shape() != ov::Shape(shape)) tensor.set_shape(ov::Shape(shape));
    return array(tensor, "the result", static_cast<const Wanted*>(nullptr));
  }

  // Where an attention of these heads writes.
  Heads attended(const Heads& q, const Heads& v) {
    const size_t B = q.shape(0), H = q.shape(1), N = q.shape(2), E = v.shape(3);
    const bool turned = names_.tokens_first();
    const Heads out = result<Heads>(0, turned ? std::vector{B, N, H, E} : std::vector{B, H, N, E});
    return turned ? with_heads_first(out) : out;
  }

  Longs longs_out(size_t number, size_t rows, size_t columns) {
    if (outputs_.at(number).get_element_type() == ov::element::i64) return result<Longs>(number, {rows, columns});
    result<Places>(number, {rows, columns});
    auto wide = std::make_unique<std::vector<int64_t>>(rows * columns);
    int64_t* const data = wide->data();
    narrowed_.emplace_back(number, std::move(wide));
    return Longs(data, {rows, columns});
  }

 private:
  const ov::Tensor& tensor(const std::string& name) const {
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
  Array<T, rank, lies> array(const ov::Tensor& tensor, const std::string& name,
                             const Array<T, rank, lies>*) const {
    const ov::Shape& shape = tensor.get_shape();
    require(shape.size() == rank, name, " must have ", rank, " axes, not ", shape.size());
    typename Array<T, rank, lies>::Shape sizes{};
    std::copy(shape.begin(), shape.end(), sizes.begin());
    T* const data = elements<T>(tensor, name);
    if constexpr (lies == Lies::anyhow) {
      typename Array<T, rank, lies>::Strides strides{};
      const ov::Strides& bytes = tensor.get_strides();
      for (size_t axis = 0; axis < rank; ++axis) strides[axis] = int64_t(bytes[axis] / sizeof(T));
      return {data, sizes, strides};
    } else {
      require(tensor.is_continuous(), name, " must lie in memory without gaps");
      return {data, sizes};
    }
  }

  template <class T>
  T* elements(const ov::Tensor& tensor, const std::string& name) const {
    const ov::element::Type type = tensor.get_element_type();
    if (type == ov::element::from<T>()) return const_cast<T*>(tensor.data<const T>());
    if constexpr (std::is_integral_v<T>) {
      if (type == ov::element::i64) return converted<T, int64_t>(tensor);
      if (type == ov::element::i32) return converted<T, int32_t>(tensor);
    }
    fail(name, " must be of type ", ov::element::from<T>(), ", not ", type);
  }

  // What does not fit becomes the largest or smallest number that does: as wrong as it was.
  template <class To, class From>
  To* converted(const ov::Tensor& tensor) const {
    require(tensor.is_continuous(), "numbers must lie in memory without gaps");
    const From* const from = tensor.data<const From>();
    auto& kept = std::get<std::deque<std::vector<To>>>(kept_);
    kept.emplace_back(tensor.get_size());
    std::transform(from, from + tensor.get_size(), kept.back().begin(), [](From x) {
      return To(std::clamp<int64_t>(x, std::numeric_limits<To>::min(), std::numeric_limits<To>::max()));
    });
    return kept.back().data();
  }

  const Inputs& names_;
  const ov::TensorVector& inputs_;
  ov::TensorVector& outputs_;
  mutable std::tuple<std::deque<std::vector<int32_t>>, std::deque<std::vector<int64_t>>> kept_;
  std::vector<std::pair<size_t, std::unique_ptr<std::vector<int64_t>>>> narrowed_;
};

// An OpenVINO operator around a kernel's call, which has
//     kName, kInputs                   its name and those of its inputs
//     visit(visitor)                   its attributes
//     results(shapes)                  types and shapes of what it gives
//     run(call, threads)
template <class Kernel>
class Operator : public ov::op::Op {
 public:
  OPENVINO_OP(Kernel::kName, "attendless");

  bool visit_attributes(ov::AttributeVisitor& visitor) override {
    kernel_.visit(visitor);
    return true;
  }

  void validate_and_infer_types() override {
    guarded([&] {
      kernel_.check(get_input_size(), Kernel::kInputs);
      const std::vector<Result> results = kernel_.results(Shapes(kernel_, *this));
      set_output_size(results.size());
      for (size_t i = 0; i < results.size(); ++i) set_output_type(i, results[i].type, results[i].shape);
    });
  }

  std::shared_ptr<ov::Node> clone_with_new_inputs(const ov::OutputVector& inputs) const override {
    auto copy = std::make_shared<Operator>();
    copy->kernel_ = kernel_;
    copy->set_arguments(inputs);
    copy->validate_and_infer_types();
    return copy;
  }

  bool has_evaluate() const override { return true; }

  bool evaluate(ov::TensorVector& outputs, const ov::TensorVector& inputs) const override {
    guarded([&] {
      Call call(kernel_, inputs, outputs);
      kernel_.run(call);
    });
    return true;
  }

 private:
  template <class Body>
  void guarded(const Body& body) const {
    try {
      body();
    } catch (const std::invalid_argument& error) {
      OPENVINO_THROW("attendless.", Kernel::kName, " '", get_friendly_name(), "': ", error.what());
    }
  }

  Kernel kernel_;
};

}  // namespace attendless::openvino
