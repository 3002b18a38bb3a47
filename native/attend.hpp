// Softmax attention of up to kGroup queries over one list of keys: selects the kernel for the number of queries.
// Forward: Group for more than 8 queries, otherwise FewQueries with 4, 2 or 1 queries at a time. Backward: Group with
// 16 or 8 lanes.
#pragma once

#include "few_queries.hpp"
#include "group.hpp"

namespace attendless::ATTENDLESS_ISA {

template <int W, class P>
struct Attend {
  using Full = Group<Tile<W, kGroup / W>, P>;
  using Eight = Group<Tile<(W < 8 ? W : 8), 8 / (W < 8 ? W : 8)>, P>;

  // Scratch floats, independent of the length of the list. Full needs the most.
  static int64_t scratch(int width, int value_width) {
    return counted([&](Cursor& memory) { typename Full::Memory(memory, width, value_width); });
  }

  static void forward(const KvTable<P>& rows, const int32_t* list, int count, const Queries<P>& queries, float scale,
                      const Blurs<P>& blurs, Cursor scratch) {
    if (queries.count > 8) return Full::forward(rows, list, count, queries, scale, blurs, scratch);
    for (int i = 0; i < queries.count; i += 4) {
      const Queries<P> four = queries.some(i, 4);
      const auto few = four.count == 1   ? FewQueries<W, 1, P>::forward
                       : four.count == 2 ? FewQueries<W, 2, P>::forward
                                         : FewQueries<W, 4, P>::forward;
      few(rows, list, count, four, scale, blurs, scratch);
    }
  }

  static void backward(const KvTable<P>& rows, const KvTable<P>& grads, const int32_t* list, int count,
                       const Queries<P>& queries, float scale, bool repeats, const Blurs<P>& blurs, Cursor scratch) {
    const auto backward = queries.count > 8 ? Full::backward : Eight::backward;
    backward(rows, grads, list, count, queries, scale, repeats, blurs, scratch);
  }
};

}  // namespace attendless::ATTENDLESS_ISA
