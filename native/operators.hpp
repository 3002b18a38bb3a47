// The operators of the domain `attendless` for OpenVINO (openvino.cpp) and ONNX Runtime (onnxruntime.cpp). Each
// operation of operations.hpp with a `kNode` is an operator; operations.hpp defines its inputs, attributes and results.
#pragma once

#include <string>
#include <type_traits>
#include <vector>

#include "geometry.hpp"
#include "runtime_call.hpp"

namespace attendless::operators {

// Passes the attributes of an operation, but not its tensors, to the visitor of a runtime.
template <class Visitor>
struct Attributes {
  Visitor& visitor;

  template <class Any>
  void tensor(const char*, const Any&, Forms = {}) {}
  template <class Number>
  void attribute(const char* name, Number& value) {
    visitor.on_attribute(name, value);
  }
  template <class Plan>
  void attribute(const char* name, Fields<Plan>& value) {
    visitor.on_attribute(name, value.numbers);
  }
};

// Collects the names of the inputs that an operation accepts.
struct InputNames {
  std::vector<std::string> names;

  template <class Any>
  void tensor(const char* name, const Any&, Forms forms = {}) {
    names.emplace_back(name);
    if (forms.part == 1) names.emplace_back("qkv");  // added once: part 1 is k of an attention, or the keys of a merge
  }
  template <class Number>
  void attribute(const char*, const Number&) {}
};

template <class Arguments>
struct Node : Inputs {
  static constexpr const char* kName = Arguments::kNode;
  static constexpr auto& kResults = Arguments::kNodeResults;
  Arguments arguments;  // attributes only; `run` fills the tensors into a copy

  template <class Visitor>
  void visit(Visitor& visitor) {
    Inputs::visit(visitor);
    Attributes<Visitor> attributes{visitor};
    arguments.visit(attributes);
  }

  void check(size_t inputs) const {
    InputNames known;
    Arguments().visit(known);
    Inputs::check(inputs, known.names);
  }

  // Shape inference: types and shapes of the results. Some sizes may be dynamic.
  template <class Shapes>
  std::vector<typename Shapes::Result> results(const Shapes& shapes) const {
    if constexpr (std::is_same_v<Arguments, MergeArguments>) {
      const auto x = shapes.of("x", 3);
      const Merging plan(arguments.plan);
      return {{kResults[0], {x[0], plan.remaining(), x[2]}},
              {kResults[1], {x[0], plan.left()}},
              {kResults[2], {x[0], plan.left()}},
              {kResults[3], {x[0], plan.cells()}}};
    } else {
      auto found = shapes.attended();
      if constexpr (std::is_same_v<Arguments, FovealForwardArguments>) {
        const Layout layout(arguments.layout);
        geometry_of(layout);
        const auto tokens = found[0].shape[tokens_first() ? 1 : 2];
        const int all = layout.prefix + layout.patches();
        require(find("places") || tokens.compatible(all), "the layout has ", all, " tokens, q has ", tokens);
      }
      return found;
    }
  }

  void run(Call& call) const {
    Arguments filled = arguments;
    filled.threads = call.threads;
    filled.visit(call);
    filled.visit_results(call);
    attendless::run(filled);
  }
};

}  // namespace attendless::operators
