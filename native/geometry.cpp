// Builds the geometry of foveal attention by counting sort: patches by cell and by tile, cells by coarse cell. Caches
// the geometries of full grids.
#include "geometry.hpp"

#include <algorithm>
#include <mutex>
#include <tuple>

#include <pthread.h>

#include "checks.hpp"

namespace attendless {
namespace {

int blocks(int length, int size) { return (length + size - 1) / size; }

// Counting sort of items 0, 1, … by their group `of`; ascending within a group. Members are numbered from `first`.
Grouping group(const std::vector<int32_t>& of, int groups, int32_t first) {
  Grouping result;
  result.start.assign(size_t(groups) + 1, 0);
  result.member.resize(of.size());
  for (int32_t g : of) ++result.start[size_t(g) + 1];
  for (int g = 0; g < groups; ++g) result.start[size_t(g) + 1] += result.start[size_t(g)];
  std::vector<int32_t> next(result.start.begin(), result.start.end() - 1);
  for (size_t i = 0; i < of.size(); ++i) result.member[size_t(next[size_t(of[i])]++)] = first + int32_t(i);
  return result;
}

// The index of the size × size block that contains each patch.
std::vector<int32_t> block_of(const Layout& layout, int size, const int32_t* places, int patches) {
  std::vector<int32_t> block(static_cast<size_t>(patches));
  const int columns = blocks(layout.width, size), area = layout.patches();
  for (int i = 0; i < patches; ++i) {
    const int place = places ? places[i] : i;
    require(place >= 0 && place < area, "a patch stands at place ", place, ", but the grid has ", area);
    block[size_t(i)] = place / layout.width / size * columns + place % layout.width / size;
  }
  return block;
}

// Locked during fork(): otherwise a child could inherit the mutex locked by a thread that does not exist in the child.
std::mutex mutex_of_kept;
[[maybe_unused]] const int guarded = pthread_atfork([] { mutex_of_kept.lock(); }, [] { mutex_of_kept.unlock(); },
                                                    [] { mutex_of_kept.unlock(); });

}  // namespace

Layout::Layout(const Fields<Layout>& fields) {
  fields.unpack(height, width, prefix, cell, tile, coarse, budget, order, int8);
  require(height >= 1 && width >= 1 && cell >= 1 && tile >= 1 && coarse % cell == 0,
          "height, width, cell and tile must be at least 1, coarse a multiple of cell or 0");
  require(int64_t(height) * width <= kLargest, "a grid of ", height, " × ", width, " places is too large");
  require(order <= 1, "order must be 0 or 1, not ", order);
  require(int8 <= 1, "int8 must be 0 or 1, not ", int8);
  require(budget <= cells(), "a budget of ", budget, " cells is more than the ", cells(), " there are");
}

int Layout::cells() const { return blocks(height, cell) * blocks(width, cell); }
int Layout::tiles() const { return blocks(height, tile) * blocks(width, tile); }

bool Layout::operator==(const Layout& other) const {
  const auto numbers = [](const Layout& x) {
    return std::tie(x.height, x.width, x.prefix, x.cell, x.tile, x.coarse, x.budget, x.order, x.int8);
  };
  return numbers(*this) == numbers(other);
}

Geometry::Geometry(const Layout& layout, const int32_t* places, int images, int patches) : layout_(layout) {
  const auto [height, width, prefix, cell, tile, coarse, budget, order, int8] = layout;
  const int cell_columns = blocks(width, cell), cells = layout.cells();
  const int tile_columns = blocks(width, tile), tiles = layout.tiles();
  for (int b = 0; b < (places ? images : 1); ++b) {
    const int32_t* const here = places ? places + int64_t(b) * patches : nullptr;
    cells_.push_back(group(block_of(layout, cell, here, patches), cells, prefix));
    tiles_.push_back(group(block_of(layout, tile, here, patches), tiles, prefix));
  }
  for (size_t b = 0; b < cells_.size(); ++b) images_.push_back({cells_[b].view(), tiles_[b].view()});

  parent_.assign(size_t(cells), 0);
  parents_.start = {0};
  if (coarse) {
    const int ratio = coarse / cell, columns = blocks(width, coarse);
    for (int c = 0; c < cells; ++c) parent_[size_t(c)] = c / cell_columns / ratio * columns + c % cell_columns / ratio;
    parents_ = group(parent_, blocks(height, coarse) * columns, 0);
  }

  own_.start = {0};
  for (int t = 0; t < tiles; ++t) {
    const int top = t / tile_columns * tile, left = t % tile_columns * tile;
    const int bottom = std::min(top + tile, height) - 1, right = std::min(left + tile, width) - 1;
    for (int row = top / cell; row <= bottom / cell; ++row) {
      for (int column = left / cell; column <= right / cell; ++column) {
        own_.member.push_back(row * cell_columns + column);
      }
    }
    own_.start.push_back(int32_t(own_.member.size()));
    const int owned = own_.start[size_t(t) + 1] - own_.start[size_t(t)];
    require(owned <= budget, "a budget of ", budget, " cells is less than the ", owned, " a tile covers");
  }
}

void Geometry::fill(Foveal& foveal) const {
  foveal.prefix = layout_.prefix;
  foveal.budget = layout_.budget;
  foveal.order = layout_.order;
  foveal.bytes = layout_.int8;
  foveal.image = images_.data();
  foveal.images = int(images_.size());
  foveal.parents = parents_.view();
  foveal.parent = parent_.data();
  foveal.own = own_.view();
}

std::shared_ptr<const Geometry> geometry_of(const Layout& layout) {
  struct Kept {
    Layout layout;
    std::shared_ptr<const Geometry> geometry;
  };
  constexpr size_t kMost = 16;
  constexpr int kLargestKept = 1 << 16;  // patches; such a geometry takes 1 to 2 MB
  static std::vector<Kept> kept;  // most recently used first

  {
    const std::lock_guard<std::mutex> lock(mutex_of_kept);
    const auto found = std::find_if(kept.begin(), kept.end(), [&](const Kept& one) { return one.layout == layout; });
    if (found != kept.end()) {
      std::rotate(kept.begin(), found, found + 1);
      return kept.front().geometry;
    }
  }
  auto made = std::make_shared<const Geometry>(layout, nullptr, 1, layout.patches());
  if (layout.patches() > kLargestKept) return made;
  const std::lock_guard<std::mutex> lock(mutex_of_kept);
  if (kept.size() == kMost) kept.pop_back();
  kept.insert(kept.begin(), {layout, made});
  return made;
}

}  // namespace attendless
