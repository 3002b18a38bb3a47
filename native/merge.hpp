// Merging tokens that are alike, as sparse/merging.py defines it: the patches 1, 3, 5, … (a) look for the one most like
// them among 0, 2, 4, … (b), and the `merged` surest of them join theirs.
//
// Three steps, each shared out among threads: patches of a are matched, each image chooses who goes, rows are written.
// Where images alone give every thread something to do, a piece of work is an image.
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

  static constexpr int kFewest = 128;         // patches of a in a piece: each piece lays out all of b for itself
  static constexpr int kFewestFloats = 1 << 16;  // of tokens in a piece, for the same price as waking a thread

  // What is decided about an image, by the numbers that patches have in a and in b.
  struct Image {
    float* likeness;   // of a patch of a to its partner
    int32_t* partner;  // in b
    int32_t* place;    // of a patch of a among the patches that are left
    int32_t* stay;     // the patches of a that stay
    int32_t* first;    // the first of those that join a patch of b, or -1
    int32_t* next;     // the next that joins the same

    INLINE Image(const Merge& args, Cursor& memory) {
      const int a = args.patches / 2, b = args.patches - a;
      likeness = memory.floats(padded(a));
      partner = memory.ints(a);
      place = memory.ints(a);
      stay = memory.ints(a);
      first = memory.ints(b);
      next = memory.ints(a);
    }
  };

  // What a thread needs besides.
  struct Local {
    mutable Alike<W> alike;
    int32_t *a, *b;              // patches by window
    int32_t *start_a, *start_b;  // where each window's begin
    float* zeros;
    int32_t *found, *chosen;  // by Select

    INLINE Local(const Merge& args, Cursor& memory)
        : alike(args.keys.width, args.patches - args.patches / 2, memory) {
      const int half = args.patches / 2, windows = args.window ? windows_of(args) : 0;
      a = memory.ints(half);
      b = memory.ints(args.patches - half);
      start_a = memory.ints(windows + 1);
      start_b = memory.ints(windows + 1);
      zeros = memory.floats(padded(half));
      found = memory.ints(padded(half) + 8);
      chosen = memory.ints(half);
    }
  };

  using Stage = void (MergeRun::*)(int piece, const Local& local);

  const Merge& args_;
  const int tokens_, half_, others_, stays_, threads_;
  int match_pieces_, join_pieces_;  // of an image
  int64_t image_, local_;           // floats of each
  float *images_, *locals_;
  float* keys_;  // [batch, patches, channels], summed over the heads; none if there is one
  Stage stage_;
  int pieces_, taken_;

 public:
  explicit MergeRun(const Merge& args)
      : args_(args),
        tokens_(args.prefix + args.patches),
        half_(args.patches / 2),
        others_(args.patches - half_),
        stays_(half_ - args.merged),
        threads_(args.threads) {
    const bool alone = args.batch >= threads_;
    match_pieces_ = alone || args.window ? 1 : pieces_of(half_, kFewest);
    join_pieces_ = alone ? 1 : pieces_of(tokens_ - args.merged, kFewestFloats / args.x.width + 1);
    image_ = counted([&](Cursor& memory) { Image(args, memory); });
    local_ = counted([&](Cursor& memory) { Local(args, memory); });
    const int64_t floats = counted([&](Cursor& memory) { lay_out(memory); });
    const Memory memory(floats);
    Cursor all(memory.data(), floats);
    lay_out(all);
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

  // So many pieces of every image.
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

  // Matching ----------------------------------------------------------------------------------------------------------

  const float* key(int image, int patch) const {
    return keys_ ? keys_ + (int64_t(image) * args_.patches + patch) * args_.keys.width : key(image, patch, 0);
  }
  const float* key(int image, int patch, int head) const {
    const View& keys = args_.keys;
    const float* const data = static_cast<const float*>(keys.data);
    return data + image * keys.batch + head * keys.head + (args_.prefix + patch) * keys.token;
  }

  // The keys of an image, summed over the heads: cosines are the same as of their mean.
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
    const int from = int(int64_t(half_) * part / match_pieces_), to = int(int64_t(half_) * (part + 1) / match_pieces_);
    for (int i = from; i < to; ++i) {
      image.likeness[i] = -kInfinity;
      image.partner[i] = 0;
    }
    if (args_.window) {
      sort(number, 1, half_, local.a, local.start_a);
      sort(number, 0, others_, local.b, local.start_b);
      for (int w = 0, windows = windows_of(args_); w < windows; ++w) {
        compare(number, image, local, local.a + local.start_a[w], local.start_a[w + 1] - local.start_a[w],
                local.b + local.start_b[w], local.start_b[w + 1] - local.start_b[w]);
      }
    } else {
      for (int i = from; i < to; ++i) local.a[i] = i;
      for (int i = 0; i < others_; ++i) local.b[i] = i;
      compare(number, image, local, local.a + from, to - from, local.b, others_);
    }
    for (int i = from; i < to; ++i) {
      image.likeness[i] /= Alike<W>::length(key(number, 2 * i + 1), args_.keys.width);
      if (args_.importance) {
        const float importance = args_.importance[int64_t(number) * tokens_ + args_.prefix + 2 * i + 1];
        image.likeness[i] -= args_.protect * __builtin_logf(importance);
      }
    }
  }

  void compare(int number, const Image& image, const Local& local, const int32_t* a, int seeking, const int32_t* b,
               int held) const {
    for (int first = 0; first < held && seeking; first += Alike<W>::kMost, b += Alike<W>::kMost) {
      local.alike.hold(least(Alike<W>::kMost, held - first), [&](int i) { return key(number, 2 * b[i]); });
      local.alike.seek(
          seeking, [&](int i) { return key(number, 2 * a[i] + 1); },
          [&](int i, float product, int which) {
            if (!(product > image.likeness[a[i]])) return;
            image.likeness[a[i]] = product;
            image.partner[a[i]] = b[which];
          });
    }
  }

  static int windows_of(const Merge& args) { return across(args) * ((args.height - 1) / args.window + 1); }
  static int across(const Merge& args) { return (args.width - 1) / args.window + 1; }

  // Every second patch from `first` on by window, in each in their order.
  void sort(int number, int first, int count, int32_t* sorted, int32_t* start) const {
    const int windows = windows_of(args_), wide = across(args_);
    const auto window_of = [&](int i) {
      const int at = cell(number, 2 * i + first);
      return at / args_.width / args_.window * wide + at % args_.width / args_.window;
    };
    std::memset(start, 0, sizeof(int32_t) * (size_t(windows) + 1));
    for (int i = 0; i < count; ++i) ++start[window_of(i) + 1];
    for (int w = 0; w < windows; ++w) start[w + 1] += start[w];
    for (int i = 0; i < count; ++i) sorted[start[window_of(i)]++] = i;
    for (int w = windows; w; --w) start[w] = start[w - 1];  // each stands where the next began
    start[0] = 0;
  }

  // Choosing ----------------------------------------------------------------------------------------------------------

  void choose(int number, const Local& local) {
    const Image image = this->image(number);
    for (int j = 0; j < others_; ++j) image.first[j] = -1;
    if (args_.merged) {
      std::memset(local.zeros, 0, sizeof(float) * padded(half_));
      Select<W>::largest(image.likeness, local.zeros, half_, nullptr, 0, args_.merged, local.found, local.chosen);
    }
    for (int i = 0, going = 0; i < half_; ++i) {
      if (going < args_.merged && local.chosen[going] == i) {
        image.place[i] = stays_ + image.partner[i];
        ++going;
      } else {
        image.place[i] = i - going;
        image.stay[i - going] = i;
      }
    }
    for (int k = args_.merged; k--;) {  // the last first, so that each list is in order
      const int i = local.chosen[k], j = image.partner[i];
      image.next[i] = image.first[j];
      image.first[j] = i;
    }
    note(number, image);
  }

  INLINE float size(int number, int patch) const {
    return args_.sizes ? args_.sizes[int64_t(number) * args_.patches + patch] : 1.f;
  }
  INLINE int place(const Image& image, int patch) const {
    return patch % 2 ? image.place[patch / 2] : stays_ + patch / 2;
  }

  // What the patches left stand for, where they stand, and who stands for each cell.
  void note(int number, const Image& image) const {
    const int left = args_.patches - args_.merged, grid = args_.height * args_.width;
    float* const sizes = args_.sizes_out + int64_t(number) * left;
    int64_t* const cells = args_.cells_out + int64_t(number) * left;
    int64_t* const owners = args_.owners_out + int64_t(number) * grid;
    for (int k = 0; k < left; ++k) {
      const int patch = k < stays_ ? 2 * image.stay[k] + 1 : 2 * (k - stays_);
      sizes[k] = size(number, patch);
      cells[k] = cell(number, patch);
      if (k < stays_) continue;
      for (int i = image.first[k - stays_]; i >= 0; i = image.next[i]) sizes[k] += size(number, 2 * i + 1);
    }
    if (args_.owners) {
      const int64_t* const before = args_.owners + int64_t(number) * grid;
      for (int c = 0; c < grid; ++c) owners[c] = before[c] < 0 ? -1 : place(image, int(before[c]));
    } else {
      for (int c = 0; c < grid; ++c) owners[c] = -1;
      for (int patch = 0; patch < args_.patches; ++patch) owners[cell(number, patch)] = place(image, patch);
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
        const int from = k < 0 ? row : args_.prefix + (j < 0 ? 2 * image.stay[k] + 1 : 2 * j);
        std::memcpy(to, token(number, from), sizeof(float) * args_.x.width);
      }
    }
  }

  const float* token(int number, int at) const { return args_.x.data + number * args_.x.batch + at * args_.x.token; }

  // Of a patch of b and those that join it, by what each stands for.
  void mean(int number, const Image& image, int j, float* to) const {
    const int width = args_.x.width;
    const float* const own = token(number, args_.prefix + 2 * j);
    const float weight = size(number, 2 * j);
    const float total = args_.sizes_out[int64_t(number) * (args_.patches - args_.merged) + stays_ + j];
    const auto joined = [&](auto sum, auto load, int c) {
      for (int i = image.first[j]; i >= 0; i = image.next[i]) {
        sum += load(token(number, args_.prefix + 2 * i + 1) + c) * size(number, 2 * i + 1);
      }
      return sum / total;
    };
    const auto vector = [](const float* from) { return S::load(from); };
    const auto scalar = [](const float* from) { return *from; };
    int c = 0;
    for (; c + W <= width; c += W) S::store(to + c, joined(vector(own + c) * weight, vector, c));
    for (; c < width; ++c) to[c] = joined(own[c] * weight, scalar, c);
  }
};

}  // namespace attendless::ATTENDLESS_ISA
