// Fixed patterns, such as windows, axes and BigBird's blocks: each tile of queries has its list of keys, the same for
// every image.
#pragma once

#include "head.hpp"

namespace attendless::ATTENDLESS_UNIT {

template <int W>
struct BlockHead {
  using Args = Block;

  const Block& block;
  const Head head;
  Rows rows;

  static int64_t table_rows(const Block& b) { return b.problem.tokens; }
  static int64_t table_floats(const Block& b) {
    return table_rows(b) * (padded(b.problem.q.width) + padded(b.problem.v.width) + 1) + 48;
  }
  static int64_t thread_floats(const Block& b) { return group_scratch(b.problem.q.width, b.problem.v.width) + 16; }

  BlockHead(const Block& b, int image, int head_index, Cursor& memory)
      : block(b), head{b.problem, image, head_index}, rows(memory.rows(table_rows(b), b.problem)) {}

  void prepare(Cursor) const {
    for (int i = 0; i < block.problem.tokens; ++i) pack_token<W>(head, rows, i, i);
  }

  int pieces() const { return block.queries.count; }

  void forward(int tile, Cursor memory) const {
    visit(tile, memory, [this](const int32_t* list, int keys, const int32_t* token, int count, float* scratch) {
      attend_all<W>(head, rows, list, keys, token, count, scratch);
    });
  }

  void backward(const Rows& grads, Cursor memory) const {
    prepare(memory);
    for (int tile = 0; tile < block.queries.count; ++tile) {
      visit(tile, memory, [&](const int32_t* list, int keys, const int32_t* token, int count, float* scratch) {
        attend_all_backward<W>(head, rows, grads, list, keys, token, count, scratch);
      });
    }
    for (int i = 0; i < block.problem.tokens; ++i) unpack_gradient<W>(head, grads, i, i);
  }

  template <class Visit>
  INLINE void visit(int tile, Cursor memory, Visit attend) const {
    const Groups &queries = block.queries, &keys = block.keys;
    const int list = tile + (keys.count > queries.count ? head.head * queries.count : 0);
    float* const scratch = memory.floats(group_scratch(rows.width, rows.value_width));
    attend(keys.member + keys.start[list], keys.start[list + 1] - keys.start[list],
           queries.member + queries.start[tile], queries.start[tile + 1] - queries.start[tile], scratch);
  }
};

}  // namespace attendless::ATTENDLESS_UNIT
