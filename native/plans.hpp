// Plans: what is known of a call before its tensors, as structs with the fields of the Python dataclasses of the same
// names (attendless.sparse.foveal.Layout, attendless.sparse.merging.Merging). operations.hpp asserts that they agree.
#pragma once

#include <array>
#include <string_view>
#include <vector>

#include "checks.hpp"

namespace attendless {

// A plan as it travels, unchecked: its integers in the order of its fields.
template <class Plan>
struct Fields {
  std::vector<int64_t> numbers;

  // Throws unless there are as many as the plan has fields, each of them a size. Fields that later versions added may
  // be left out, and are 0.
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

// How foveal attention divides a grid into cells of keys and tiles of queries.
struct Layout {
  static constexpr const char* kName = "layout";
  static constexpr size_t kRequired = 7;
  static constexpr std::array<std::string_view, 9> kFields = {"height", "width",  "prefix", "cell", "tile",
                                                              "coarse", "budget", "order",  "int8"};
  int height, width, prefix, cell, tile, coarse, budget, order, int8;

  explicit Layout(const Fields<Layout>& fields);  // throws std::invalid_argument for numbers that make no grid
  int patches() const { return height * width; }
  int cells() const;
  int tiles() const;
  bool operator==(const Layout& other) const;
};

// Which grid the tokens of a merge stand on, how many patches are merged into others, and among how many they are chosen.
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
  int seeking() const { return sources ? sources : patches / 2; }  // every second patch unless a number is given
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
