// Compares token merging with loops over its definition. Rounding may change the order of nearly equal cosines.
// Therefore the decisions of the kernel (its owners) are checked in double precision, with a tolerance. Its outputs are
// compared with the outputs that follow from these decisions.
#include <algorithm>
#include <numeric>

#include "harness.hpp"

namespace attendless {
namespace {

constexpr double kRounding = 1e-5;

template <class Real>
double length(const Real* row, int width) {
  double square = 0.;
  for (int c = 0; c < width; ++c) square += double(row[c]) * double(row[c]);
  return std::max(1e-12, std::sqrt(square));
}

double cosine(const float* a, const float* b, int width) {
  double product = 0.;
  for (int c = 0; c < width; ++c) product += double(a[c]) * b[c];
  return product / length(a, width) / length(b, width);
}

}  // namespace

void try_merge(Random& random) {
  Merge m{};
  m.batch = random.from(1, 3);
  m.threads = random.from(1, 4);
  m.height = random.from(1, 24);
  m.width = random.from(1, 24);
  const int grid = m.height * m.width;
  m.patches = random.from((grid + 1) / 2, grid);
  m.prefix = random.from(0, 2);
  m.by_importance = m.patches > 1 && random.flip();
  m.sources = m.by_importance ? random.from(1, m.patches - 1) : m.patches / 2;
  m.merged = random.flip() ? m.sources : random.from(0, m.sources);
  m.window = random.flip() ? 0 : random.from(1, 6);
  m.protect = random.flip() ? 0.f : 0.3f;
  const int n = m.patches, left = n - m.merged, tokens = m.prefix + n, stays = m.sources - m.merged;
  const int C = random.from(1, 200), D = random.from(1, 40);
  m.heads = random.from(1, 3);
  const size_t images = size_t(m.batch);
  Values x = random.values(images * tokens * C), keys = random.values(images * m.heads * tokens * D);
  Values summed(images * tokens * D, 0.f);
  for (size_t i = 0; i < summed.size(); ++i) {
    const size_t image = i / (size_t(tokens) * D), at = i % (size_t(tokens) * D);
    for (int head = 0; head < m.heads; ++head) summed[i] += keys[(image * m.heads + head) * tokens * D + at];
  }
  Values out(images * (tokens - m.merged) * C, NAN), importance = random.values(images * tokens);
  Values sizes(images * n), sizes_out(images * left, NAN);
  for (float& y : importance) y = std::fabs(y) + 0.01f;
  for (float& y : sizes) y = float(random.from(1, 4));
  std::vector<int64_t> cells, owners(images * grid), cells_out(images * left, -9), owners_out(images * grid, -9);
  for (int64_t& y : owners) y = random.from(-1, n - 1);
  for (size_t image = 0; image < images; ++image) {
    std::vector<int64_t> order(static_cast<size_t>(grid));
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random.engine);
    cells.insert(cells.end(), order.begin(), order.begin() + n);
    for (int i = 0; i < n; ++i) owners[image * grid + order[size_t(i)]] = i;
  }
  m.x = {x.data(), int64_t(tokens) * C, C, C};
  m.keys = {keys.data(), int64_t(m.heads) * tokens * D, int64_t(tokens) * D, D, D};
  m.out = {out.data(), int64_t(tokens - m.merged) * C, C, C};
  m.importance = m.protect != 0.f || m.by_importance ? importance.data() : nullptr;
  m.sizes = sizes.data();
  m.cells = cells.data();
  m.owners = owners.data();
  m.sizes_out = sizes_out.data();
  m.cells_out = cells_out.data();
  m.owners_out = owners_out.data();
  kernels().merge(m);

  std::vector<double> expected(out.size()), totals(sizes_out.size());
  for (size_t image = 0; image < images; ++image) {
    const auto cell = [&](int i) { return int(cells[image * n + size_t(i)]); };
    const auto place = [&](int i) { return int(owners_out[image * grid + size_t(cell(i))]); };
    const auto window = [&](int i) {
      return m.window ? cell(i) / m.width / m.window * grid + cell(i) % m.width / m.window : 0;
    };
    const auto key = [&](int i) { return summed.data() + (image * tokens + m.prefix + i) * D; };
    const auto weight = [&](int i) { return importance[image * tokens + m.prefix + size_t(i)]; };
    std::vector<int> sources, targets, order(static_cast<size_t>(n));
    std::iota(order.begin(), order.end(), 0);
    if (m.by_importance) std::stable_sort(order.begin(), order.end(), [&](int i, int j) { return weight(i) > weight(j); });
    std::vector<bool> is_source(static_cast<size_t>(n));
    for (int i = 0; i < n; ++i) {
      is_source[size_t(m.by_importance ? order[size_t(i)] : i)] = m.by_importance ? i >= n - m.sources : i % 2 == 1;
    }
    for (int i = 0; i < n; ++i) (is_source[size_t(i)] ? sources : targets).push_back(i);
    double least_gone = INFINITY, most_staying = -INFINITY;
    int going = 0;
    for (int s = 0; s < m.sources; ++s) {
      const int i = sources[size_t(s)];
      double best = -INFINITY;
      for (const int j : targets) {
        if (window(i) == window(j)) best = std::max(best, cosine(key(i), key(j), D));
      }
      const double likeness = best - (m.protect != 0.f ? m.protect * std::log(weight(i)) : 0.);
      if (place(i) >= stays) {
        ++going;
        if (place(i) - stays >= n - m.sources) wrong("merging finds a partner that is none");
        const int partner = targets[size_t(place(i) - stays)];
        if (best == -INFINITY ? place(i) != stays : window(i) != window(partner)) wrong("merging crosses windows");
        if (cosine(key(i), key(partner), D) < best - kRounding) wrong("merging finds a partner that is less alike");
        least_gone = std::min(least_gone, likeness);
      } else {
        if (place(i) != s - going) wrong("merging loses the order of those that stay");
        most_staying = std::max(most_staying, likeness);
      }
    }
    if (going != m.merged) wrong("merging takes another number than asked for");
    if (least_gone < most_staying - kRounding) wrong("merging spares a surer pair");
    for (int j = 0; j < n - m.sources; ++j) {
      if (place(targets[size_t(j)]) != stays + j) wrong("merging moves those that are joined");
    }
    for (int i = 0; i < n; ++i) totals[image * left + size_t(place(i))] += sizes[image * n + size_t(i)];
    const auto part = [&](int i) { return m.by_importance ? double(weight(i)) : double(sizes[image * n + size_t(i)]); };
    std::vector<double> parts(static_cast<size_t>(left)), lengths(static_cast<size_t>(left));
    for (int i = 0; i < n; ++i) parts[size_t(place(i))] += part(i);
    double* const rows = expected.data() + image * (tokens - m.merged) * C;
    for (int i = -m.prefix; i < n; ++i) {
      const float* const from = x.data() + (image * tokens + m.prefix + i) * C;
      const int to = m.prefix + (i < 0 ? i : place(i));
      const double share = i < 0 ? 1. : part(i) / parts[size_t(place(i))];
      if (i >= 0) lengths[size_t(place(i))] += share * length(from, C);
      for (int c = 0; c < C; ++c) rows[to * C + c] += share * from[c];
      if (i >= 0 && (!is_source[size_t(i)] || place(i) < stays) && cells_out[image * left + size_t(place(i))] != cell(i)) {
        wrong("merging moves a patch to another cell");
      }
    }
    for (int k = 0; k < left && m.by_importance; ++k) {  // a mean by importance has the mean norm
      double* const row = rows + (m.prefix + k) * C;
      const double scale = std::min(2., lengths[size_t(k)] / length(row, C));
      for (int c = 0; c < C; ++c) row[c] *= scale;
    }
    for (int c = 0; c < grid; ++c) {
      const int before = int(owners[image * grid + size_t(c)]);
      if (owners_out[image * grid + size_t(c)] != (before < 0 ? -1 : place(before))) wrong("merging loses a cell");
    }
  }
  compare("merged tokens", out, expected);
  compare("merged sizes", sizes_out, totals);
}

}  // namespace attendless
