// Where the tokens of a grid stand: the cells, tiles and coarse cells of foveal attention, as the kernels read them.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels.hpp"

namespace attendless {

// Groups that own their memory.
struct Grouping {
  std::vector<int32_t> start, member;
  Groups view() const { return {int(start.size()) - 1, start.data(), member.data()}; }
};

struct Layout {
  int height, width, prefix, cell, tile, coarse, budget, order;

  // Throws std::invalid_argument for numbers that make no grid.
  explicit Layout(const std::array<int64_t, 8>& numbers);
  int patches() const { return height * width; }
  int cells() const;
  int tiles() const;
  bool operator==(const Layout& other) const;
};

class Geometry {
 public:
  // `places` [images, patches] says where on the grid each patch stands; null: every place is taken, in order.
  Geometry(const Layout& layout, const int32_t* places, int images, int patches);
  void fill(Foveal& foveal) const;

 private:
  Layout layout_;
  std::vector<Grouping> cells_, tiles_;
  std::vector<Image> images_;
  Grouping parents_, own_;
  std::vector<int32_t> parent_;
};

// Of a full grid. A model's layers share a grid, so the last few are kept.
std::shared_ptr<const Geometry> geometry_of(const Layout& layout);

}  // namespace attendless
