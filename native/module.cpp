// The Python module: arrays in and out, checked, with the interpreter's lock released while the kernels run. It knows
// nothing of PyTorch; attendless.sparse.native hands it tensors as NumPy arrays and allocates the results.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <optional>
#include <stdexcept>
#include <string>

#include "dispatch.hpp"
#include "geometry.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace attendless {
namespace {

using Heads = nb::ndarray<float, nb::ndim<4>, nb::device::cpu>;                       // [B, H, N, channels]
using Lse = nb::ndarray<float, nb::ndim<3>, nb::c_contig, nb::device::cpu>;           // [B, H, N]
using Bias = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;          // [B, N]
using Places = nb::ndarray<int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;      // [B, patches]
using Chosen = nb::ndarray<int32_t, nb::ndim<4>, nb::c_contig, nb::device::cpu>;      // [B, H, tiles, budget]
using Counts = nb::ndarray<int32_t, nb::ndim<3>, nb::c_contig, nb::device::cpu>;      // [B, H, N]
using Floats = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Indices = nb::ndarray<int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Sizes = std::array<int, 7>;  // height, width, prefix, cell, tile, coarse, budget

void require(bool truth, const std::string& text) {
  if (!truth) throw std::invalid_argument(text);
}

View view(const Heads& array, const char* name, const Problem& problem, int width = -1) {
  require(int(array.shape(0)) == problem.batch && int(array.shape(1)) == problem.heads &&
              int(array.shape(2)) == problem.tokens && (width < 0 || int(array.shape(3)) == width),
          std::string(name) + " has another shape than its fellows");
  require(array.shape(3) <= 1 || array.stride(3) == 1, std::string(name) + " must have adjacent channels");
  return {array.data(), array.stride(0), array.stride(1), array.stride(2), int(array.shape(3))};
}

Problem problem_of(const Heads& q, const Heads& k, const std::optional<Bias>& bias, float scale, int threads) {
  Problem problem{};
  problem.batch = int(q.shape(0));
  problem.heads = int(q.shape(1));
  problem.tokens = int(q.shape(2));
  problem.threads = threads < 1 ? 1 : threads;
  problem.scale = scale;
  problem.q = view(q, "q", problem);
  problem.k = view(k, "k", problem, problem.q.width);
  problem.v = problem.k;
  problem.v.width = 0;
  if (bias) {
    require(int(bias->shape(0)) == problem.batch && int(bias->shape(1)) == problem.tokens,
            "key_bias must be [batch, tokens]");
    problem.bias = bias->data();
  }
  return problem;
}

void add_result(Problem& problem, const Heads& v, const Heads& out, const Lse& lse) {
  problem.v = view(v, "v", problem);
  problem.out = view(out, "out", problem, problem.v.width);
  require(int(lse.shape(0)) == problem.batch && int(lse.shape(1)) == problem.heads &&
              int(lse.shape(2)) == problem.tokens,
          "lse must be [batch, heads, tokens]");
  problem.lse = lse.data();
}

void add_gradients(Problem& problem, const Heads& out, const Heads& q, const Heads& k, const Heads& v,
                   const std::optional<Lse>& bias) {
  problem.out_grad = view(out, "out_grad", problem, problem.v.width);
  problem.q_grad = view(q, "q_grad", problem, problem.q.width);
  problem.k_grad = view(k, "k_grad", problem, problem.q.width);
  problem.v_grad = view(v, "v_grad", problem, problem.v.width);
  if (bias) {
    require(int(bias->shape(0)) == problem.batch && int(bias->shape(1)) == problem.heads &&
                int(bias->shape(2)) == problem.tokens,
            "bias_grad must be [batch, heads, tokens]");
    problem.bias_grad = bias->data();
  }
}

bool empty(const Problem& problem) { return problem.batch == 0 || problem.heads == 0 || problem.tokens == 0; }

// A foveal problem with everything its pointers point at.
struct FovealCall {
  Foveal foveal{};
  Geometry geometry;

  FovealCall(const Problem& problem, const Sizes& sizes, const std::optional<Places>& places,
             const std::optional<Chosen>& chosen, bool select)
      : geometry({sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6]},
                 places ? places->data() : nullptr, problem.batch, patches(sizes, places)) {
    require(!places || int(places->shape(0)) == problem.batch, "places must be [batch, patches]");
    require(sizes[2] + patches(sizes, places) == problem.tokens,
            "the layout has " + std::to_string(sizes[2] + patches(sizes, places)) + " tokens, q has " +
                std::to_string(problem.tokens));
    geometry.fill(foveal);
    require(chosen || select, "cells must be chosen or given");
    require(!chosen || (int(chosen->shape(0)) == problem.batch && int(chosen->shape(1)) == problem.heads &&
                        int(chosen->shape(2)) == geometry.tiles() && int(chosen->shape(3)) == foveal.budget),
            "chosen must be [batch, heads, tiles, budget]");
    foveal.problem = problem;
    foveal.chosen = chosen ? chosen->data() : nullptr;
    foveal.select = select;
    foveal.attend = problem.lse != nullptr;
    if (!select) check_ascending(chosen->data(), chosen->size() / size_t(foveal.budget));
  }

  static int patches(const Sizes& sizes, const std::optional<Places>& places) {
    return places ? int(places->shape(1)) : sizes[0] * sizes[1];
  }

  void check_ascending(const int32_t* row, size_t rows) const {
    for (const int32_t* const end = row + rows * size_t(foveal.budget); row != end; row += foveal.budget) {
      bool good = row[0] >= 0 && row[foveal.budget - 1] < geometry.cells();
      for (int m = 1; m < foveal.budget; ++m) good &= row[m - 1] < row[m];
      require(good, "chosen must hold different cells of the layout, in ascending order");
    }
  }

  void run(void (*kernel)(const Foveal&)) const {
    if (empty(foveal.problem)) return;
    nb::gil_scoped_release unlocked;
    kernel(foveal);
  }
};

void foveal_select(const Heads& q, const Heads& k, const std::optional<Bias>& bias,
                   const std::optional<Places>& places, const Sizes& sizes, float scale, int threads,
                   const Chosen& chosen) {
  const Problem problem = problem_of(q, k, bias, scale, threads);
  FovealCall(problem, sizes, places, chosen, true).run(kernels().foveal);
}

void foveal_attend(const Heads& q, const Heads& k, const Heads& v, const std::optional<Bias>& bias,
                   const std::optional<Places>& places, const Sizes& sizes, float scale, int threads,
                   const std::optional<Chosen>& chosen, bool select, const Heads& out, const Lse& lse) {
  Problem problem = problem_of(q, k, bias, scale, threads);
  add_result(problem, v, out, lse);
  FovealCall(problem, sizes, places, chosen, select).run(kernels().foveal);
}

void foveal_backward(const Heads& q, const Heads& k, const Heads& v, const std::optional<Bias>& bias,
                     const std::optional<Places>& places, const Sizes& sizes, float scale, int threads,
                     const Chosen& chosen, const Heads& out, const Lse& lse, const Heads& out_grad,
                     const Heads& q_grad, const Heads& k_grad, const Heads& v_grad,
                     const std::optional<Lse>& bias_grad) {
  Problem problem = problem_of(q, k, bias, scale, threads);
  add_result(problem, v, out, lse);
  add_gradients(problem, out_grad, q_grad, k_grad, v_grad, bias_grad);
  FovealCall(problem, sizes, places, chosen, false).run(kernels().foveal_backward);
}

Groups groups_of(const Indices& start, const Indices& member, int tokens, const char* name) {
  const Groups groups{int(start.size()) - 1, start.data(), member.data()};
  require(groups.count >= 0 && groups.start[0] == 0 && size_t(groups.start[groups.count]) == member.size(),
          std::string(name) + " must start at 0 and end at their number");
  std::vector<int> last(size_t(tokens), -1);
  for (int g = 0; g < groups.count; ++g) {
    require(groups.start[g] <= groups.start[g + 1], std::string(name) + " of a tile cannot end before they start");
    for (int i = groups.start[g]; i < groups.start[g + 1]; ++i) {
      const int32_t token = groups.member[i];
      require(token >= 0 && token < tokens && last[size_t(token)] != g,
              std::string(name) + " of a tile must be different tokens");
      last[size_t(token)] = g;
    }
  }
  return groups;
}

Block block_of(const Problem& problem, const Indices& query_start, const Indices& queries, const Indices& key_start,
               const Indices& keys) {
  const Block block{problem, groups_of(query_start, queries, problem.tokens, "queries"),
                    groups_of(key_start, keys, problem.tokens, "keys")};
  require(block.keys.count == block.queries.count || block.keys.count == block.queries.count * problem.heads,
          "there must be a list of keys for each tile, or for each tile of each head");
  std::vector<bool> seen(size_t(problem.tokens), false);
  for (size_t i = 0; i < queries.size(); ++i) seen[size_t(queries.data()[i])] = true;
  require(int(queries.size()) == problem.tokens && std::find(seen.begin(), seen.end(), false) == seen.end(),
          "every token must be a query of one tile");
  return block;
}

void run_block(const Block& block, void (*kernel)(const Block&)) {
  if (empty(block.problem)) return;
  nb::gil_scoped_release unlocked;
  kernel(block);
}

void block_attend(const Heads& q, const Heads& k, const Heads& v, const std::optional<Bias>& bias,
                  const Indices& query_start, const Indices& queries, const Indices& key_start, const Indices& keys,
                  float scale, int threads, const Heads& out, const Lse& lse) {
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

// The check of every index waits for the kernel, which reads them anyway.
void run_gather(const Problem& problem, const Chosen& indices, const std::optional<Counts>& counts,
                void (*kernel)(const Gather&)) {
  require(int(indices.shape(0)) == problem.batch && int(indices.shape(1)) == problem.heads &&
              int(indices.shape(2)) == problem.tokens,
          "indices must be [batch, heads, tokens, keys]");
  require(!counts || (int(counts->shape(0)) == problem.batch && int(counts->shape(1)) == problem.heads &&
                      int(counts->shape(2)) == problem.tokens),
          "counts must be [batch, heads, tokens]");
  int32_t wrong = 0;
  const Gather gather{problem, indices.data(), counts ? counts->data() : nullptr, int(indices.shape(3)), &wrong};
  if (empty(problem)) return;
  {
    nb::gil_scoped_release unlocked;
    kernel(gather);
  }
  require(!wrong, "indices must be tokens, from 0 to " + std::to_string(problem.tokens - 1) +
                      ", and counts from 0 to " + std::to_string(gather.longest));
}

void gather_attend(const Heads& q, const Heads& k, const Heads& v, const std::optional<Bias>& bias,
                   const Chosen& indices, const std::optional<Counts>& counts, float scale, int threads,
                   const Heads& out, const Lse& lse) {
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

Sparsifiner sparsifiner_of(const Problem& problem, const Heads& coefficients, const Bias& basis, int budget, int prefix,
                           float tau, int top) {
  Sparsifiner args{};
  args.problem = problem;
  args.budget = budget;
  args.prefix = prefix;
  args.tau = tau;
  args.top = top;
  args.coefficients = view(coefficients, "coefficients", problem);
  args.basis = basis.data();
  require(budget >= 1 && budget <= problem.tokens && prefix >= 0 && top >= 0,
          "budget must be from 1 to the number of tokens, and neither prefix nor top below 0");
  require(int(basis.shape(0)) == args.coefficients.width && int(basis.shape(1)) == problem.tokens,
          "the basis must have a row for each coefficient and a column for each token");
  return args;
}

void run_sparsifiner(const Sparsifiner& args) {
  if (empty(args.problem)) return;
  nb::gil_scoped_release unlocked;
  kernels().sparsifiner(args);
}

void sparsifiner_select(const Heads& coefficients, const Bias& basis, int budget, int prefix, float tau, int top,
                        int threads, const Chosen& indices, const Counts& counts) {
  Problem problem{};
  problem.batch = int(coefficients.shape(0));
  problem.heads = int(coefficients.shape(1));
  problem.tokens = int(coefficients.shape(2));
  problem.threads = threads < 1 ? 1 : threads;
  Sparsifiner args = sparsifiner_of(problem, coefficients, basis, budget, prefix, tau, top);
  require(int(indices.size()) == problem.batch * problem.heads * problem.tokens * budget &&
              int(counts.size()) == problem.batch * problem.heads * problem.tokens,
          "indices must be [batch, heads, tokens, budget], and counts [batch, heads, tokens]");
  args.indices = indices.data();
  args.counts = counts.data();
  run_sparsifiner(args);
}

void sparsifiner(const Heads& q, const Heads& k, const Heads& v, const std::optional<Bias>& bias,
                 const Heads& coefficients, const Bias& basis, const std::optional<Heads>& tail_scores,
                 const std::optional<Heads>& tail_values, const std::optional<Bias>& share, int budget, int prefix,
                 float tau, int top, float scale, int threads, const Heads& out, const Lse& lse) {
  Problem problem = problem_of(q, k, bias, scale, threads);
  add_result(problem, v, out, lse);
  Sparsifiner args = sparsifiner_of(problem, coefficients, basis, budget, prefix, tau, top);
  require(tail_scores.has_value() == share.has_value() && tail_values.has_value() == share.has_value(),
          "tail_scores, tail_values and share come together or not at all");
  if (share) {
    const int ranks = args.coefficients.width;
    args.tail_scores = view(*tail_scores, "tail_scores", problem, ranks);
    Problem pooled = problem;
    pooled.tokens = ranks;
    args.tail_values = view(*tail_values, "tail_values", pooled, problem.v.width);
    require(int(share->shape(0)) == problem.tokens && int(share->shape(1)) == ranks, "share must be [tokens, ranks]");
    args.share = share->data();
  }
  run_sparsifiner(args);
}

void power_of_two(const Floats& from, const Floats& to) {
  require(from.size() == to.size(), "both arrays must be equally long");
  kernels().exp2(from.data(), to.data(), int64_t(from.size()));
}

}  // namespace
}  // namespace attendless

// Without `noconvert` nanobind would silently copy an array of another type, and results would go into the copy.
#define ARRAY(name) nb::arg(name).noconvert()
#define MAYBE(name) nb::arg(name).noconvert().none()

NB_MODULE(_native, m) {
  using namespace attendless;
  m.doc() = "Attention kernels for CPUs.";
  m.def("paths", &paths, "Instruction paths this machine can run, best first.");
  m.def("path", [] { return std::string(kernels().name); }, "The instruction path in use.");
  m.def("use_path", &use_path, "name"_a, "Use this instruction path from now on.");
  m.def("exp2", &power_of_two, ARRAY("source"), ARRAY("target"), "The kernels' own 2^x.");
  m.def("foveal_select", &foveal_select, ARRAY("q"), ARRAY("k"), MAYBE("key_bias"), MAYBE("places"), "layout"_a,
        "scale"_a, "threads"_a, ARRAY("chosen"));
  m.def("foveal_attend", &foveal_attend, ARRAY("q"), ARRAY("k"), ARRAY("v"), MAYBE("key_bias"), MAYBE("places"),
        "layout"_a, "scale"_a, "threads"_a, MAYBE("chosen"), "select"_a, ARRAY("out"), ARRAY("lse"));
  m.def("foveal_backward", &foveal_backward, ARRAY("q"), ARRAY("k"), ARRAY("v"), MAYBE("key_bias"), MAYBE("places"),
        "layout"_a, "scale"_a, "threads"_a, ARRAY("chosen"), ARRAY("out"), ARRAY("lse"), ARRAY("out_grad"),
        ARRAY("q_grad"), ARRAY("k_grad"), ARRAY("v_grad"), MAYBE("bias_grad"));
  m.def("block_attend", &block_attend, ARRAY("q"), ARRAY("k"), ARRAY("v"), MAYBE("key_bias"), ARRAY("query_start"),
        ARRAY("queries"), ARRAY("key_start"), ARRAY("keys"), "scale"_a, "threads"_a, ARRAY("out"), ARRAY("lse"));
  m.def("block_backward", &block_backward, ARRAY("q"), ARRAY("k"), ARRAY("v"), MAYBE("key_bias"),
        ARRAY("query_start"), ARRAY("queries"), ARRAY("key_start"), ARRAY("keys"), "scale"_a, "threads"_a,
        ARRAY("out"), ARRAY("lse"), ARRAY("out_grad"), ARRAY("q_grad"), ARRAY("k_grad"), ARRAY("v_grad"),
        MAYBE("bias_grad"));
  m.def("gather_attend", &gather_attend, ARRAY("q"), ARRAY("k"), ARRAY("v"), MAYBE("key_bias"), ARRAY("indices"),
        MAYBE("counts"), "scale"_a, "threads"_a, ARRAY("out"), ARRAY("lse"));
  m.def("gather_backward", &gather_backward, ARRAY("q"), ARRAY("k"), ARRAY("v"), MAYBE("key_bias"), ARRAY("indices"),
        MAYBE("counts"), "scale"_a, "threads"_a, ARRAY("out"), ARRAY("lse"), ARRAY("out_grad"), ARRAY("q_grad"),
        ARRAY("k_grad"), ARRAY("v_grad"), MAYBE("bias_grad"));
  m.def("sparsifiner_select", &sparsifiner_select, ARRAY("coefficients"), ARRAY("basis"), "budget"_a,
        "prefix"_a, "tau"_a, "top"_a, "threads"_a, ARRAY("indices"), ARRAY("counts"));
  m.def("sparsifiner", &sparsifiner, ARRAY("q"), ARRAY("k"), ARRAY("v"), MAYBE("key_bias"), ARRAY("coefficients"),
        ARRAY("basis"), MAYBE("tail_scores"), MAYBE("tail_values"), MAYBE("share"), "budget"_a, "prefix"_a, "tau"_a,
        "top"_a, "scale"_a, "threads"_a, ARRAY("out"), ARRAY("lse"));
}
