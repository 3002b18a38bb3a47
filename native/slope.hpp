// How values turn with keys inside the cells of a head, on average: H = Σ w (k - k̄)(v - v̄)ᵀ / Σ w, a matrix for each
// level of blur; and the way of its gradient back to keys, values and weights.
//
// Rows are taken kChunk at a time, as differences from their means. The means themselves need no gradient: inside a cell
// the weighted differences sum to 0.
#pragma once

#include "head.hpp"

namespace attendless::ATTENDLESS_ISA {

template <int W>
struct Slopes {
  using S = Simd<W>;
  using C = Channels<W>;
  using T = Tile<W, kGroup / W>;
  static_assert(T::kLanes == 16, "rows are padded to as much");

  const int width, value_width;  // of a head's keys; of its values, padded
  float *sums, *dk, *dv;         // [key channel][value channel], [row][channel], [row][channel]
  float *slope[2], *grad[2];     // as sums, of each level
  float **rows[2], **grad_rows[2];
  float *turned, *transposed;

  Slopes(Cursor& memory, int levels, int width, int values, bool backward)
      : width(width),
        value_width(padded(values)),
        sums(memory.floats(levels ? size() : 0)),
        dk(memory.floats(levels ? int64_t(kChunk) * padded(width) : 0)),
        dv(memory.floats(levels ? int64_t(kChunk) * value_width : 0)) {
    const bool gradients = backward && levels;
    for (int level = 0; level < 2; ++level) {
      slope[level] = memory.floats(level < levels ? size() : 0);
      rows[level] = memory.pointers<float*>(level < levels ? width + kGroup : 0);
      grad[level] = memory.floats(level < levels && gradients ? size() : 0);
      grad_rows[level] = memory.pointers<float*>(level < levels && gradients ? width + kGroup : 0);
    }
    turned = memory.floats(gradients ? int64_t(kChunk) * padded(width) : 0);
    transposed = memory.floats(gradients ? size() : 0);
  }

  INLINE int64_t size() const { return int64_t(padded(width)) * value_width; }

  // Rows of a table that differ from their means, gathered until there is a chunk of them.
  class Differences {
    const Slopes& slopes_;
    const KvTable& table_;

   public:
    int count = 0;
    int32_t row[kChunk];
    float weight[kChunk];

    INLINE Differences(const Slopes& slopes, const KvTable& table) : slopes_(slopes), table_(table) {}

    // Whether that makes a whole chunk.
    INLINE bool add(int at, int mean, float w) {
      difference(table_.key(at), table_.key(mean), w, padded(slopes_.width), slopes_.dk);
      difference(table_.value(at), table_.value(mean), 1.f, slopes_.value_width, slopes_.dv);
      row[count] = at;
      weight[count] = w;
      return ++count == kChunk;
    }

   private:
    INLINE void difference(const float* x, const float* mean, float factor, int length, float* to) const {
      to += int64_t(count) * length;
      for (int c = 0; c < length; c += W) S::store(to + c, (S::load(x + c) - S::load(mean + c)) * factor);
    }
  };

  void start() const { std::memset(sums, 0, sizeof(float) * size_t(size())); }

  // sums += Σ_r dk[r] dv[r]ᵀ
  void add(Differences& found) const {
    const float* row[kChunk];
    for (int r = 0; r < found.count; ++r) row[r] = dv + int64_t(r) * value_width;
    for (int d = 0; d < padded(width); d += 4) {
      Weigh<W>::template add<4>(row, dk + d, padded(width), found.count, sums + int64_t(d) * value_width, value_width);
    }
    found.count = 0;
  }

  void write(int level, float share) const {
    for (int d = 0; d < width + kGroup; ++d) rows[level][d] = slope[level] + int64_t(least(d, width - 1)) * value_width;
    for (int64_t i = 0; i < size(); i += W) S::store(slope[level] + i, S::load(sums + i) * share);
  }

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
  void add_gradient(int level, Differences& found, float share, float mean, const KvTable& grads) const {
    const int wide = padded(width);
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
