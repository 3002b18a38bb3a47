// First-order correction matrices of foveal attention, and their gradients. H = Σ w (k - k̄)(v - v̄)ᵀ / Σ w is the
// covariance of keys and values inside the averaged cells of a head, one matrix [key channels][value channels] per
// level of averaging.
//
// Loop order: for each chunk of kChunk rows, gather the differences from their means (Differences); then, for each
// group of key channels, add their outer products by Weigh::add. Differences are rounded if values are bf16. In the
// backward pass, the means receive no gradient through H, because the weighted differences of a cell sum to 0.
#pragma once

#include "head.hpp"

namespace attendless::ATTENDLESS_ISA {

template <int W, class P>
struct Slopes {
  using S = Simd<W>;
  using C = Channels<W>;
  using T = Tile<W, kGroup / W>;
  using Value = typename P::Value;
  using N = Words<W, Value>;
  using Word = typename N::Word;
  static_assert(T::kLanes == 16, "rows are padded to as much");

  const int width, value_width;    // key channels; value channels, padded to 16
  float* sums;                     // Σ w (k - k̄)(v - v̄)ᵀ: [key channels padded to 16][value_width]
  Value *slope[2], **rows[2];      // H of each level, shaped like `sums`; pointers to its rows, as in Blur
  float *grad[2], **grad_rows[2];  // the gradient of H, in the same form
  float *turned, *transposed;      // backward: G (v - v̄) [kChunk][key channels]; Gᵀ [value_width][key channels]

  Slopes(Cursor& memory, int levels, int width, int values, bool backward)
      : width(width),
        value_width(padded(values)),
        sums(memory.floats(levels ? size() : 0)) {
    const bool gradients = backward && levels;
    for (int level = 0; level < 2; ++level) {
      slope[level] = reinterpret_cast<Value*>(memory.floats(level < levels ? size() / N::kNumbers : 0));
      rows[level] = memory.pointers<Value*>(level < levels ? width + kGroup : 0);
      grad[level] = memory.floats(level < levels && gradients ? size() : 0);
      grad_rows[level] = memory.pointers<float*>(level < levels && gradients ? width + kGroup : 0);
    }
    turned = memory.floats(gradients ? int64_t(kChunk) * padded(width) : 0);
    transposed = memory.floats(gradients ? size() : 0);
  }

  INLINE int64_t size() const { return int64_t(padded(width)) * value_width; }

  // Number of blocks of 16 key channels: the unit of parallel work.
  INLINE int blocks() const { return padded(width) / 16; }

  // A chunk of differences of rows from their means: some blocks of key channels, and all value channels.
  class Differences {
    const Slopes& slopes_;
    const KvTable<Single>& means_;

   public:
    Word* const dk;             // w (k - k̄): [words of rows][channels]; a word has kNumbers rows of one channel
    Value* const dv;            // v - v̄: [rows][value channels]
    const int first, channels;   // range of key channels
    int count = 0;
    int32_t row[kChunk];
    float weight[kChunk];

    INLINE Differences(const Slopes& slopes, const KvTable<Single>& means, Word* dk, Value* dv, const Slice& blocks)
        : slopes_(slopes),
          means_(means),
          dk(dk),
          dv(dv),
          first(blocks.begin * 16),
          channels((blocks.end - blocks.begin) * 16) {}

    // Appends row `at` of `rows` with weight `w`. `number` is its row in the gradient table. Returns whether the chunk
    // is full.
    template <class Table>
    INLINE bool add(const Table& rows, int at, int number, int mean, float w) {
      const auto* const key = rows.key(at) + first;
      const auto* const value = rows.value(at);
      const float *const mean_key = means_.key(mean) + first, *const mean_value = means_.value(mean);
      Word* const to = dk + int64_t(count / N::kNumbers) * channels;
      for (int c = 0; c < channels; c += W) put(to + c, (S::load(key + c) - S::load(mean_key + c)) * w);
      for (int c = 0; c < slopes_.value_width; c += W) {
        S::store(dv + int64_t(count) * slopes_.value_width + c, S::load(value + c) - S::load(mean_value + c));
      }
      row[count] = number;
      weight[count] = w;
      return ++count == kChunk;
    }

   private:
    // Writes the number of the current row into each word. An even row clears the other half of the word.
    INLINE void put(Word* to, typename S::F x) const {
      if constexpr (N::kNumbers == 1) {
        S::store(to, x);
      } else {
        const typename S::U half = (typename S::U)S::nearest_half(x);
        S::store(to, count % 2 ? S::load(to) | half : half >> 16);
      }
    }
  };

  // `start`, `add` and `write` process the key channels of `found`: clear the sums, add a chunk, write H = sums ·
  // share.
  void start(const Differences& found) const {
    std::memset(sums + at(found), 0, sizeof(float) * size_t(length(found)));
  }

  // sums += Σ_r dk[r] dv[r]ᵀ
  void add(Differences& found) const {
    using Rows = Weigh<W, Value>;
    const Value* row[kChunk];
    for (int r = 0; r < found.count; ++r) row[r] = found.dv + int64_t(r) * value_width;
    for (int d = 0; d < found.channels; d += Rows::kQueries) {
      Rows::template add<Rows::kQueries>(row, found.dk + d, found.channels, found.count,
                                         sums + at(found) + int64_t(d) * value_width, value_width);
    }
    found.count = 0;
  }

  void write(int level, const Differences& found, float share) const {
    for (int64_t i = at(found); i < at(found) + length(found); i += W) {
      S::store(slope[level] + i, S::load(sums + i) * share);
    }
    const bool last = found.first + found.channels >= width;
    for (int d = found.first; d < (last ? width + kGroup : found.first + found.channels); ++d) {
      rows[level][d] = slope[level] + int64_t(least(d, width - 1)) * value_width;
    }
  }

  INLINE int64_t at(const Differences& found) const { return int64_t(found.first) * value_width; }
  INLINE int64_t length(const Differences& found) const { return int64_t(found.channels) * value_width; }

  void start_gradient(int level) const {
    std::memset(grad[level], 0, sizeof(float) * size_t(size()));
    for (int d = 0; d < width + kGroup; ++d) {
      grad_rows[level][d] = grad[level] + int64_t(least(d, width - 1)) * value_width;
    }
  }

  // First part of the backward pass of a level: transposes G, the gradient of H, and returns Σ G · (H - minus). `minus`
  // is the H of the finer level or null.
  float prepare_gradient(int level, const float* minus) const {
    const int wide = padded(width);
    float sum = 0.f;
    for (int d = 0; d < width; ++d) {
      for (int e = 0; e < value_width; ++e) {
        const int64_t i = int64_t(d) * value_width + e;
        transposed[int64_t(e) * wide + d] = grad[level][i];
        sum += grad[level][i] * (slope[level][i] - (minus ? minus[i] : 0.f));
      }
    }
    for (int e = 0; e < value_width; ++e) {
      for (int d = width; d < wide; ++d) transposed[int64_t(e) * wide + d] = 0.f;
    }
    return sum;
  }

  // Adds the gradients of a chunk of rows, each times w · share, where share = 1 / Σ w. Keys: G (v - v̄). Values:
  // Gᵀ (k - k̄). Log-weights: (k - k̄)ᵀ G (v - v̄) - mean, with `mean` from prepare_gradient.
  void add_gradient(int level, Differences& found, float share, float mean,
                    const KvTable<Single>& grads) const {
    const int wide = padded(width);
    float *const dk = found.dk, *const dv = found.dv;
    float *keys[kChunk], *values[kChunk];
    for (int r = 0; r < found.count; ++r) {
      keys[r] = turned + int64_t(r) * wide;
      values[r] = grads.value(found.row[r]);
    }
    std::memset(turned, 0, sizeof(float) * size_t(kChunk) * wide);
    for (int64_t i = 0; i < int64_t(found.count) * wide; i += W) S::store(dk + i, S::load(dk + i) * share);
    float some[kChunk * 16];  // 16 channels of a chunk: [kChunk][16]
    const auto sixteen = [&](const float* from, int length) {
      for (int r = 0; r < found.count; ++r) C::copy(some + r * 16, from + int64_t(r) * length, 16);
      return some;
    };
    for (int e = 0; e < value_width; e += 16) {
      T::scatter(keys, sixteen(dv + e, value_width), found.count, false, transposed + int64_t(e) * wide, 16, wide);
    }
    for (int d = 0; d < width; d += 16) {
      T::scatter(values, sixteen(dk + d, wide), found.count, false, grad[level] + int64_t(d) * value_width,
                 least(16, width - d), value_width);
    }
    for (int r = 0; r < found.count; ++r) {
      float along = 0.f;
      for (int d = 0; d < width; ++d) along += dk[int64_t(r) * wide + d] * keys[r][d];
      grads.bias[found.row[r]] += along - found.weight[r] * share * mean;
      C::add(grads.key(found.row[r]), keys[r], found.weight[r] * share, wide);
    }
    found.count = 0;
  }
};

}  // namespace attendless::ATTENDLESS_ISA
