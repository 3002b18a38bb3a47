// The operators of the domain `attendless`, for OpenVINO (openvino.cpp) and ONNX Runtime (onnxruntime.cpp): each is an
// operation of operations.hpp that has a node. Names, inputs, attributes and results come from there.
#pragma once

#include <string>
#include <type_traits>
#include <vector>

#include "geometry.hpp"
#include "runtime_call.hpp"

namespace attendless::operators {

// Passes the attributes among an operation's arguments to a runtime's visitor.
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

// The names of the inputs an operation may have.
struct InputNames {
  std::vector<std::string> names;

  template <class Any>
  void tensor(const char* name, const Any&, Forms forms = {}) {
    names.emplace_back(name);
    if (forms.part == 1) names.emplace_back("qkv");  // once: q, k and v come together, a merge has keys only
  }
  template <class Number>
  void attribute(const char*, const Number&) {}
};

template <class Arguments>
struct Node : Inputs {
  static constexpr const char* kName = Arguments::kNode;
  static constexpr auto& kResults = Arguments::kNodeResults;
  Arguments arguments;  // its attributes; tensors are filled in for each call

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

  // Types and shapes of the results, of which some sizes may not be known yet.
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
