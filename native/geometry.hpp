// Where the tokens of a grid stand: the cells, tiles and coarse cells of foveal attention, as the units read them.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.hpp"

namespace attendless {

// Groups that own their memory.
struct Grouping {
  std::vector<int32_t> start, member;
  Groups view() const { return {int(start.size()) - 1, start.data(), member.data()}; }
};

struct Layout {
  int height, width, prefix, cell, tile, coarse, budget;
};

class Geometry {
 public:
  // `places` [images, patches] says where on the grid each patch stands; null: every place is taken, in order.
  Geometry(const Layout& layout, const int32_t* places, int images, int patches);

  int cells() const { return int(parent_.size()); }
  int tiles() const { return int(own_.start.size()) - 1; }
  void fill(Foveal& foveal) const;

 private:
  Layout layout_;
  std::vector<Grouping> cells_, tiles_;
  std::vector<Image> images_;
  Grouping parents_, own_;
  std::vector<int32_t> parent_;
};

}  // namespace attendless
