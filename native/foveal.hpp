// Foveal attention of one head: pool keys and values by cells, let each tile of queries choose its cells, list the
// rows it sees, attend.
//
// Rows of the table: prefix tokens, patches cell by cell (so that a cell is contiguous), the mean of each cell, the mean
// of each coarse cell. A mean's bias is the log of the tokens it stands for. Where rows are rounded to bfloat16, means
// are computed, chosen by and subtracted in floats, and rounded once. Where scores are products of bytes, each row has
// its key as bytes too.
#pragma once

#include "select.hpp"
#include "slope.hpp"

namespace attendless::ATTENDLESS_ISA {

template <int W, class P>
struct FovealHead {
  using Args = Foveal;
  using Numbers = P;
  using T = Tile<W, kGroup / W>;
  using C = Channels<W>;

  const Foveal& foveal;
  const Head head;
  const Image& image;
  const int tokens, prefix, cells, tiles, parents;
  const int shares, together;  // parts of a step that prepares, at most; tiles in a part of the last step
  KvTable<P> rows;
  const KvTable<Single> means;  // of the cells and of the coarse cells: rows of the table, or what was rounded to them
  float* k_meanT;               // of the cells in groups, channels first
  const int levels;
  const Slopes<W, P> slopes;  // of the cells and of the coarse cells
  using Differences = typename Slopes<W, P>::Differences;

  static int64_t table_rows(const Foveal& f) {
    return f.problem.tokens + f.image->cells.count + f.parents.count + 16;  // 16: biases are read in whole vectors
  }

  // Prefix queries, which see every token, a few at a time; then the tiles, as many at a time as choose together.
  static constexpr int kPrefix = 4, kTiles = T::kBlock;

  static int levels_of(const Foveal& f) { return f.order && f.attend ? 1 + (f.parents.count > 0) : 0; }

  struct Local {
    int32_t* list;  // of the rows a tile sees
    Cursor attend;
    int32_t *sharp, *touched, *opened;  // cells chosen, as flags; coarse cells with one of them, as flags and as a list
    int32_t *chosen, *index;            // cells of kTiles tiles; of one, with room for what Select writes beyond
    float *score, *mean[kTiles];        // of the cells and of the queries, for each of kTiles tiles
    float* centre;                      // of the keys, where they become bytes
    typename Slopes<W, P>::Word* dk;    // differences of a chunk of rows from their means
    typename P::Value* dv;

    Local(const Foveal& f, Cursor& memory)
        : list(memory.ints(table_rows(f))),
          attend(memory.part(attend_scratch<W, P>(f.problem))),
          sharp(memory.ints(f.image->cells.count)),
          touched(memory.ints(f.parents.count)),
          opened(memory.ints(f.parents.count + 1)),
          chosen(memory.ints(int64_t(kTiles) * f.budget)),
          index(memory.ints(padded(f.image->cells.count) + 8)),
          score(memory.floats(int64_t(kTiles) * padded(f.image->cells.count))),
          centre(memory.floats(P::kBytes ? padded(f.problem.k.width) : 0)),
          dk(reinterpret_cast<decltype(dk)>(memory.floats(levels_of(f) ? int64_t(kChunk) * padded(f.problem.q.width) : 0))),
          dv(reinterpret_cast<decltype(dv)>(memory.floats(levels_of(f) ? int64_t(kChunk) * padded(f.problem.v.width) : 0))) {
      for (int i = 0; i < kTiles; ++i) mean[i] = memory.floats(f.problem.q.width);
    }
  };

  FovealHead(const Foveal& f, int image_index, int head_index, Cursor& memory)
      : foveal(f),
        head{f.problem, image_index, head_index},
        image(f.image[f.images > 1 ? image_index : 0]),
        tokens(f.problem.tokens),
        prefix(f.prefix),
        cells(image.cells.count),
        tiles(image.tiles.count),
        parents(f.parents.count),
        shares(parts_of_head(f.problem)),
        together(least(kTiles, 1 + (tiles - 1) / shares)),
        rows(memory, table_rows(f), f.problem.q.width, f.problem.v.width),
        means(means_of(rows, memory)),
        k_meanT(memory.floats(int64_t(padded(cells)) * rows.width)),
        levels(levels_of(f)),
        slopes(memory, levels, f.problem.q.width, f.problem.v.width, f.problem.out_grad.data != nullptr) {}

  enum { kPack, kMeans, kSlopes, kForward, kSteps };

  int parts(int step) const {
    if (step == kPack) return shares;
    if (step == kMeans) return parents || foveal.select ? shares : 0;
    if (step == kSlopes) return levels ? least(shares, slopes.blocks()) : 0;
    return prefix_parts() + (tiles + together - 1) / together;
  }

  void work(int step, int part, const Local& local) const {
    if (step == kPack) return pack(part, local);
    if (step == kMeans) return make_means(part, local);
    if (step == kSlopes) return make_slopes(part, local);
    const auto attend = [&](int keys, const int32_t* token, int count, const Blurs<P>& blurs) {
      attend_all<W, P>(head, rows, local.list, keys, token, count, local.attend, blurs);
    };
    if (part < prefix_parts()) return visit_prefix(part * kPrefix, local, attend);
    const int first = (part - prefix_parts()) * together, last = least(first + together, tiles);
    int32_t* const chosen = foveal.chosen ? chosen_cells(first) : local.chosen;
    if (foveal.select) choose(first, last, chosen, local);
    for (int tile = first; tile < last && foveal.attend; ++tile) {
      visit(tile, chosen + int64_t(tile - first) * foveal.budget, local, attend);
    }
  }

  int prefix_parts() const { return foveal.attend ? (prefix + kPrefix - 1) / kPrefix : 0; }

  void backward(const KvTable<P>& grads, const Local& local) const {
    const auto attend = [&](int keys, const int32_t* token, int count, const Blurs<P>& blurs) {
      attend_all_backward<W>(head, rows, grads, local.list, keys, token, count, local.attend, blurs);
    };
    for (int level = 0; level < levels; ++level) slopes.start_gradient(level);
    for (int first = 0; first < prefix; first += kPrefix) visit_prefix(first, local, attend);
    for (int tile = 0; tile < tiles; ++tile) visit(tile, chosen_cells(tile), local, attend);
    unpool(grads, local);
  }

  // Table -----------------------------------------------------------------------------------------------------------

  // Tokens, and the mean of each cell.
  void pack(int part, const Local& local) const {
    find_centre(local);
    for (int i = 0; i < prefix && part == 0; ++i) {
      pack_token<W, P>(head, rows, i, i);
      put_bytes(i, local);
    }
    const Slice some(cells, part, shares);
    for (int cell = some.begin; cell < some.end; ++cell) {
      const int begin = image.cells.start[cell], end = image.cells.start[cell + 1];
      for (int i = begin; i < end; ++i) {
        prefetch_token(head, image.cells.member[least(i + kAhead, tokens - prefix - 1)]);
        pack_token<W, P>(head, rows, prefix + i, image.cells.member[i]);
        put_bytes(prefix + i, local);
      }
      pool(cell, end - begin, rows.from(prefix), [&](int i) { return begin + i; });
      put_bytes(tokens + cell, local);
    }
  }

  // Bytes hold keys less a vector that is the same for all, which adds the same to every score of a query: nearly their
  // mean, of at most kSampled tokens, so that large means do not cost small differences their accuracy.
  static constexpr int kSampled = 64;
  INLINE void find_centre([[maybe_unused]] const Local& local) const {
    if constexpr (P::kBytes) {
      const int step = (tokens + kSampled - 1) / kSampled, count = (tokens + step - 1) / step;
      const View& k = foveal.problem.k;
      std::memset(local.centre, 0, sizeof(float) * padded(k.width));
      head.at(k, 0, [&](const auto* first) {
        C::sum(local.centre, count, k.width, [&](int i) { return first + int64_t(i) * step * k.token; },
               [&](int) { return 1.f / float(count); });
      });
    }
  }
  INLINE void put_bytes([[maybe_unused]] int row, [[maybe_unused]] const Local& local) const {
    if constexpr (P::kBytes) Bytes<W>::put(rows, row, local.centre);
  }

  // The mean of each coarse cell; the cells' for choosing.
  void make_means(int part, const Local& local) const {
    const Slice some(parents, part, shares);
    if (some.begin < some.end) find_centre(local);
    for (int parent = some.begin; parent < some.end; ++parent) {
      const int begin = foveal.parents.start[parent], end = foveal.parents.start[parent + 1];
      pool(cells + parent, end - begin, means, [&](int i) { return foveal.parents.member[begin + i]; });
      put_bytes(tokens + cells + parent, local);
    }
    if (foveal.select) transpose_means(Slice((cells + kGroup - 1) / kGroup, part, shares));
  }

  INLINE KvTable<Single> means_of(const KvTable<P>& all, Cursor& memory) const {
    if constexpr (P::kRounds) {
      return KvTable<Single>(memory, cells + parents + 16, all.width, all.value_width);
    } else {
      return all.from(tokens);
    }
  }

  static INLINE float weight(float bias) { return bias == 0.f ? 1.f : __builtin_exp2f(bias); }

  // The row `mean` becomes the mean of a table's rows part(0), part(1), …, each with the weight its bias gives it.
  template <class Table, class Part>
  INLINE void pool(int mean, int count, const Table& table, Part part) const {
    float total = 0.f;
    for (int i = 0; i < count; ++i) total += weight(table.bias[part(i)]);
    const float share = total > 0.f ? 1.f / total : 1.f;
    const auto factor = [&](int i) { return weight(table.bias[part(i)]) * share; };
    C::sum(means.key(mean), count, padded(rows.width), [&](int i) { return table.key(part(i)); }, factor);
    C::sum(means.value(mean), count, padded(rows.value_width), [&](int i) { return table.value(part(i)); }, factor);
    means.bias[mean] = __builtin_log2f(total);
    if constexpr (P::kRounds) {
      C::copy_padded(rows.key(tokens + mean), means.key(mean), rows.width);
      C::copy_padded(rows.value(tokens + mean), means.value(mean), rows.value_width);
      rows.bias[tokens + mean] = means.bias[mean];
    }
  }

  // Every row that differs from its mean, with its weight, to `take`, a chunk at a time: patches from their cells, or
  // cells from their coarse cells.
  template <class Take>
  INLINE void differences(int level, Differences& found, Take take) const {
    const auto add = [&](const auto& table, int row, int number, int mean) {
      if (found.add(table, row, number, mean, weight(table.bias[row]))) take(found);
    };
    if (level == 0) {
      for (int cell = 0; cell < cells; ++cell) {
        for (int i = image.cells.start[cell]; i < image.cells.start[cell + 1]; ++i) add(rows, prefix + i, prefix + i, cell);
      }
    } else {
      for (int cell = 0; cell < cells; ++cell) add(means, cell, tokens + cell, cells + foveal.parent[cell]);
    }
    if (found.count) take(found);
  }

  // Of all patches: one over the sum of their weights.
  INLINE float share_of_one() const {
    float total = 0.f;
    for (int cell = 0; cell < cells; ++cell) total += weight(means.bias[cell]);
    return total > 0.f ? 1.f / total : 1.f;
  }

  // What differs inside a coarse cell: its patches from their cells, and these from each other. Each part has some of
  // the key channels, so that every sum is taken in one order.
  void make_slopes(int part, const Local& local) const {
    const float share = share_of_one();
    const Slice some(slopes.blocks(), part, parts(kSlopes));
    Differences found(slopes, means, local.dk, local.dv, some);
    slopes.start(found);
    for (int level = 0; level < levels; ++level) {
      differences(level, found, [&](Differences& chunk) { slopes.add(chunk); });
      slopes.write(level, found, share);
    }
  }

  // Choosing --------------------------------------------------------------------------------------------------------

  void transpose_means(const Slice& groups) const {
    for (int first = groups.begin * kGroup; first < groups.end * kGroup; first += kGroup) {
      const float* row[kGroup];
      const int count = least(kGroup, cells - first);
      for (int i = 0; i < kGroup; ++i) row[i] = means.key(first + least(i, count - 1));
      T::gather(row, count, rows.width, 1.f, k_meanT + int64_t(first) * rows.width);
    }
  }

  INLINE void average_queries(int tile, float* mean) const {
    const int begin = image.tiles.start[tile], end = image.tiles.start[tile + 1];
    const float share = foveal.problem.scale / float(end - begin);
    const View& q = foveal.problem.q;
    head.at(q, 0, [&](const auto* first) {
      const auto query = [&](int i) { return first + image.tiles.member[begin + i] * q.token; };
      C::sum(mean, end - begin, rows.width, query, [&](int) { return share; });
    });
  }

  // The caller's, from a tile on.
  INLINE int32_t* chosen_cells(int tile) const {
    const int64_t index = int64_t(head.image) * foveal.problem.heads + head.head;
    return foveal.chosen + (index * tiles + tile) * foveal.budget;
  }

  // The cells of the tiles from `first` to `last`, kTiles at most: lanes are cells here, so that each tile's scores come
  // out as a row.
  void choose(int first, int last, int32_t* chosen, const Local& local) const {
    const int length = padded(cells);
    float* const score = local.score;
    for (int i = 0; first + i < last; ++i) average_queries(first + i, local.mean[i]);
    const float* mean[kTiles];
    for (int i = 0; i < kTiles; ++i) mean[i] = local.mean[least(i, last - first - 1)];
    for (int cell = 0; cell < cells; cell += kGroup) {
      T::dot(mean, nullptr, k_meanT + int64_t(cell) * rows.width, rows.width, score + cell, length);
    }
    for (int i = 0; first + i < last; ++i) {
      const int32_t* const own = foveal.own.member + foveal.own.start[first + i];
      const int owned = foveal.own.start[first + i + 1] - foveal.own.start[first + i];
      Select<W>::largest(score + int64_t(i) * length, rows.bias + tokens, cells, own, owned, foveal.budget,
                         local.index, chosen + int64_t(i) * foveal.budget);
    }
  }

  // Attending -------------------------------------------------------------------------------------------------------

  INLINE bool seen(int row) const { return rows.bias[row] != -kInfinity; }

  // The rows a tile sees: how many, and which of them are blurs.
  int list_rows(const int32_t* chosen, const Local& local, Blurs<P>& blurs) const {
    int32_t *const list = local.list, *const sharp = local.sharp;
    int32_t *const touched = local.touched, *const opened = local.opened;
    int n = 0;
    for (int i = 0; i < prefix; ++i) list[n++] = i;
    for (int m = 0; m < foveal.budget; ++m) {
      const int begin = image.cells.start[chosen[m]], end = image.cells.start[chosen[m] + 1];
      for (int i = begin; i < end; ++i) list[n++] = prefix + i;
    }
    const int sharp_rows = n;
    const auto blurred = [&](int level, int begin, int end) {
      if (levels && begin < end) blurs.at[blurs.count++] = {begin, end, slopes.rows[level], slopes.grad_rows[level]};
    };
    if (!parents) {
      int next = 0;
      for (int m = 0; m <= foveal.budget; ++m) {
        const int stop = m < foveal.budget ? chosen[m] : cells;
        for (; next < stop; ++next) {
          list[n] = tokens + next;
          n += seen(tokens + next);
        }
        ++next;
      }
      blurred(0, sharp_rows, n);
      return n;
    }
    std::memset(sharp, 0, sizeof(int32_t) * cells);
    std::memset(touched, 0, sizeof(int32_t) * parents);
    for (int m = 0; m < foveal.budget; ++m) {
      sharp[chosen[m]] = 1;
      touched[foveal.parent[chosen[m]]] = 1;
    }
    // Counting instead of branching: which are touched is hard to predict.
    int open = 0;
    for (int parent = 0; parent < parents; ++parent) {
      list[n] = tokens + cells + parent;
      n += !touched[parent] & seen(list[n]);
      opened[open] = parent;
      open += touched[parent];
    }
    const int coarse_rows = n;
    for (int o = 0; o < open; ++o) {
      const int end = foveal.parents.start[opened[o] + 1];
      for (int i = foveal.parents.start[opened[o]]; i < end; ++i) {
        const int cell = foveal.parents.member[i];
        list[n] = tokens + cell;
        n += !sharp[cell] & seen(list[n]);
      }
    }
    blurred(1, sharp_rows, coarse_rows);
    blurred(0, coarse_rows, n);
    return n;
  }

  template <class Visit>
  INLINE void visit_prefix(int first, const Local& local, Visit attend) const {
    for (int i = 0; i < tokens; ++i) local.list[i] = i;
    attend(tokens, local.list + first, least(kPrefix, prefix - first), Blurs<P>{});  // tokens and rows: the same numbers
  }

  template <class Visit>
  INLINE void visit(int tile, const int32_t* chosen, const Local& local, Visit attend) const {
    const int begin = image.tiles.start[tile], end = image.tiles.start[tile + 1];
    for (int i = begin; i < end; ++i) {
      head.at(foveal.problem.q, image.tiles.member[i], [&](const auto* query) { prefetch(query, rows.width); });
    }
    Blurs<P> blurs;
    const int keys = list_rows(chosen, local, blurs);
    attend(keys, image.tiles.member + begin, end - begin, blurs);
  }

  // Gradients -------------------------------------------------------------------------------------------------------

  // The coarse slope is made of the finer one and of what it adds, so its gradient goes to both.
  void unmake_slopes(const KvTable<P>& grads, const Local& local) const {
    const float share = share_of_one();
    Differences found(slopes, means, local.dk, local.dv, Slice(slopes.blocks(), 0, 1));
    for (int level = levels - 1; level >= 0; --level) {
      const float mean = slopes.prepare_gradient(level, level ? slopes.slope[0] : nullptr);
      differences(level, found, [&](Differences& chunk) { slopes.add_gradient(level, chunk, share, mean, grads); });
      for (int64_t i = 0; level && i < slopes.size(); ++i) slopes.grad[0][i] += slopes.grad[1][i];
    }
  }

  void unpool(const KvTable<P>& grads, const Local& local) const {
    unmake_slopes(grads, local);
    for (int parent = 0; parent < parents; ++parent) {
      for (int i = foveal.parents.start[parent]; i < foveal.parents.start[parent + 1]; ++i) {
        drain(grads, tokens + foveal.parents.member[i], tokens + cells + parent);
      }
    }
    for (int i = 0; i < prefix; ++i) unpack_gradient<W>(head, grads, i, i);
    for (int cell = 0; cell < cells; ++cell) {
      for (int i = image.cells.start[cell]; i < image.cells.start[cell + 1]; ++i) {
        drain(grads, prefix + i, tokens + cell);
        unpack_gradient<W>(head, grads, prefix + i, image.cells.member[i]);
      }
    }
  }

  // A mean's gradient goes back to a row it was poured from, by its share in the mean.
  INLINE void drain(const KvTable<P>& grads, int row, int mean) const {
    if (!seen(mean)) return;
    const float share = __builtin_exp2f(rows.bias[row] - rows.bias[mean]);
    const int width = padded(rows.width), value_width = padded(rows.value_width);
    C::add(grads.key(row), grads.key(mean), share, width);
    C::add(grads.value(row), grads.value(mean), share, value_width);
    grads.bias[row] += share * (grads.bias[mean] +
                                C::dot_difference(grads.key(mean), rows.key(row), rows.key(mean), width) +
                                C::dot_difference(grads.value(mean), rows.value(row), rows.value(mean), value_width));
  }
};

}  // namespace attendless::ATTENDLESS_ISA
