// What an attention over a list looks at and looks from: a head's keys and values as rows that a list names by number,
// and a group of queries that share the list.
#pragma once

#include "scratch.hpp"

namespace attendless::ATTENDLESS_ISA {

constexpr int kChunk = 48;  // a multiple of every Tile::kBlock and of every W
constexpr int kGroup = 16;  // queries at most in one tile of lanes

// A head's keys and values (or their gradients). Rows are padded with zeros to a multiple of 16 channels.
struct KvTable {
  float *k, *v;
  float* bias;  // of each row: in units of log 2, or its gradient
  int width, value_width;

  INLINE KvTable(Cursor& memory, int64_t rows, int key_width, int value_width)
      : k(memory.floats(rows * padded(key_width))),
        v(memory.floats(rows * padded(value_width))),
        bias(memory.floats(rows)),
        width(key_width),
        value_width(value_width) {}

  INLINE float* key(int64_t row) const { return k + row * padded(width); }
  INLINE float* value(int64_t row) const { return v + row * padded(value_width); }
};

// Up to kGroup queries: where their rows lie in the caller's tensors.
struct Queries {
  int count;
  const float* q[kGroup];
  float *out[kGroup], *lse[kGroup];
  const float* out_grad[kGroup];
  float* q_grad[kGroup];

  // For the forward pass: those from `first` on, at most `size`; the last is repeated in what is left of `size`.
  INLINE Queries some(int first, int size) const {
    Queries part;
    part.count = least(size, count - first);
    for (int i = 0; i < size; ++i) {
      const int from = least(first + i, count - 1);
      part.q[i] = q[from];
      part.out[i] = out[from];
      part.lse[i] = lse[from];
    }
    return part;
  }
};

// Keys of a list that stand for many tokens each, from `begin` to `end`: what is seen of them turns with the query, as
// their values do with their keys inside them. `slope` [key channel][value channel] is how; `grad` is its gradient, in
// the backward pass. There is a pointer for each key channel, and the last is repeated kGroup times.
struct Blur {
  int begin, end;
  float *const *slope, *const *grad;
};
struct Blurs {
  int count = 0;
  Blur at[2];
};

// The next kChunk keys of a list; the last is repeated so that micro-kernels may take whole blocks.
struct Chunk {
  int count;
  float *key[kChunk], *value[kChunk];
  float bias[kChunk];

  INLINE Chunk(const KvTable& rows, const int32_t* list, int left) : count(least(kChunk, left)) {
    for (int i = 0; i < kChunk; ++i) {
      const int32_t row = list[least(i, count - 1)];
      key[i] = rows.key(row);
      value[i] = rows.value(row);
      bias[i] = rows.bias[row];
    }
  }
};

}  // namespace attendless::ATTENDLESS_ISA
