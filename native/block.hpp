// Fixed patterns, such as windows, axes and BigBird's blocks: each tile of queries has its list of keys, the same for
// every image.
#pragma once

#include "head.hpp"

namespace attendless::ATTENDLESS_ISA {

template <int W>
struct BlockHead {
  using Args = Block;

  const Block& block;
  const Head head;
  KvTable rows;

  static int64_t table_rows(const Block& b) { return b.problem.tokens; }

  struct Local {
    Cursor attend;
    Local(const Block& b, Cursor& memory)
        : attend(memory.part(attend_scratch<W>(b.problem))) {}
  };

  BlockHead(const Block& b, int image, int head_index, Cursor& memory)
      : block(b),
        head{b.problem, image, head_index},
        rows(memory, table_rows(b), b.problem.q.width, b.problem.v.width) {}

  void prepare() const {
    for (int i = 0; i < block.problem.tokens; ++i) pack_token<W>(head, rows, i, i);
  }

  int pieces() const { return block.queries.count; }

  void forward(int tile, const Local& local) const {
    visit(tile, [&](const int32_t* list, int keys, const int32_t* token, int count) {
      attend_all<W>(head, rows, list, keys, token, count, local.attend);
    });
  }

  void backward(const KvTable& grads, const Local& local) const {
    prepare();
    for (int tile = 0; tile < block.queries.count; ++tile) {
      visit(tile, [&](const int32_t* list, int keys, const int32_t* token, int count) {
        attend_all_backward<W>(head, rows, grads, list, keys, token, count, local.attend);
      });
    }
    for (int i = 0; i < block.problem.tokens; ++i) unpack_gradient<W>(head, grads, i, i);
  }

  template <class Visit>
  INLINE void visit(int tile, Visit attend) const {
    const Groups &queries = block.queries, &keys = block.keys;
    const int list = tile + (keys.count > queries.count ? head.head * queries.count : 0);
    attend(keys.member + keys.start[list], keys.start[list + 1] - keys.start[list],
           queries.member + queries.start[tile], queries.start[tile + 1] - queries.start[tile]);
  }
};

}  // namespace attendless::ATTENDLESS_ISA
