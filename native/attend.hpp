// One softmax over a list of keys, for any number of queries that share the list.
#pragma once

#include "few.hpp"
#include "group.hpp"

namespace attendless::ATTENDLESS_UNIT {

// The way for each size of group.
template <int W>
struct Attend {
  using Full = Group<Tile<W, kGroup / W>>;
  using Half = Group<Tile<(W < 8 ? W : 8), 8 / (W < 8 ? W : 8)>>;

  static void forward(const Rows& rows, const int32_t* list, int count, const Queries& queries, float scale,
                      float* scratch) {
    if (queries.count > 8) return Full::forward(rows, list, count, queries, scale, scratch);
    for (int i = 0; i < queries.count; i += 4) {
      const Queries four = queries.some(i, 4);
      const auto few = four.count == 1 ? Few<W, 1>::forward : four.count == 2 ? Few<W, 2>::forward : Few<W, 4>::forward;
      few(rows, list, count, four, scale, scratch);
    }
  }

  static void backward(const Rows& rows, const Rows& grads, const int32_t* list, int count, const Queries& queries,
                       float scale, float* scratch) {
    const auto backward = queries.count > 8 ? Full::backward : Half::backward;
    backward(rows, grads, list, count, queries, scale, scratch);
  }
};

}  // namespace attendless::ATTENDLESS_UNIT
