// Data structures of attention over a list of keys:
//     KvTable   packed keys, values and biases of one head; a list names its rows by number
//     Queries   pointers to up to kGroup queries that share a list, and to their results
//     Blur      a range of list positions whose rows are means, with their first-order correction matrix
//     Chunk     pointers to the next kChunk rows of a list
#pragma once

#include "scratch.hpp"
#include "words.hpp"

namespace attendless::ATTENDLESS_ISA {

constexpr int kChunk = 48;  // a multiple of every Tile::kBlock and of every W
constexpr int kGroup = 16;  // maximum number of queries in one tile of lanes
// Table size in words up to which the caches hold a table. Rows of larger tables are prefetched one chunk ahead; for
// smaller tables, prefetching costs a few per cent.
constexpr int64_t kCached = 4 << 20;

// Keys and values of one head, or their gradients. Keys are [rows][key channels], values [rows][value channels]; each
// row is padded with 0 to a multiple of 16 words.
template <class P>
struct KvTable {
  using Key = typename P::Key;
  using Value = typename P::Value;
  static constexpr bool kRounds = P::kRounds;
  Key* k;
  Value* v;
  float* bias;      // [rows]: bias · log2 e, because scores are in base 2; or the gradient of the bias
  uint8_t* bytes;   // int8 keys [rows][key channels padded to 16 words], with scale and offset per row (Byte only)
  float* scale;
  int32_t* offset;
  int width, value_width;
  bool distant;  // larger than kCached: rows are prefetched

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

  // The key operand of QKᵀ: int8 words for Byte, otherwise the key itself.
  INLINE typename WordOf<typename P::Score>::Word* score_words(int64_t row) const {
    using Word = typename WordOf<typename P::Score>::Word;
    if constexpr (P::kBytes) {
      return reinterpret_cast<Word*>(byte(row));
    } else {
      return reinterpret_cast<Word*>(key(row));
    }
  }

  // A view of the table that starts at `row`. Covers keys, values and biases, not bytes.
  INLINE KvTable from(int64_t row) const {
    KvTable rest = *this;
    rest.k = key(row);
    rest.v = value(row);
    rest.bias = bias + row;
    return rest;
  }
};

// Up to kGroup queries. The pointers refer to the caller's tensors or to copies in scratch memory (Aside in head.hpp).
template <class P>
struct Queries {
  using Word = typename WordOf<typename P::Key>::Word;
  int count;
  const Word* q[kGroup];  // bf16: rows are padded with 0 to a multiple of 16 words; fp32: not padded
  float *out[kGroup], *lse[kGroup];
  const float* out_grad[kGroup];
  float* q_grad[kGroup];

  // Forward pass only: at most `size` queries from `first` on. The last query is repeated up to `size`.
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

// A range of list positions, [begin, end), whose rows are means of many tokens, with their first-order correction: the
// result of query q increases by mass · scale · q H, where mass is the softmax weight of the range. `slope` points to
// the rows of H, [key channels][value channels]; `grad` points to its gradient in the backward pass. Both have one
// pointer per key channel and repeat the last one kGroup times, so that micro-kernels can take whole blocks.
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

// The next kChunk rows of a list. The last row is repeated, so that micro-kernels can take whole blocks.
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

  // Initial values of the QKᵀ accumulators, from key i on: biases for fp32, offsets for int8. For bf16 null (zeros).
  INLINE auto starts(int i) const {
    if constexpr (P::kBytes) {
      return offset + i;
    } else {
      return P::kRounds ? nullptr : bias + i;  // bf16 queries are not scaled: product · factor + bias comes later
    }
  }
};

}  // namespace attendless::ATTENDLESS_ISA
