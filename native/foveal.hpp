// Foveal attention of one head. A tile of queries attends to the patches of its `budget` chosen cells exactly, and to
// the other cells as their means. Means of coarse cells (`parents`) replace the means of cells in regions without a
// chosen cell. Steps; the parts of a step run in parallel (schedule.hpp):
//     kPack      for each cell: pack its patches into the table; average them
//     kMeans     for each coarse cell: average its cells; transpose the means of the cells, for choosing
//     kSlopes    for each block of key channels: the first-order correction matrices H (slope.hpp), over all patches
//     kForward   for each group of kPrefix prefix queries: attend to all tokens
//                for each group of up to kTiles tiles: score the cells, choose; for each tile: list its rows, attend
//
// Table rows: [prefix tokens, patches in cell order, means of cells, means of coarse cells]. The bias of a mean is log2
// of the sum of its tokens' weights 2^bias: of their number, if there are no biases. For bf16, `means` holds the means
// in fp32: scores for choosing and differences from means are computed from these. Each mean is rounded once, for
// attending. For int8, each row also has its key as bytes.
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
  const int shares, together;  // maximum number of parts of a preparing step; tiles per part of kForward
  KvTable<P> rows;
  const KvTable<Single> means;  // fp32 means of cells, then of coarse cells; for fp32 these are rows of the table
  float* k_meanT;               // key means [groups of kGroup cells][channels][kGroup]
  const int levels;             // number of levels with first-order correction: 1 for cells, 2 with coarse cells
  const Slopes<W, P> slopes;
  using Differences = typename Slopes<W, P>::Differences;

  static int64_t table_rows(const Foveal& f) {
    return f.problem.tokens + f.image->cells.count + f.parents.count + 16;  // 16: biases are loaded in whole vectors
  }

  // Parts of the last step: prefix queries (they attend to all tokens) in groups of kPrefix, then tiles in groups of up
  // to kTiles, which choose cells together.
  static constexpr int kPrefix = 4, kTiles = T::kBlock;

  static int levels_of(const Foveal& f) { return f.order && f.attend ? 1 + (f.parents.count > 0) : 0; }

  struct Local {
    int32_t* list;  // table rows that a tile attends to
    Cursor attend;
    int32_t *sharp, *touched, *opened;  // flags of chosen cells; flags, then list, of coarse cells with a chosen cell
    int32_t *chosen, *index;            // [kTiles][budget]; scratch memory for Select, padded
    float *score, *mean[kTiles];        // [kTiles][cells padded to 16]; mean query of each tile
    float* centre;                      // int8: the vector that is subtracted from each key
    typename Slopes<W, P>::Word* dk;    // differences of a chunk of rows from their means: keys, then values
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

  // kPack: packs the tokens and computes the mean of each cell.
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

  // int8 keys are quantized as key - centre. The centre shifts all scores of a query by the same amount, so softmax is
  // unaffected. It approximates the mean of the keys, from at most kSampled tokens, so that a large common offset does
  // not use up the int8 range.
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

  // kMeans: the mean of each coarse cell, and the transposed means of the cells.
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

  // The weight of a row in its mean: 2^bias.
  static INLINE float weight(float bias) { return bias == 0.f ? 1.f : __builtin_exp2f(bias); }

  // means[mean] = the mean of rows part(0) … part(count - 1) of `table`, weighted by 2^bias. For bf16, also rounds it
  // into the table.
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

  // Calls `take` with chunks of weighted differences of rows from their means: patches from the mean of their cell
  // (level 0), or cells from the mean of their coarse cell (level 1).
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

  // 1 / Σ weights of all patches.
  INLINE float share_of_one() const {
    float total = 0.f;
    for (int cell = 0; cell < cells; ++cell) total += weight(means.bias[cell]);
    return total > 0.f ? 1.f / total : 1.f;
  }

  // kSlopes: the correction matrices of both levels. The differences inside a coarse cell are those of its patches from
  // their cells plus those of its cells from it, so level 1 continues the sums of level 0. A part is a block of key
  // channels, not of tokens: the order of each sum does not depend on the number of parts.
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

  // The caller's array of chosen cells, from `tile` on.
  INLINE int32_t* chosen_cells(int tile) const {
    const int64_t index = int64_t(head.image) * foveal.problem.heads + head.head;
    return foveal.chosen + (index * tiles + tile) * foveal.budget;
  }

  // Chooses the cells of tiles first … last - 1, at most kTiles. Tile::dot has cells as lanes and mean queries as rows,
  // so the scores of a tile are contiguous: score[tile][cell].
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

  // Writes the list of rows that a tile attends to and returns its length. Order: prefix tokens and patches of chosen
  // cells; then means of coarse cells without a chosen cell; then means of the other cells that are not chosen. `blurs`
  // receives the ranges of means. Means of cells without visible tokens are left out.
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
    // Branchless compaction, because `touched` is unpredictable.
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
    attend(tokens, local.list + first, least(kPrefix, prefix - first), Blurs<P>{});  // prefix token i is table row i
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

  // Backward of kSlopes. H of level 1 is H of level 0 plus its own sums, so its gradient is added to that of level 0.
  void unmake_slopes(const KvTable<P>& grads, const Local& local) const {
    const float share = share_of_one();
    Differences found(slopes, means, local.dk, local.dv, Slice(slopes.blocks(), 0, 1));
    for (int level = levels - 1; level >= 0; --level) {
      const float mean = slopes.prepare_gradient(level, level ? slopes.slope[0] : nullptr);
      differences(level, found, [&](Differences& chunk) { slopes.add_gradient(level, chunk, share, mean, grads); });
      for (int64_t i = 0; level && i < slopes.size(); ++i) slopes.grad[0][i] += slopes.grad[1][i];
    }
  }

  // Backward of the averaging: from coarse cells to cells to patches, then copies the gradients to the caller's
  // tensors.
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

  // Adds the gradient of a mean to one of its rows, times the share of the row in the mean.
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
