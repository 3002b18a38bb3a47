// The grid of foveal attention: the tokens of each cell and tile, the cells of each coarse cell, and the cells that
// each tile covers, as lists in CSR form.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels.hpp"
#include "plans.hpp"

namespace attendless {

// Groups that own their memory.
struct Grouping {
  std::vector<int32_t> start, member;
  Groups view() const { return {int(start.size()) - 1, start.data(), member.data()}; }
};

class Geometry {
 public:
  // `places` [images, patches]: the grid position of each patch; null: patch i is at position i, and the grid is full.
  Geometry(const Layout& layout, const int32_t* places, int images, int patches);
  void fill(Foveal& foveal) const;

 private:
  Layout layout_;
  std::vector<Grouping> cells_, tiles_;
  std::vector<Image> images_;
  Grouping parents_, own_;
  std::vector<int32_t> parent_;
};

// The geometry of a full grid. The most recent geometries are cached, because the layers of a model share a grid.
std::shared_ptr<const Geometry> geometry_of(const Layout& layout);

}  // namespace attendless
