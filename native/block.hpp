// Attention with fixed patterns, such as windows, axes and BigBird's blocks. Each tile of queries has one list of keys,
// which is the same for every image.
//
// Loop order: step 0 packs keys and values into the table. Step 1: for each tile, for each group of kGroup queries, one
// softmax over the list of the tile (attend.hpp).
#pragma once

#include "head.hpp"

namespace attendless::ATTENDLESS_ISA {

template <int W, class P>
struct BlockHead {
  using Args = Block;
  using Numbers = P;

  const Block& block;
  const Head head;
  const int shares;
  KvTable<P> rows;

  static int64_t table_rows(const Block& b) { return b.problem.tokens; }

  struct Local {
    Cursor attend;
    Local(const Block& b, Cursor& memory)
        : attend(memory.part(attend_scratch<W, P>(b.problem))) {}
  };

  BlockHead(const Block& b, int image, int head_index, Cursor& memory)
      : block(b),
        head{b.problem, image, head_index},
        shares(parts_of_head(b.problem)),
        rows(memory, table_rows(b), b.problem.q.width, b.problem.v.width) {}

  // If there are fewer tiles than parts (`shares`), the queries of a tile are divided into splits() parts.
  static constexpr int kSteps = 2;
  int parts(int step) const { return step == 0 ? shares : block.queries.count * splits(); }

  void work(int step, int part, const Local& local) const {
    if (step == 0) return pack_tokens<W, P>(head, rows, part, shares);
    visit(part / splits(), [&](const int32_t* list, int keys, const int32_t* token, int count) {
      const Slice groups((count + kGroup - 1) / kGroup, part % splits(), splits());
      const int first = groups.begin * kGroup;
      attend_all<W, P>(head, rows, list, keys, token + first, least(groups.end * kGroup, count) - first, local.attend);
    });
  }

  void backward(const KvTable<P>& grads, const Local& local) const {
    for (int tile = 0; tile < block.queries.count; ++tile) {
      visit(tile, [&](const int32_t* list, int keys, const int32_t* token, int count) {
        attend_all_backward<W>(head, rows, grads, list, keys, token, count, local.attend);
      });
    }
    for (int i = 0; i < block.problem.tokens; ++i) unpack_gradient<W>(head, grads, i, i);
  }

  INLINE int splits() const { return 1 + (shares - 1) / block.queries.count; }

  template <class Visit>
  INLINE void visit(int tile, Visit attend) const {
    const Groups &queries = block.queries, &keys = block.keys;
    const int list = tile + (keys.count > queries.count ? head.head * queries.count : 0);
    attend(keys.member + keys.start[list], keys.start[list + 1] - keys.start[list],
           queries.member + queries.start[tile], queries.start[tile + 1] - queries.start[tile]);
  }
};

}  // namespace attendless::ATTENDLESS_ISA
