// What an attention over a list looks at and looks from: a head's keys and values as rows that a list names by number,
// and a group of queries that share the list.
#pragma once

#include "scratch.hpp"
#include "words.hpp"

namespace attendless::ATTENDLESS_ISA {

constexpr int kChunk = 48;  // a multiple of every Tile::kBlock and of every W
constexpr int kGroup = 16;  // queries at most in one tile of lanes
// Words of a table that caches hold. Rows of a larger one are prefetched a chunk ahead; elsewhere that costs some per cent.
constexpr int64_t kCached = 4 << 20;

// A head's keys and values (or their gradients). Rows are padded with zeros to a multiple of 16 words.
template <class P>
struct KvTable {
  using Key = typename P::Key;
  using Value = typename P::Value;
  static constexpr bool kRounds = P::kRounds;
  Key* k;
  Value* v;
  float* bias;  // of each row: in units of log 2, or its gradient
  uint8_t* bytes;   // of the keys, their scales and offsets, where scores are products of bytes
  float* scale;
  int32_t* offset;
  int width, value_width;
  bool distant;  // larger than caches are

  INLINE KvTable(Cursor& memory, int64_t rows, int key_width, int value_width)
      : k(reinterpret_cast<Key*>(memory.floats(rows * key_words(key_width)))),
        v(reinterpret_cast<Value*>(memory.floats(rows * value_words(value_width)))),
        bias(memory.floats(rows)),
        bytes(reinterpret_cast<uint8_t*>(memory.floats(P::kBytes ? rows * byte_words(key_width) : 0))),
        scale(memory.floats(P::kBytes ? rows : 0)),
        offset(memory.ints(P::kBytes ? rows : 0)),
        width(key_width),
        value_width(value_width),
        distant(rows * (key_words(key_width) + value_words(value_width)) > kCached) {}

  static INLINE int key_words(int width) { return padded(words<Key>(width)); }
  static INLINE int byte_words(int width) { return padded(words<int8_t>(width)); }
  static INLINE int value_words(int width) { return padded(words<Value>(width)); }
  INLINE int64_t key_stride() const { return int64_t(key_words(width)) * WordOf<Key>::kNumbers; }
  INLINE int64_t value_stride() const { return int64_t(value_words(value_width)) * WordOf<Value>::kNumbers; }
  INLINE Key* key(int64_t row) const { return k + row * key_stride(); }
  INLINE Value* value(int64_t row) const { return v + row * value_stride(); }
  INLINE uint8_t* byte(int64_t row) const { return bytes + row * byte_words(width) * 4; }

  // What a row's scores are products of.
  INLINE typename WordOf<typename P::Score>::Word* score_words(int64_t row) const {
    using Word = typename WordOf<typename P::Score>::Word;
    if constexpr (P::kBytes) {
      return reinterpret_cast<Word*>(byte(row));
    } else {
      return reinterpret_cast<Word*>(key(row));
    }
  }

  // The same table from a row on.
  INLINE KvTable from(int64_t row) const {
    KvTable rest = *this;
    rest.k = key(row);
    rest.v = value(row);
    rest.bias = bias + row;
    return rest;
  }
};

// Up to kGroup queries: where their rows lie, in the caller's tensors or beside them.
template <class P>
struct Queries {
  using Word = typename WordOf<typename P::Key>::Word;
  int count;
  const Word* q[kGroup];  // padded with zeros, unless a word is one number
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
template <class P>
struct Blur {
  int begin, end;
  typename P::Value* const* slope;
  float* const* grad;
};
template <class P>
struct Blurs {
  int count = 0;
  Blur<P> at[2];
};

// The next kChunk keys of a list; the last is repeated so that micro-kernels may take whole blocks.
template <class P>
struct Chunk {
  int count;
  typename WordOf<typename P::Score>::Word* key[kChunk];
  typename P::Value* value[kChunk];
  float bias[kChunk];
  float scale[P::kBytes ? kChunk : 1];
  int32_t offset[P::kBytes ? kChunk : 1];

  INLINE Chunk(const KvTable<P>& rows, const int32_t* list, int left) : count(least(kChunk, left)) {
    for (int i = 0; i < kChunk; ++i) {
      const int32_t row = list[least(i, count - 1)];
      key[i] = rows.score_words(row);
      value[i] = rows.value(row);
      bias[i] = rows.bias[row];
      if constexpr (P::kBytes) {
        scale[i] = rows.scale[row];
        offset[i] = rows.offset[row];
      }
    }
  }

  // What the sums of products start with, from a key on.
  INLINE auto starts(int i) const {
    if constexpr (P::kBytes) {
      return offset + i;
    } else {
      return P::kRounds ? nullptr : bias + i;  // the biases of rounded numbers are added to products times their factor
    }
  }
};

}  // namespace attendless::ATTENDLESS_ISA
