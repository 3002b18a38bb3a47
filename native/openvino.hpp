// ov::op::Op for each node of operators.hpp: attributes, shape inference (static and dynamic) and evaluation.
#pragma once

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include <openvino/core/attribute_visitor.hpp>
#include <openvino/op/op.hpp>
#include <openvino/runtime/tensor.hpp>

#include "runtime_call.hpp"

namespace attendless::openvino {

using operators::Inputs;

int threads();  // number of threads that this evaluation may use

inline ov::element::Type type_of(Element element) {
  return element == Element::f32    ? ov::element::f32
         : element == Element::bf16 ? ov::element::bf16
         : element == Element::i32  ? ov::element::i32
                                    : ov::element::i64;
}

// The shapes and types of the inputs of an operator, for shape inference. Some sizes may be dynamic.
class Shapes {
 public:
  struct Result {
    Element element;
    ov::PartialShape shape;
  };

  Shapes(const Inputs& inputs, const ov::Node& node) : inputs_(inputs), node_(node) {}

  ov::PartialShape of(const std::string& name, int64_t rank, bool halves = false) const {
    const ov::element::Type type = type_at(name);
    const bool known = type.is_dynamic() || type == ov::element::f32 || (halves && type == ov::element::bf16);
    require(known, name, " must be ", halves ? "f32 or bf16" : "f32", ", not ", type);
    const ov::PartialShape& shape = node_.get_input_partial_shape(*inputs_.find(name));
    require(shape.rank().compatible(rank), name, " must have ", rank, " axes, not ", shape.rank());
    return shape.rank().is_static() ? shape : ov::PartialShape::dynamic(rank);
  }

  // The shape of q, k, v or the keys of a merge as [B, H, N, channels], from any of the three layouts.
  ov::PartialShape heads(const std::string& name) const {
    if (inputs_.find("qkv")) {
      const ov::PartialShape s = of("qkv", 5, true);
      require(s[2].compatible(3), "qkv must be [batch, tokens, 3, heads, channels], not ", s);
      return {s[0], s[3], s[1], s[4]};
    }
    const ov::PartialShape s = of(name, 4, true);
    return inputs_.tokens_first() ? ov::PartialShape{s[0], s[2], s[1], s[3]} : s;
  }

  // The result of an attention: type and shape of the queries, with the channels of the values.
  std::vector<Result> attended() const {
    ov::PartialShape q = heads("q"), k = heads("k"), v = heads("v");
    require(k.compatible(q), "q is ", q, " (batch, heads, tokens, channels), but k is ", k);
    const ov::Dimension width = v[3];
    v[3] = q[3];
    ov::PartialShape all = q;
    require(ov::PartialShape::merge_into(all, k) && ov::PartialShape::merge_into(all, v),
            "q is ", q, " (batch, heads, tokens, channels), but v is ", v);
    const bool halves = type_at(inputs_.find("qkv") ? "qkv" : "q") == ov::element::bf16;
    const Element element = halves ? Element::bf16 : Element::f32;
    if (inputs_.tokens_first()) return {{element, {all[0], all[2], all[1], width}}};
    return {{element, {all[0], all[1], all[2], width}}};
  }

 private:
  ov::element::Type type_at(const std::string& name) const {
    const std::optional<size_t> place = inputs_.find(name);
    require(place.has_value(), "the input '", name, "' is missing: given='", inputs_.given, "'");
    return node_.get_input_element_type(*place);
  }

  const Inputs& inputs_;
  const ov::Node& node_;
};

inline operators::Tensor as_tensor(const ov::Tensor& tensor) {
  const ov::element::Type type = tensor.get_element_type();
  operators::Tensor found{Element::other, tensor.get_shape(), {}, nullptr};
  for (const Element known : {Element::f32, Element::bf16, Element::i32, Element::i64}) {
    if (type == type_of(known)) found.element = known;
  }
  if (found.element == Element::other) return found;
  found.data = const_cast<void*>(static_cast<const ov::Tensor&>(tensor).data());
  if (!tensor.is_continuous()) {
    for (const size_t bytes : tensor.get_strides()) found.strides.push_back(int64_t(bytes / type.size()));
  }
  return found;
}

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
      kernel_.check(get_input_size());
      const auto results = kernel_.results(Shapes(kernel_, *this));
      set_output_size(results.size());
      for (size_t i = 0; i < results.size(); ++i) set_output_type(i, type_of(results[i].element), results[i].shape);
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

  // With one thread, OpenVINO's infer() drops exceptions thrown during inference (start_async() and wait() report
  // them). Results are therefore filled with NaN before the exception is rethrown.
  bool evaluate(ov::TensorVector& outputs, const ov::TensorVector& inputs) const override {
    guarded([&] {
      try {
        run(outputs, inputs);
      } catch (...) {
        for (ov::Tensor& output : outputs) spoil(output);
        throw;
      }
    });
    return true;
  }

 private:
  void run(ov::TensorVector& outputs, const ov::TensorVector& inputs) const {
    std::vector<operators::Tensor> given;
    for (const ov::Tensor& input : inputs) given.push_back(as_tensor(input));
    const auto place = [&](size_t number, const std::vector<size_t>& shape) {
      ov::Tensor& tensor = outputs.at(number);
      if (tensor.get_shape() != ov::Shape(shape)) tensor.set_shape(ov::Shape(shape));
      return as_tensor(tensor);
    };
    operators::Call call(kernel_, std::move(given), place, threads());
    kernel_.run(call);
  }

  static void spoil(ov::Tensor& tensor) {
    if (!tensor.get_element_type().is_real()) return;
    std::memset(tensor.data(), 0xff, tensor.get_byte_size());  // all bits set: NaN in every floating type
  }

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
