// The cells, tiles and coarse cells of foveal attention: lists of the tokens in each, as the kernels read them.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels.hpp"
#include "plans.hpp"

namespace attendless {

// `Groups` with memory of their own.
struct Grouping {
  std::vector<int32_t> start, member;
  Groups view() const { return {int(start.size()) - 1, start.data(), member.data()}; }
};

class Geometry {
 public:
  // `places` [images, patches]: the grid position of each patch; null: every position is taken, in order.
  Geometry(const Layout& layout, const int32_t* places, int images, int patches);
  void fill(Foveal& foveal) const;

 private:
  Layout layout_;
  std::vector<Grouping> cells_, tiles_;
  std::vector<Image> images_;
  Grouping parents_, own_;
  std::vector<int32_t> parent_;
};

// The geometry of a full grid. The layers of a model share a grid, so the last few geometries are cached.
std::shared_ptr<const Geometry> geometry_of(const Layout& layout);

}  // namespace attendless
