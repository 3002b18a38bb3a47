// `run` of every operation: checks all elements of all arguments, then calls the kernel of the instruction set in use.
// Throws std::invalid_argument for invalid arguments. Callers are Python (module.cpp), OpenVINO and ONNX Runtime
// (operators.hpp).
//
// The caller allocates results with the shapes that `visit_results` returns, or omits optional results.
#include <algorithm>
#include <memory>

#include "arguments.hpp"
#include "dispatch.hpp"
#include "geometry.hpp"

namespace attendless {
namespace {

bool empty(const Problem& problem) { return problem.batch == 0 || problem.heads == 0 || problem.tokens == 0; }

// Foveal --------------------------------------------------------------------------------------------------------------

// Builds and runs a foveal problem. The kernel chooses the cells (`select`), or the caller passes them in ascending
// order.
template <class Arguments>
void run_foveal(const Problem& problem, const Arguments& arguments, const std::optional<Chosen>& chosen, bool select,
                void (*kernel)(const Foveal&)) {
  const Layout layout(arguments.layout);
  const std::optional<Places>& places = arguments.places;
  require(!places || places->shape(0) == size_t(problem.batch), "places must be [batch, patches]");
  const int patches = places ? size_of(places->shape(1), "places") : layout.patches();
  require(layout.prefix + patches == problem.tokens, "the layout has ", layout.prefix + patches, " tokens, q has ",
          problem.tokens);
  require(!chosen || is(*chosen, {problem.batch, problem.heads, layout.tiles(), layout.budget}),
          "chosen must be [batch, heads, tiles, budget]");
  const auto geometry = places ? std::make_shared<const Geometry>(layout, places->data(), problem.batch, patches)
                               : geometry_of(layout);
  require(!layout.int8 || !problem.q_grad.data, "products in int8 have no gradient");
  Foveal foveal{};
  geometry->fill(foveal);
  foveal.problem = problem;
  foveal.chosen = chosen ? chosen->data() : nullptr;
  foveal.select = select;
  foveal.attend = problem.lse != nullptr;
  if (!select) {
    const int32_t* row = chosen->data();
    for (const int32_t* const end = row + chosen->size(); row != end; row += layout.budget) {
      bool good = row[0] >= 0 && row[layout.budget - 1] < layout.cells();
      for (int m = 1; m < layout.budget; ++m) good &= row[m - 1] < row[m];
      require(good, "chosen must hold different cells of the layout, in ascending order");
    }
  }
  if (!empty(problem)) kernel(foveal);
}

}  // namespace

void run(const FovealSelectArguments& arguments) {
  require(arguments.chosen.has_value(), "chosen is missing");
  run_foveal(problem_of(arguments), arguments, arguments.chosen, true, kernels().foveal);
}

void run(const FovealAttendArguments& arguments) {
  run_foveal(Forward(arguments).problem, arguments, arguments.chosen, false, kernels().foveal);
}

void run(const FovealArguments& arguments) {
  run_foveal(Forward(arguments).problem, arguments, arguments.chosen, true, kernels().foveal);
}

void run(const FovealForwardArguments& arguments) {
  run_foveal(Forward(arguments).problem, arguments, arguments.chosen, true, kernels().foveal);
}

void run(const FovealBackwardArguments& arguments) {
  run_foveal(backward_of(arguments), arguments, arguments.chosen, false, kernels().foveal_backward);
}

// Fixed lists of keys -------------------------------------------------------------------------------------------------

namespace {

Groups groups_of(const Indices& start, const Indices& member, int tokens, const char* name) {
  return attendless::groups_of(start.data(), start.size(), member.data(), member.size(), tokens, name);
}

template <class Arguments>
void run_block(const Problem& problem, const Arguments& arguments, void (*kernel)(const Block&)) {
  Block block{problem, groups_of(arguments.query_start, arguments.queries, problem.tokens, "queries"),
              groups_of(arguments.key_start, arguments.keys, problem.tokens, "keys")};
  const int64_t tiles = block.queries.count;
  require(block.keys.count == tiles || block.keys.count == tiles * problem.heads,
          "there must be a list of keys for each tile, or for each tile of each head");
  require_each_token_once(block.queries, problem.tokens);
  block.problem.repeats = problem.q_grad.data && has_repeats(block.keys, problem.tokens);
  if (!empty(problem)) kernel(block);
}

}  // namespace

void run(const BlockAttendArguments& arguments) {
  run_block(Forward(arguments).problem, arguments, kernels().block);
}

void run(const BlockBackwardArguments& arguments) {
  run_block(backward_of(arguments), arguments, kernels().block_backward);
}

// A list of keys for each query ---------------------------------------------------------------------------------------

namespace {

// The kernel checks the indices while it reads them, which saves a pass over them here.
template <class Arguments>
void run_gather(const Problem& problem, const Arguments& arguments, void (*kernel)(const Gather&)) {
  const auto& [indices, counts] = std::tie(arguments.indices, arguments.counts);
  const int longest = size_of(indices.shape(3), "indices");
  require(is(indices, {problem.batch, problem.heads, problem.tokens, longest}),
          "indices must be [batch, heads, tokens, keys]");
  require(!counts || is(*counts, {problem.batch, problem.heads, problem.tokens}),
          "counts must be [batch, heads, tokens]");
  int32_t wrong = 0;
  const Gather gather{problem, indices.data(), counts ? counts->data() : nullptr, longest, &wrong};
  if (empty(problem)) return;
  kernel(gather);
  require(!wrong, "indices must be tokens, from 0 to ", problem.tokens - 1, ", and counts from 0 to ", longest);
}

}  // namespace

void run(const GatherAttendArguments& arguments) {
  run_gather(Forward(arguments).problem, arguments, kernels().gather);
}

void run(const GatherBackwardArguments& arguments) {
  run_gather(backward_of(arguments), arguments, kernels().gather_backward);
}

// Lists that each query chooses ---------------------------------------------------------------------------------------

namespace {

Sparsifiner::Table table_of(const Tables& given, const Problem& problem, int rows, int columns, const char* wrong) {
  const bool each = int64_t(given.shape(0)) == problem.batch;
  require((each || given.shape(0) == 1) && is(given, {int(given.shape(0)), rows, columns}), wrong);
  return {given.data(), each ? int64_t(rows) * columns : 0};
}

template <class Arguments>
Sparsifiner sparsifiner_of(const Problem& problem, const Arguments& arguments) {
  require(arguments.budget >= 1 && arguments.budget <= problem.tokens && arguments.prefix >= 0 && arguments.top >= 0,
          "budget must be from 1 to the number of tokens, and neither prefix nor top below 0");
  Sparsifiner args{};
  args.problem = problem;
  args.budget = int(arguments.budget);
  args.prefix = int(std::min<int64_t>(arguments.prefix, problem.tokens));
  args.tau = arguments.tau;
  args.top = int(std::min<int64_t>(arguments.top, kLargest));
  args.coefficients = view(arguments.coefficients, "coefficients", problem);
  args.basis = table_of(arguments.basis, problem, args.coefficients.width, problem.tokens,
                        "the basis must have a row for each coefficient and a column for each token, once for all "
                        "images or for each");
  return args;
}

}  // namespace

void run(const SparsifinerSelectArguments& arguments) {
  const Problem problem = problem_of(arguments.coefficients, "coefficients", arguments.threads);
  Sparsifiner args = sparsifiner_of(problem, arguments);
  args.indices = arguments.indices.data();
  args.counts = arguments.counts.data();
  if (!empty(problem)) kernels().sparsifiner(args);
}

void run(const SparsifinerArguments& arguments) {
  const Forward forward(arguments);
  const Problem& problem = forward.problem;
  Sparsifiner args = sparsifiner_of(problem, arguments);
  const auto& [scores, values, share] = std::tie(arguments.tail_scores, arguments.tail_values, arguments.share);
  require(scores.has_value() == share.has_value() && values.has_value() == share.has_value(),
          "tail_scores, tail_values and share come together or not at all");
  if (share) {
    const int ranks = args.coefficients.width;
    args.tail_scores = view(*scores, "tail_scores", problem, ranks);
    args.tail_values = view(*values, "tail_values", problem, ranks, problem.v.width);
    args.share = table_of(*share, problem, problem.tokens, ranks,
                          "share must be [tokens, ranks], once for all images or for each");
  }
  if (!empty(problem)) kernels().sparsifiner(args);
}

// Merging -------------------------------------------------------------------------------------------------------------

void run(const MergeArguments& arguments) {
  const Merge merge = merge_of(arguments);
  if (merge.batch == 0 || merge.prefix + merge.patches == 0) return;
  kernels().merge(merge);
}

}  // namespace attendless
