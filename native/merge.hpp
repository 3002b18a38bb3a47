// Token merging, as defined in sparse/merging.py. Each source patch is matched with the most similar target, and the
// `merged` sources with the largest similarity are averaged into their targets.
//
// Stages; the pieces of a stage run in parallel, with a barrier after each stage:
//     divide   per image: divides patches into sources and targets
//     sum      per image: sums the keys over the heads (only if there are several heads)
//     match    per block of sources: most similar target (nearest.hpp)
//     choose   per image: the sources that merge; sizes, cells and owners of the remaining patches
//     join     per block of output rows: copies a token, or averages a target with its sources
// If there are at least as many images as threads, every piece is one image.
#pragma once

#include "nearest.hpp"
#include "kernels.hpp"
#include "memory.hpp"
#include "parallel.hpp"
#include "select.hpp"

namespace attendless::ATTENDLESS_ISA {

template <int W>
class MergeRun {
  using S = Simd<W>;
  using F = typename S::F;

  static constexpr float kLongest = 2.f;      // maximum factor by which a mean is lengthened
  static constexpr float kHeaviest = 1e6f;    // maximum weight in a mean
  static constexpr int kFewest = 128;         // minimum number of sources per piece: each piece packs all targets again
  static constexpr int kFewestFloats = 1 << 16;  // minimum output floats per piece: as expensive as waking a thread

  // The decisions about one image. Sources and targets are numbered from 0, in the order of their patches.
  struct Image {
    int32_t *source, *target;  // [sources], [targets]: their patches, ascending
    float* likeness;           // [sources]: similarity of a source and its partner
    int32_t* partner;          // [sources]: the target of a source
    int32_t* place;            // [patches]: index of a patch, or of its target, among the remaining patches
    int32_t* stay;             // the sources that are not merged
    int32_t* first;            // [targets]: linked list of merged sources: the first one, or -1
    int32_t* next;             // [sources]: the next source of the same target, or -1

    INLINE Image(const Merge& args, Cursor& memory) {
      const int sources = args.sources, targets = args.patches - sources;
      source = memory.ints(sources);
      target = memory.ints(targets);
      likeness = memory.floats(padded(sources));
      partner = memory.ints(sources);
      place = memory.ints(args.patches);
      stay = memory.ints(sources);
      first = memory.ints(targets);
      next = memory.ints(sources);
    }
  };

  // Scratch memory of a thread.
  struct Local {
    mutable Alike<W> alike;
    int32_t *a, *b;              // sources and targets, sorted by window
    int32_t *start_a, *start_b;  // [windows + 1]: start of each window in `a` and `b`
    float *score, *zeros;        // inputs of Select: scores, biases
    int32_t *found, *chosen;     // outputs of Select

    INLINE Local(const Merge& args, Cursor& memory) : alike(args.keys.width, args.patches - args.sources, memory) {
      const int sources = args.sources, windows = args.window ? windows_of(args) : 0;
      const int most = args.by_importance ? args.patches : sources;  // maximum number of scores for Select
      a = memory.ints(sources);
      b = memory.ints(args.patches - sources);
      start_a = memory.ints(windows + 1);
      start_b = memory.ints(windows + 1);
      score = memory.floats(padded(most));
      zeros = memory.floats(padded(most));
      found = memory.ints(padded(most) + 8);
      chosen = memory.ints(most);
    }
  };

  using Stage = void (MergeRun::*)(int piece, const Local& local);

  const Merge& args_;
  const int tokens_, sources_, targets_, stays_, threads_;
  int match_pieces_, join_pieces_;  // pieces per image
  int64_t image_, local_;           // sizes in floats
  float *images_, *locals_;
  float* keys_;  // [batch, patches, channels]: keys summed over the heads; null for a single head
  Stage stage_;
  int pieces_, taken_;

 public:
  explicit MergeRun(const Merge& args)
      : args_(args),
        tokens_(args.prefix + args.patches),
        sources_(args.sources),
        targets_(args.patches - sources_),
        stays_(sources_ - args.merged),
        threads_(args.threads) {
    const bool alone = args.batch >= threads_;
    match_pieces_ = alone || args.window ? 1 : pieces_of(sources_, kFewest);
    join_pieces_ = alone ? 1 : pieces_of(tokens_ - args.merged, kFewestFloats / args.x.width + 1);
    image_ = counted([&](Cursor& memory) { Image(args, memory); });
    local_ = counted([&](Cursor& memory) { Local(args, memory); });
    const int64_t floats = counted([&](Cursor& memory) { lay_out(memory); });
    const Memory memory(floats);
    Cursor all(memory.data(), floats);
    lay_out(all);
    each(1, &MergeRun::divide);
    if (args.merged && args.heads > 1) each(1, &MergeRun::sum);
    if (args.merged) each(match_pieces_, &MergeRun::match);
    each(1, &MergeRun::choose);
    each(join_pieces_, &MergeRun::join);
  }

 private:
  int pieces_of(int count, int fewest) const {
    const int most = (count + fewest - 1) / fewest;
    return most > 1 ? least(4 * threads_, most) : 1;
  }

  void lay_out(Cursor& memory) {
    images_ = memory.floats(image_ * args_.batch);
    locals_ = memory.floats(local_ * threads_);
    keys_ = args_.heads > 1 ? memory.floats(int64_t(args_.batch) * args_.patches * args_.keys.width) : nullptr;
  }

  Image image(int number) const {
    Cursor memory(images_ + number * image_, image_);
    return Image(args_, memory);
  }

  // Runs a stage with `pieces` pieces per image on all threads.
  void each(int pieces, Stage stage) {
    stage_ = stage;
    pieces_ = pieces * args_.batch;
    taken_ = 0;
    run_parallel(least(threads_, pieces_), [](void* run, int rank) { static_cast<MergeRun*>(run)->work(rank); }, this);
  }

  void work(int rank) {
    Cursor memory(locals_ + rank * local_, local_);
    const Local local(args_, memory);
    for (int piece; (piece = __atomic_fetch_add(&taken_, 1, __ATOMIC_RELAXED)) < pieces_;) (this->*stage_)(piece, local);
  }

  // Dividing ----------------------------------------------------------------------------------------------------------

  void divide(int number, const Local& local) {
    const Image image = this->image(number);
    if (!args_.by_importance) {
      for (int i = 0; i < sources_; ++i) image.source[i] = 2 * i + 1;
      for (int j = 0; j < targets_; ++j) image.target[j] = 2 * j;
      return;
    }
    std::memcpy(local.score, args_.importance + int64_t(number) * tokens_ + args_.prefix, sizeof(float) * args_.patches);
    select(local, local.score, args_.patches, targets_);
    for (int patch = 0, j = 0; patch < args_.patches; ++patch) {
      if (j < targets_ && local.chosen[j] == patch) {
        image.target[j++] = patch;
      } else {
        image.source[patch - j] = patch;
      }
    }
  }

  // Writes the indices of the `budget` largest scores to `local.chosen`, ascending.
  static void select(const Local& local, float* score, int count, int budget) {
    std::memset(local.zeros, 0, sizeof(float) * padded(count));
    Select<W>::largest(score, local.zeros, count, nullptr, 0, budget, local.found, local.chosen);
  }

  // Matching ----------------------------------------------------------------------------------------------------------

  const float* key(int image, int patch) const {
    return keys_ ? keys_ + (int64_t(image) * args_.patches + patch) * args_.keys.width : key(image, patch, 0);
  }
  const float* key(int image, int patch, int head) const {
    const View& keys = args_.keys;
    const float* const data = static_cast<const float*>(keys.data);
    return data + image * keys.batch + head * keys.head + (args_.prefix + patch) * keys.token;
  }

  // Sums the keys of an image over the heads. The cosine of sums equals the cosine of means.
  void sum(int number, const Local&) {
    const int width = args_.keys.width;
    for (int patch = 0; patch < args_.patches; ++patch) {
      float* const to = keys_ + (int64_t(number) * args_.patches + patch) * width;
      std::memcpy(to, key(number, patch, 0), sizeof(float) * width);
      for (int head = 1; head < args_.heads; ++head) {
        const float* const from = key(number, patch, head);
        int c = 0;
        for (; c + W <= width; c += W) S::store(to + c, S::load(to + c) + S::load(from + c));
        for (; c < width; ++c) to[c] += from[c];
      }
    }
  }
  int cell(int image, int patch) const {
    return args_.cells ? int(args_.cells[int64_t(image) * args_.patches + patch]) : patch;
  }

  void match(int piece, const Local& local) {
    const int number = piece / match_pieces_, part = piece % match_pieces_;
    const Image image = this->image(number);
    const int from = int(int64_t(sources_) * part / match_pieces_);
    const int to = int(int64_t(sources_) * (part + 1) / match_pieces_);
    for (int i = from; i < to; ++i) {
      image.likeness[i] = -kInfinity;
      image.partner[i] = 0;
    }
    if (args_.window) {
      sort(number, image.source, sources_, local.a, local.start_a);
      sort(number, image.target, targets_, local.b, local.start_b);
      for (int w = 0, windows = windows_of(args_); w < windows; ++w) {
        compare(number, image, local, local.a + local.start_a[w], local.start_a[w + 1] - local.start_a[w],
                local.b + local.start_b[w], local.start_b[w + 1] - local.start_b[w]);
      }
    } else {
      for (int i = from; i < to; ++i) local.a[i] = i;
      for (int j = 0; j < targets_; ++j) local.b[j] = j;
      compare(number, image, local, local.a + from, to - from, local.b, targets_);
    }
    if (args_.merged == sources_) return;  // all sources merge, so their similarities are not compared
    for (int i = from; i < to; ++i) {
      const int patch = image.source[i];
      image.likeness[i] /= Alike<W>::length(key(number, patch), args_.keys.width);
      if (args_.protect != 0.f && args_.importance) {
        const float importance = args_.importance[int64_t(number) * tokens_ + args_.prefix + patch];
        image.likeness[i] -= args_.protect * __builtin_logf(importance);
      }
    }
  }

  // Updates partner and likeness of `seeking` sources `a` from `held` targets `b`, Alike::kMost targets at a time.
  void compare(int number, const Image& image, const Local& local, const int32_t* a, int seeking, const int32_t* b,
               int held) const {
    for (int first = 0; first < held && seeking; first += Alike<W>::kMost, b += Alike<W>::kMost) {
      local.alike.hold(least(Alike<W>::kMost, held - first), [&](int j) { return key(number, image.target[b[j]]); });
      local.alike.seek(
          seeking, [&](int i) { return key(number, image.source[a[i]]); },
          [&](int i, float product, int which) {
            if (!(product > image.likeness[a[i]])) return;
            image.likeness[a[i]] = product;
            image.partner[a[i]] = b[which];
          });
    }
  }

  static int windows_of(const Merge& args) { return across(args) * ((args.height - 1) / args.window + 1); }
  static int across(const Merge& args) { return (args.width - 1) / args.window + 1; }

  // Counting sort of sources or targets by window; stable within a window.
  void sort(int number, const int32_t* patches, int count, int32_t* sorted, int32_t* start) const {
    const int windows = windows_of(args_), wide = across(args_);
    const auto window_of = [&](int i) {
      const int at = cell(number, patches[i]);
      return at / args_.width / args_.window * wide + at % args_.width / args_.window;
    };
    std::memset(start, 0, sizeof(int32_t) * (size_t(windows) + 1));
    for (int i = 0; i < count; ++i) ++start[window_of(i) + 1];
    for (int w = 0; w < windows; ++w) start[w + 1] += start[w];
    for (int i = 0; i < count; ++i) sorted[start[window_of(i)]++] = i;
    for (int w = windows; w; --w) start[w] = start[w - 1];  // start[w] had advanced to the start of window w + 1
    start[0] = 0;
  }

  // Choosing ----------------------------------------------------------------------------------------------------------

  void choose(int number, const Local& local) {
    const Image image = this->image(number);
    for (int j = 0; j < targets_; ++j) {
      image.first[j] = -1;
      image.place[image.target[j]] = stays_ + j;
    }
    if (args_.merged) select(local, image.likeness, sources_, args_.merged);
    for (int i = 0, going = 0; i < sources_; ++i) {
      if (going < args_.merged && local.chosen[going] == i) {
        image.place[image.source[i]] = stays_ + image.partner[i];
        ++going;
      } else {
        image.place[image.source[i]] = i - going;
        image.stay[i - going] = i;
      }
    }
    for (int k = args_.merged; k--;) {  // inserts at the front, so in reverse order each list is ascending
      const int i = local.chosen[k], j = image.partner[i];
      image.next[i] = image.first[j];
      image.first[j] = i;
    }
    note(number, image);
  }

  INLINE float size(int number, int patch) const {
    return args_.sizes ? args_.sizes[int64_t(number) * args_.patches + patch] : 1.f;
  }
  // The patch of the k-th remaining row: a source that stays, or a target.
  INLINE int patch_of(const Image& image, int k) const {
    return k < stays_ ? image.source[image.stay[k]] : image.target[k - stays_];
  }

  // Writes size and cell of each remaining patch, and the remaining patch that owns each cell.
  void note(int number, const Image& image) const {
    const int left = args_.patches - args_.merged, grid = args_.height * args_.width;
    float* const sizes = args_.sizes_out + int64_t(number) * left;
    int64_t* const cells = args_.cells_out + int64_t(number) * left;
    int64_t* const owners = args_.owners_out + int64_t(number) * grid;
    for (int k = 0; k < left; ++k) {
      const int patch = patch_of(image, k);
      sizes[k] = size(number, patch);
      cells[k] = cell(number, patch);
      if (k < stays_) continue;
      for (int i = image.first[k - stays_]; i >= 0; i = image.next[i]) sizes[k] += size(number, image.source[i]);
    }
    if (args_.owners) {
      const int64_t* const before = args_.owners + int64_t(number) * grid;
      for (int c = 0; c < grid; ++c) owners[c] = before[c] < 0 ? -1 : image.place[before[c]];
    } else {
      for (int c = 0; c < grid; ++c) owners[c] = -1;
      for (int patch = 0; patch < args_.patches; ++patch) owners[cell(number, patch)] = image.place[patch];
    }
  }

  // Joining -----------------------------------------------------------------------------------------------------------

  void join(int piece, const Local&) {
    const int number = piece / join_pieces_, part = piece % join_pieces_;
    const Image image = this->image(number);
    const int64_t rows = tokens_ - args_.merged;
    for (int row = int(rows * part / join_pieces_), end = int(rows * (part + 1) / join_pieces_); row < end; ++row) {
      float* const to = args_.out.data + number * args_.out.batch + row * args_.out.token;
      const int k = row - args_.prefix, j = k - stays_;
      if (j >= 0 && image.first[j] >= 0) {
        mean(number, image, j, to);
      } else {
        const int from = k < 0 ? row : args_.prefix + patch_of(image, k);
        std::memcpy(to, token(number, from), sizeof(float) * args_.x.width);
      }
    }
  }

  const float* token(int number, int at) const { return args_.x.data + number * args_.x.batch + at * args_.x.token; }

  // The weight of a patch in a mean: its importance (clamped), or the number of patches it represents.
  INLINE float weight(int number, int patch) const {
    if (!args_.by_importance) return size(number, patch);
    const float importance = args_.importance[int64_t(number) * tokens_ + args_.prefix + patch];
    return importance > kShortest ? importance < kHeaviest ? importance : kHeaviest : kShortest;
  }

  // Weighted mean of a target and its sources. With `by_importance`, the mean is rescaled to their mean norm.
  void mean(int number, const Image& image, int j, float* to) const {
    const int width = args_.x.width;
    const int target = image.target[j];
    const float* const own = token(number, args_.prefix + target);
    const float first = weight(number, target);
    float total = first, length = args_.by_importance ? first * Alike<W>::length(own, width) : 0.f;
    for (int i = image.first[j]; i >= 0; i = image.next[i]) {
      const float more = weight(number, image.source[i]);
      total += more;
      if (args_.by_importance) length += more * Alike<W>::length(token(number, args_.prefix + image.source[i]), width);
    }
    const auto joined = [&](auto sum, auto load, int c) {
      for (int i = image.first[j]; i >= 0; i = image.next[i]) {
        sum += load(token(number, args_.prefix + image.source[i]) + c) * weight(number, image.source[i]);
      }
      return sum / total;
    };
    const auto vector = [](const float* from) { return S::load(from); };
    const auto scalar = [](const float* from) { return *from; };
    int c = 0;
    for (; c + W <= width; c += W) S::store(to + c, joined(vector(own + c) * first, vector, c));
    for (; c < width; ++c) to[c] = joined(own[c] * first, scalar, c);
    if (!args_.by_importance) return;
    const float wanted = length / total / Alike<W>::length(to, width), scale = wanted < kLongest ? wanted : kLongest;
    for (c = 0; c + W <= width; c += W) S::store(to + c, S::load(to + c) * scale);
    for (; c < width; ++c) to[c] *= scale;
  }
};

}  // namespace attendless::ATTENDLESS_ISA
