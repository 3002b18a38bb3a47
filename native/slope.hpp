// How values turn with keys inside the cells of a head, on average: H = Σ w (k - k̄)(v - v̄)ᵀ / Σ w, a matrix for each
// level of blur; and the way of its gradient back to keys, values and weights.
//
// Rows are taken kChunk at a time, as differences from their means. The means themselves need no gradient: inside a cell
// the weighted differences sum to 0.
#pragma once

#include "head.hpp"

namespace attendless::ATTENDLESS_ISA {

template <int W, class P>
struct Slopes {
  using S = Simd<W>;
  using C = Channels<W>;
  using T = Tile<W, kGroup / W>;
  static_assert(T::kLanes == 16, "rows are padded to as much");

  const int width, value_width;  // of a head's keys; of its values, padded
  float* sums;                   // [key channel][value channel]
  float *slope[2], *grad[2];     // as sums, of each level
  Bf16* rounded[2];
  typename P::Value** rows[2];   // of each level's slope; rounded, if values are
  float** grad_rows[2];
  float *turned, *transposed;

  Slopes(Cursor& memory, int levels, int width, int values, bool backward)
      : width(width),
        value_width(padded(values)),
        sums(memory.floats(levels ? size() : 0)) {
    const bool gradients = backward && levels;
    for (int level = 0; level < 2; ++level) {
      slope[level] = memory.floats(level < levels ? size() : 0);
      rows[level] = memory.pointers<typename P::Value*>(level < levels ? width + kGroup : 0);
      rounded[level] = reinterpret_cast<Bf16*>(memory.floats(level < levels && P::kRounds ? size() / 2 : 0));
      grad[level] = memory.floats(level < levels && gradients ? size() : 0);
      grad_rows[level] = memory.pointers<float*>(level < levels && gradients ? width + kGroup : 0);
    }
    turned = memory.floats(gradients ? int64_t(kChunk) * padded(width) : 0);
    transposed = memory.floats(gradients ? size() : 0);
  }

  INLINE int64_t size() const { return int64_t(padded(width)) * value_width; }

  // Key channels come in blocks of 16.
  INLINE int blocks() const { return padded(width) / 16; }

  // Rows of a table that differ from their means, gathered until there is a chunk of them: some blocks of key channels
  // and all value channels.
  class Differences {
    const Slopes& slopes_;
    const KvTable<Single>& means_;

   public:
    float *const dk, *const dv;  // [row][channel]
    const int first, channels;   // of the keys
    int count = 0;
    int32_t row[kChunk];
    float weight[kChunk];

    INLINE Differences(const Slopes& slopes, const KvTable<Single>& means, float* dk, float* dv, const Slice& blocks)
        : slopes_(slopes),
          means_(means),
          dk(dk),
          dv(dv),
          first(blocks.begin * 16),
          channels((blocks.end - blocks.begin) * 16) {}

    // Row `at` of the table `rows`, whose number among all is `number`. Whether that makes a whole chunk.
    template <class Table>
    INLINE bool add(const Table& rows, int at, int number, int mean, float w) {
      difference(rows.key(at) + first, means_.key(mean) + first, w, channels, dk);
      difference(rows.value(at), means_.value(mean), 1.f, slopes_.value_width, dv);
      row[count] = number;
      weight[count] = w;
      return ++count == kChunk;
    }

   private:
    template <class Number>
    INLINE void difference(const Number* x, const float* mean, float factor, int length, float* to) const {
      to += int64_t(count) * length;
      for (int c = 0; c < length; c += W) S::store(to + c, (S::load(x + c) - S::load(mean + c)) * factor);
    }
  };

  // Each of these for the key channels that `found` has.
  void start(const Differences& found) const {
    std::memset(sums + at(found), 0, sizeof(float) * size_t(length(found)));
  }

  // sums += Σ_r dk[r] dv[r]ᵀ
  void add(Differences& found) const {
    const float* row[kChunk];
    for (int r = 0; r < found.count; ++r) row[r] = found.dv + int64_t(r) * value_width;
    for (int d = 0; d < found.channels; d += 4) {
      Weigh<W>::template add<4>(row, found.dk + d, found.channels, found.count,
                                sums + at(found) + int64_t(d) * value_width, value_width);
    }
    found.count = 0;
  }

  void write(int level, const Differences& found, float share) const {
    for (int64_t i = at(found); i < at(found) + length(found); i += W) {
      S::store(slope[level] + i, S::load(sums + i) * share);
      if constexpr (P::kRounds) S::store(rounded[level] + i, S::load(slope[level] + i));
    }
    const bool last = found.first + found.channels >= width;
    for (int d = found.first; d < (last ? width + kGroup : found.first + found.channels); ++d) {
      const int64_t row = int64_t(least(d, width - 1)) * value_width;
      if constexpr (P::kRounds) {
        rows[level][d] = rounded[level] + row;
      } else {
        rows[level][d] = slope[level] + row;
      }
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

  // Before gradients of a level go back to rows: Σ gradient · H, in which `minus` is left out.
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

  // The gradient of a level goes back to the rows found: to keys G dv, to values Gᵀ dk, to log-weights dk G dv - mean,
  // each by the row's `share` of all weights.
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
    float some[kChunk * 16];  // a chunk's channels, 16 at a time
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
