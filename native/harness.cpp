// Compares the kernels with loops over their definitions, without Python. It is for sanitizers that report false
// positives in Python, for other compilers and for emulated processors. Runs random problems on every available
// instruction set, with one to four threads, from two concurrent callers.
//
//     harness [problems] [seed]
#include <cstring>
#include <thread>

#include "checks.hpp"
#include "geometry.hpp"
#include "harness.hpp"
#include "parallel.hpp"

using namespace attendless;

namespace {

using Lists = std::vector<std::vector<int>>;  // [images · heads · queries]: the keys of each query

View view(Values& x, const Problem& p, int tokens, int width) {
  return {x.data(), int64_t(p.heads) * tokens * width, int64_t(tokens) * width, width, width};
}

using Halves = std::vector<Bf16>;

// Rounds to the eight significant bits of bf16.
float nearest(float x) {
  int exponent;
  const float digits = std::ldexp(std::frexp(x, &exponent), 8);
  return std::ldexp(std::nearbyint(digits), exponent - 8);
}

Bf16 narrow(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return {uint16_t(bits >> 16)};
}

float wide(Bf16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// A random problem, and the memory its pointers refer to. Queries, keys and values are exact in bf16.
struct Tensors {
  Problem problem{};
  Values q, k, v, bias, out, lse, out_grad, q_grad, k_grad, v_grad, bias_grad;

  Tensors(Random& random, int tokens) {
    problem.batch = random.from(1, 2);
    problem.heads = random.from(1, 3);
    problem.tokens = tokens;
    problem.threads = random.from(1, 4);
    problem.scale = 0.3f;
    const size_t rows = size_t(problem.batch) * problem.heads * tokens;
    const int width = random.from(1, 40), value_width = random.from(1, 40);
    for (Values* x : {&q, &k}) *x = random.values(rows * width);
    for (Values* x : {&v, &out_grad}) *x = random.values(rows * value_width);
    for (Values* x : {&q, &k, &v}) {
      for (float& number : *x) number = nearest(number);
    }
    for (Values* x : {&q_grad, &k_grad}) x->assign(rows * width, NAN);
    for (Values* x : {&out, &v_grad}) x->assign(rows * value_width, NAN);
    for (Values* x : {&lse, &bias_grad}) x->assign(rows, NAN);
    bias = random.values(size_t(problem.batch) * tokens);
    if (random.flip()) problem.bias = bias.data();
    problem.q = view(q, problem, tokens, width);
    problem.k = view(k, problem, tokens, width);
    problem.v = view(v, problem, tokens, value_width);
    problem.out = view(out, problem, tokens, value_width);
    problem.lse = lse.data();
  }

  // Runs the kernel in fp32, in bf16 and, for foveal attention, with int8 scores. bf16 and int8 results must equal the
  // fp32 results up to rounding, relative to the largest value. Means and first-order corrections are rounded too.
  template <class Args>
  void run(void (*kernel)(const Args&), Args args) const {
    const Args given = args;
    kernel(args);
    Halves half[4];
    View* const view[] = {&args.problem.q, &args.problem.k, &args.problem.v, &args.problem.out};
    const Values* const from[] = {&q, &k, &v, &out};
    for (int i = 0; i < 4; ++i) {
      for (const float x : *from[i]) half[i].push_back(narrow(x));
      view[i]->data = half[i].data();
      view[i]->element = Element::bf16;
    }
    float most = 1.f;
    for (const float x : v) most = std::max(most, std::fabs(x));
    const auto compare = [&](float tolerance, const char* what) {
      kernel(args);
      for (size_t i = 0; i < out.size(); ++i) {
        if (!(std::fabs(wide(half[3][i]) - out[i]) <= most * tolerance)) wrong(what);
      }
    };
    compare(1.f / 64, "a result in bfloat16");
    if constexpr (std::is_same_v<Args, Foveal>) {
      args.bytes = true;
      compare(1.f / 16, "a result of scores in bytes");
    }
    kernel(given);  // the fp32 backward pass needs the fp32 lse
  }

  void want_gradients() {
    problem.out_grad = view(out_grad, problem, problem.tokens, problem.v.width);
    problem.q_grad = view(q_grad, problem, problem.tokens, problem.q.width);
    problem.k_grad = view(k_grad, problem, problem.tokens, problem.q.width);
    problem.v_grad = view(v_grad, problem, problem.tokens, problem.v.width);
    problem.bias_grad = bias_grad.data();
  }
};

// Compares results, and gradients if `backward`, with the definition: for each query, a softmax over its list.
void check(const Tensors& t, const Lists& lists, bool backward) {
  const Problem& p = t.problem;
  const int D = p.q.width, E = p.v.width;
  std::vector<double> out(t.out.size()), q_grad(t.q.size()), k_grad(t.q.size()), v_grad(t.out.size());
  std::vector<double> bias_grad(t.lse.size());
  for (size_t row = 0; row < lists.size(); ++row) {
    const std::vector<int>& list = lists[row];
    const size_t first = row / p.tokens * p.tokens, image = row / p.tokens / p.heads;
    std::vector<double> weight(list.size());
    double most = -INFINITY, total = 0.;
    for (size_t i = 0; i < list.size(); ++i) {
      const size_t key = first + list[i];
      weight[i] = p.bias ? p.bias[image * p.tokens + list[i]] : 0.;
      for (int c = 0; c < D; ++c) weight[i] += double(p.scale) * t.q[row * D + c] * t.k[key * D + c];
      most = std::max(most, weight[i]);
    }
    for (double& w : weight) total += w = std::exp(w - most);
    for (size_t i = 0; i < list.size(); ++i) {
      weight[i] /= total;
      for (int c = 0; c < E; ++c) out[row * E + c] += weight[i] * t.v[(first + list[i]) * E + c];
    }
    double mean = 0.;
    for (int c = 0; c < E; ++c) mean += out[row * E + c] * t.out_grad[row * E + c];
    for (size_t i = 0; i < list.size() && backward; ++i) {
      const size_t key = first + list[i];
      double slope = -mean;
      for (int c = 0; c < E; ++c) {
        slope += double(t.out_grad[row * E + c]) * t.v[key * E + c];
        v_grad[key * E + c] += weight[i] * t.out_grad[row * E + c];
      }
      slope *= weight[i];
      bias_grad[key] += slope;
      for (int c = 0; c < D; ++c) {
        q_grad[row * D + c] += slope * p.scale * t.k[key * D + c];
        k_grad[key * D + c] += slope * p.scale * t.q[row * D + c];
      }
    }
  }
  compare("out", t.out, out);
  if (!backward) return;
  compare("q_grad", t.q_grad, q_grad);
  compare("k_grad", t.k_grad, k_grad);
  compare("v_grad", t.v_grad, v_grad);
  compare("bias_grad", t.bias_grad, bias_grad);
}

void try_block(Random& random) {
  Tensors t(random, random.from(1, 150));
  const Problem& p = t.problem;
  const int tiles = random.from(1, 5), patterns = random.flip() ? p.heads : 1;
  std::vector<int32_t> query_start{0}, queries(size_t(p.tokens)), key_start{0}, keys;
  for (int i = 0; i < p.tokens; ++i) queries[size_t(i)] = i;
  std::shuffle(queries.begin(), queries.end(), random.engine);
  for (int i = 1; i < tiles; ++i) query_start.push_back(random.from(0, p.tokens));
  std::sort(query_start.begin(), query_start.end());
  query_start.push_back(p.tokens);
  for (int i = 0; i < tiles * patterns; ++i) {
    for (int n = random.from(0, 120); n > 0; --n) keys.push_back(random.from(0, p.tokens - 1));
    key_start.push_back(int32_t(keys.size()));
  }
  Lists lists(t.lse.size());
  for (size_t head = 0; head < size_t(p.batch) * p.heads; ++head) {
    for (int tile = 0; tile < tiles; ++tile) {
      const size_t at = size_t(tile) + (patterns > 1 ? head % p.heads * tiles : 0);
      for (int i = query_start[size_t(tile)]; i < query_start[size_t(tile) + 1]; ++i) {
        const auto seen = keys.begin() + key_start[at], end = keys.begin() + key_start[at + 1];
        lists[head * p.tokens + queries[size_t(i)]].assign(seen, end);
      }
    }
  }
  Block block{p, groups_of(query_start.data(), query_start.size(), queries.data(), queries.size(), p.tokens, "queries"),
              groups_of(key_start.data(), key_start.size(), keys.data(), keys.size(), p.tokens, "keys")};
  require_each_token_once(block.queries, p.tokens);
  t.run(kernels().block, block);
  t.want_gradients();
  block.problem = p;
  block.problem.repeats = has_repeats(block.keys, p.tokens);
  kernels().block_backward(block);
  check(t, lists, true);
}

void try_gather(Random& random) {
  Tensors t(random, random.from(1, 60));
  const Problem& p = t.problem;
  const int longest = random.from(0, 70);
  std::vector<int32_t> indices(t.lse.size() * size_t(longest)), counts(t.lse.size());
  Lists lists(t.lse.size());
  for (int32_t& x : indices) x = random.from(0, p.tokens - 1);
  for (size_t row = 0; row < counts.size(); ++row) {
    counts[row] = random.from(0, longest);
    lists[row].assign(indices.begin() + row * longest, indices.begin() + row * longest + counts[row]);
  }
  int32_t wrong_index = 0;
  t.run(kernels().gather, Gather{p, indices.data(), counts.data(), longest, &wrong_index});
  t.want_gradients();
  kernels().gather_backward({p, indices.data(), counts.data(), longest, &wrong_index});
  if (wrong_index) wrong("gather calls a good index wrong");
  check(t, lists, true);
}

// If every cell is chosen, foveal attention is full attention, for any order of correction. With fewer cells, results
// and gradients must be bit-identical for any number of threads.
void try_foveal(Random& random) {
  const int height = random.from(1, 12), width = random.from(1, 12), prefix = random.from(0, 5);
  const int cell = random.from(1, 3), tile = random.from(1, 5), coarse = cell * random.from(0, 2);
  const int order = random.from(0, 1);
  Tensors t(random, prefix + height * width);
  const int cells = (height + cell - 1) / cell * ((width + cell - 1) / cell);
  const Layout all(Fields<Layout>{{height, width, prefix, cell, tile, coarse, cells, order}});
  const auto geometry = geometry_of(all);
  std::vector<int32_t> chosen(size_t(t.problem.batch) * t.problem.heads * all.tiles() * cells);
  Foveal foveal{};
  geometry->fill(foveal);
  foveal.problem = t.problem;
  foveal.chosen = chosen.data();
  foveal.select = foveal.attend = true;
  t.run(kernels().foveal, foveal);
  t.want_gradients();
  foveal.problem = t.problem;
  kernels().foveal_backward(foveal);
  Lists lists(t.lse.size());
  for (auto& list : lists) {
    for (int i = 0; i < t.problem.tokens; ++i) list.push_back(i);
  }
  check(t, lists, true);

  for (int budget = 1; budget <= cells; budget += 1 + cells / 3) {
    std::shared_ptr<const Geometry> few;
    try {
      few = geometry_of(Layout(Fields<Layout>{{height, width, prefix, cell, tile, coarse, budget, order}}));
    } catch (const std::invalid_argument&) {
      continue;  // a tile covers more cells than the budget
    }
    few->fill(foveal);
    std::vector<Values> first;
    for (const int threads : {1, 2, 4, 16}) {
      foveal.problem.threads = threads;
      kernels().foveal(foveal);
      kernels().foveal_backward(foveal);
      const std::vector<Values> now{t.out, t.q_grad, t.k_grad, t.v_grad, t.bias_grad};
      if (first.empty()) first = now;
      if (now != first) wrong("foveal differs with threads");
    }
  }
}

// Compares the choice with the definition, and the attention with a softmax over the chosen keys.
void try_sparsifiner(Random& random) {
  Tensors t(random, random.from(1, 120));
  const Problem& p = t.problem;
  const int ranks = random.from(1, 20), budget = random.from(1, p.tokens), prefix = random.from(0, 3);
  const size_t rows = t.lse.size();
  const size_t table = size_t(ranks) * p.tokens, each = random.from(0, 1) ? table : 0;  // a basis for each image
  Values coefficients = random.values(rows * ranks), basis = random.values(each ? table * p.batch : table);
  for (Values* x : {&coefficients, &basis}) {
    for (float& number : *x) number = number < 0.f ? 0.f : std::round(4.f * number) / 4.f;  // exact sums; ties
  }
  std::vector<int32_t> indices(rows * budget), counts(rows);
  Sparsifiner args{};
  args.problem = p;
  args.budget = budget;
  args.prefix = std::min(prefix, p.tokens);
  args.coefficients = view(coefficients, p, p.tokens, ranks);
  args.basis = {basis.data(), int64_t(each)};
  t.run(kernels().sparsifiner, args);
  args.indices = indices.data();
  args.counts = counts.data();
  kernels().sparsifiner(args);
  Lists lists(rows);
  for (size_t row = 0; row < rows; ++row) {
    std::vector<std::pair<double, int>> best;
    const float* const mine = basis.data() + row / (size_t(p.heads) * p.tokens) * each;
    for (int key = 0; key < p.tokens; ++key) {
      double sum = 0.;
      for (int r = 0; r < ranks; ++r) sum += double(coefficients[row * ranks + r]) * mine[size_t(r) * p.tokens + key];
      if (sum > 0.) best.push_back({-sum, key});
    }
    std::sort(best.begin(), best.end());
    for (size_t i = 0; i < best.size() && i < size_t(budget); ++i) lists[row].push_back(best[i].second);
    std::sort(lists[row].begin(), lists[row].end());
    if (int(row % p.tokens) < prefix) {
      lists[row].clear();
      if (counts[row]) wrong("sparsifiner lists keys of a prefix");
      for (int key = 0; key < p.tokens; ++key) lists[row].push_back(key);
    } else {
      const auto found = indices.begin() + row * budget;
      if (lists[row] != std::vector<int>(found, found + counts[row])) wrong("sparsifiner's choice");
    }
  }
  check(t, lists, false);
}

}  // namespace

int main(int count, char** argument) {
  const int problems = count > 1 ? std::atoi(argument[1]) : 20;
  const unsigned seed = count > 2 ? unsigned(std::atoi(argument[2])) : 0;
  const auto some = [&](unsigned start) {
    Random random{std::mt19937(start)};
    for (int i = 0; i < problems; ++i) {
      for (const auto& attempt : {try_block, try_gather, try_foveal, try_sparsifiner, try_merge}) attempt(random);
    }
  };
  int done = 0;
  for (const std::string& isa : isas()) {
    use_isa(isa);
    std::thread other(some, seed + 1);
    some(seed);
    other.join();
    done += 2 * 5 * problems;
    std::printf("%s ", isa.c_str());
  }
  std::printf("ok %d problems%s%s\n", done, *why_own_threads() ? "; own threads: " : "", why_own_threads());
}
