// Plans: the integer parameters of a call that do not depend on its tensors. The structs have the fields of the Python
// dataclasses attendless.sparse.foveal.Layout and attendless.sparse.merging.Merging; operations.hpp asserts it.
#pragma once

#include <array>
#include <string_view>
#include <vector>

#include "checks.hpp"

namespace attendless {

// A serialised plan, unchecked: its integers in the order of its fields.
template <class Plan>
struct Fields {
  std::vector<int64_t> numbers;

  // Throws unless there are as many integers as fields, each from 0 to kLargest. Fields beyond Plan::kRequired, which
  // later versions added, may be missing and are then 0.
  template <class... Int>
  void unpack(Int&... to) const {
    static_assert(sizeof...(to) == Plan::kFields.size(), "a name for each field");
    require(numbers.size() >= Plan::kRequired && numbers.size() <= sizeof...(to), Plan::kName, " must be ",
            sizeof...(to), " numbers, not ", numbers.size());
    for (const int64_t x : numbers) {
      require(x >= 0 && x <= kLargest, "the numbers of ", Plan::kName, " must be from 0 to ", kLargest, ", not ", x);
    }
    size_t next = 0;
    ((to = next < numbers.size() ? int(numbers[next]) : 0, ++next), ...);
  }
};

// Foveal attention: the division of a grid into cells of keys and tiles of queries.
struct Layout {
  static constexpr const char* kName = "layout";
  static constexpr size_t kRequired = 7;
  static constexpr std::array<std::string_view, 9> kFields = {"height", "width",  "prefix", "cell", "tile",
                                                              "coarse", "budget", "order",  "int8"};
  int height, width, prefix, cell, tile, coarse, budget, order, int8;

  explicit Layout(const Fields<Layout>& fields);  // throws std::invalid_argument for invalid layouts
  int patches() const { return height * width; }
  int cells() const;
  int tiles() const;
  bool operator==(const Layout& other) const;
};

// Token merging: the grid, the number `r` of patches to merge, and the number of sources they are chosen from.
struct Merging {
  static constexpr const char* kName = "plan";
  static constexpr size_t kRequired = 5;
  static constexpr std::array<std::string_view, 7> kFields = {"height", "width",  "prefix", "patches",
                                                              "r",      "window", "sources"};
  int height, width, prefix, patches, r, window, sources;

  explicit Merging(const Fields<Merging>& fields) {
    fields.unpack(height, width, prefix, patches, r, window, sources);
    size_of(uint64_t(height) * uint64_t(width), "the grid");
    size_of(uint64_t(prefix) + uint64_t(patches), "tokens");
    require(!sources || sources < patches, sources, " of ", patches, " patches cannot be sources: one at least is a target");
    require(r <= seeking(), r, " of ", patches, " patches cannot join others: ", seeking(), " of them at most");
  }
  int seeking() const { return sources ? sources : patches / 2; }  // number of sources; default: every second patch
  int tokens() const { return prefix + patches; }
  int left() const { return patches - r; }
  int remaining() const { return prefix + left(); }
  int cells() const { return height * width; }
};

template <class Plan>
constexpr bool has_fields(const std::array<std::string_view, Plan::kFields.size()>& names) {
  for (size_t i = 0; i < names.size(); ++i) {
    if (names[i] != Plan::kFields[i]) return false;
  }
  return true;
}

}  // namespace attendless
