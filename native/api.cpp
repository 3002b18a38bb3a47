#include "api.hpp"

#include <algorithm>
#include <memory>

#include "dispatch.hpp"
#include "geometry.hpp"

namespace attendless {
namespace {

bool empty(const Problem& problem) { return problem.batch == 0 || problem.heads == 0 || problem.tokens == 0; }

// A foveal problem with everything its pointers point at.
struct FovealCall {
  Foveal foveal{};
  std::shared_ptr<const Geometry> geometry;

  FovealCall(const Problem& problem, const Numbers& numbers, const std::optional<Places>& places,
             const std::optional<Chosen>& chosen, bool select) {
    const Layout layout(numbers);
    require(!places || places->shape(0) == size_t(problem.batch), "places must be [batch, patches]");
    const int patches = places ? size_of(places->shape(1), "places") : layout.patches();
    require(layout.prefix + patches == problem.tokens, "the layout has ", layout.prefix + patches, " tokens, q has ",
            problem.tokens);
    require(chosen || select, "cells must be chosen or given");
    require(!chosen || is(*chosen, {problem.batch, problem.heads, layout.tiles(), layout.budget}),
            "chosen must be [batch, heads, tiles, budget]");
    geometry = places ? std::make_shared<const Geometry>(layout, places->data(), problem.batch, patches)
                      : geometry_of(layout);
    geometry->fill(foveal);
    foveal.problem = problem;
    foveal.chosen = chosen ? chosen->data() : nullptr;
    foveal.select = select;
    foveal.attend = problem.lse != nullptr;
    if (!select) require_ascending(chosen->data(), chosen->size(), layout.budget, layout.cells());
  }

  static void require_ascending(const int32_t* row, size_t size, int budget, int cells) {
    for (const int32_t* const end = row + size; row != end; row += budget) {
      bool good = row[0] >= 0 && row[budget - 1] < cells;
      for (int m = 1; m < budget; ++m) good &= row[m - 1] < row[m];
      require(good, "chosen must hold different cells of the layout, in ascending order");
    }
  }

  void run(void (*kernel)(const Foveal&)) const {
    if (empty(foveal.problem)) return;
    kernel(foveal);
  }
};

}  // namespace

void foveal_select(const AnyHeads& q, const AnyHeads& k, const std::optional<Bias>& bias,
                   const std::optional<Places>& places, const Numbers& layout, float scale, int threads,
                   const Chosen& chosen) {
  const Problem problem = problem_of(q, k, bias, scale, threads);
  FovealCall(problem, layout, places, chosen, true).run(kernels().foveal);
}

void foveal_attend(const AnyHeads& q, const AnyHeads& k, const AnyHeads& v, const std::optional<Bias>& bias,
                   const std::optional<Places>& places, const Numbers& layout, float scale, int threads,
                   const std::optional<Chosen>& chosen, bool select, const AnyHeads& out, const Lse& lse) {
  Problem problem = problem_of(q, k, bias, scale, threads);
  add_result(problem, v, out, lse);
  FovealCall(problem, layout, places, chosen, select).run(kernels().foveal);
}

void foveal_backward(const Heads& q, const Heads& k, const Heads& v, const std::optional<Bias>& bias,
                     const std::optional<Places>& places, const Numbers& layout, float scale, int threads,
                     const Chosen& chosen, const Heads& out, const Lse& lse, const Heads& out_grad,
                     const Heads& q_grad, const Heads& k_grad, const Heads& v_grad,
                     const std::optional<Lse>& bias_grad) {
  Problem problem = problem_of(q, k, bias, scale, threads);
  add_result(problem, v, out, lse);
  add_gradients(problem, out_grad, q_grad, k_grad, v_grad, bias_grad);
  FovealCall(problem, layout, places, chosen, false).run(kernels().foveal_backward);
}

namespace {

Groups groups_of(const Indices& start, const Indices& member, int tokens, const char* name) {
  return attendless::groups_of(start.data(), start.size(), member.data(), member.size(), tokens, name);
}

// A key listed twice counts twice.
Block block_of(const Problem& problem, const Indices& query_start, const Indices& queries, const Indices& key_start,
               const Indices& keys) {
  Block block{problem, groups_of(query_start, queries, problem.tokens, "queries"),
              groups_of(key_start, keys, problem.tokens, "keys")};
  const int64_t tiles = block.queries.count;
  require(block.keys.count == tiles || block.keys.count == tiles * problem.heads,
          "there must be a list of keys for each tile, or for each tile of each head");
  require_each_token_once(block.queries, problem.tokens);
  block.problem.repeats = problem.q_grad.data && has_repeats(block.keys, problem.tokens);
  return block;
}

void run_block(const Block& block, void (*kernel)(const Block&)) {
  if (empty(block.problem)) return;
  kernel(block);
}

}  // namespace

void block_attend(const AnyHeads& q, const AnyHeads& k, const AnyHeads& v, const std::optional<Bias>& bias,
                  const Indices& query_start, const Indices& queries, const Indices& key_start, const Indices& keys,
                  float scale, int threads, const AnyHeads& out, const Lse& lse) {
  Problem problem = problem_of(q, k, bias, scale, threads);
  add_result(problem, v, out, lse);
  run_block(block_of(problem, query_start, queries, key_start, keys), kernels().block);
}

void block_backward(const Heads& q, const Heads& k, const Heads& v, const std::optional<Bias>& bias,
                    const Indices& query_start, const Indices& queries, const Indices& key_start, const Indices& keys,
                    float scale, int threads, const Heads& out, const Lse& lse, const Heads& out_grad,
                    const Heads& q_grad, const Heads& k_grad, const Heads& v_grad,
                    const std::optional<Lse>& bias_grad) {
  Problem problem = problem_of(q, k, bias, scale, threads);
  add_result(problem, v, out, lse);
  add_gradients(problem, out_grad, q_grad, k_grad, v_grad, bias_grad);
  run_block(block_of(problem, query_start, queries, key_start, keys), kernels().block_backward);
}

namespace {

// The check of every index waits for the kernel, which reads them anyway.
void run_gather(const Problem& problem, const Chosen& indices, const std::optional<Counts>& counts,
                void (*kernel)(const Gather&)) {
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

void gather_attend(const AnyHeads& q, const AnyHeads& k, const AnyHeads& v, const std::optional<Bias>& bias,
                   const Chosen& indices, const std::optional<Counts>& counts, float scale, int threads,
                   const AnyHeads& out, const Lse& lse) {
  Problem problem = problem_of(q, k, bias, scale, threads);
  add_result(problem, v, out, lse);
  run_gather(problem, indices, counts, kernels().gather);
}

void gather_backward(const Heads& q, const Heads& k, const Heads& v, const std::optional<Bias>& bias,
                     const Chosen& indices, const std::optional<Counts>& counts, float scale, int threads,
                     const Heads& out, const Lse& lse, const Heads& out_grad, const Heads& q_grad,
                     const Heads& k_grad, const Heads& v_grad, const std::optional<Lse>& bias_grad) {
  Problem problem = problem_of(q, k, bias, scale, threads);
  add_result(problem, v, out, lse);
  add_gradients(problem, out_grad, q_grad, k_grad, v_grad, bias_grad);
  run_gather(problem, indices, counts, kernels().gather_backward);
}

namespace {

Sparsifiner::Table table_of(const Tables& given, const Problem& problem, int rows, int columns, const char* wrong) {
  const bool each = int64_t(given.shape(0)) == problem.batch;
  require((each || given.shape(0) == 1) && is(given, {int(given.shape(0)), rows, columns}), wrong);
  return {given.data(), each ? int64_t(rows) * columns : 0};
}

Sparsifiner sparsifiner_of(const Problem& problem, const Heads& coefficients, const Tables& basis, int64_t budget,
                           int64_t prefix, float tau, int64_t top) {
  require(budget >= 1 && budget <= problem.tokens && prefix >= 0 && top >= 0,
          "budget must be from 1 to the number of tokens, and neither prefix nor top below 0");
  Sparsifiner args{};
  args.problem = problem;
  args.budget = int(budget);
  args.prefix = int(std::min<int64_t>(prefix, problem.tokens));
  args.tau = tau;
  args.top = int(std::min<int64_t>(top, kLargest));
  args.coefficients = view(coefficients, "coefficients", problem);
  args.basis = table_of(basis, problem, args.coefficients.width, problem.tokens,
                        "the basis must have a row for each coefficient and a column for each token, once for all "
                        "images or for each");
  return args;
}

void run_sparsifiner(const Sparsifiner& args) {
  if (empty(args.problem)) return;
  kernels().sparsifiner(args);
}

}  // namespace

void sparsifiner_select(const Heads& coefficients, const Tables& basis, int64_t budget, int64_t prefix, float tau,
                        int64_t top, int threads, const Chosen& indices, const Counts& counts) {
  const Problem problem = problem_of(coefficients, "coefficients", threads);
  Sparsifiner args = sparsifiner_of(problem, coefficients, basis, budget, prefix, tau, top);
  require(is(indices, {problem.batch, problem.heads, problem.tokens, args.budget}) &&
              is(counts, {problem.batch, problem.heads, problem.tokens}),
          "indices must be [batch, heads, tokens, budget], and counts [batch, heads, tokens]");
  args.indices = indices.data();
  args.counts = counts.data();
  run_sparsifiner(args);
}

void sparsifiner(const AnyHeads& q, const AnyHeads& k, const AnyHeads& v, const std::optional<Bias>& bias,
                 const Heads& coefficients, const Tables& basis, const std::optional<Heads>& tail_scores,
                 const std::optional<Heads>& tail_values, const std::optional<Tables>& share, int64_t budget,
                 int64_t prefix, float tau, int64_t top, float scale, int threads, const AnyHeads& out,
                 const Lse& lse) {
  Problem problem = problem_of(q, k, bias, scale, threads);
  add_result(problem, v, out, lse);
  Sparsifiner args = sparsifiner_of(problem, coefficients, basis, budget, prefix, tau, top);
  require(tail_scores.has_value() == share.has_value() && tail_values.has_value() == share.has_value(),
          "tail_scores, tail_values and share come together or not at all");
  if (share) {
    const int ranks = args.coefficients.width;
    args.tail_scores = view(*tail_scores, "tail_scores", problem, ranks);
    args.tail_values = view(*tail_values, "tail_values", problem, ranks, problem.v.width);
    args.share = table_of(*share, problem, problem.tokens, ranks,
                          "share must be [tokens, ranks], once for all images or for each");
  }
  run_sparsifiner(args);
}

void merge(const Tokens& x, const Heads& keys, const std::optional<Bias>& importance,
           const std::optional<Bias>& sizes, const std::optional<Longs>& cells, const std::optional<Longs>& owners,
           const Merging& plan, float protect, int threads, const Tokens& out, const Bias& sizes_out,
           const Longs& cells_out, const Longs& owners_out) {
  Merge args = merge_of(x, keys, plan, protect, threads);
  add_past(args, importance, sizes, cells, owners);
  add_result(args, out, sizes_out, cells_out, owners_out);
  if (args.batch == 0 || args.prefix + args.patches == 0) return;
  kernels().merge(args);
}

}  // namespace attendless
