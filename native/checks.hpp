// What every argument has to keep before a kernel reads it. A kernel trusts its caller: it computes with ints and
// checks nothing (but gather's lists, which it reads anyway).
#pragma once

#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <vector>

#include "kernels.hpp"

namespace attendless {

// No size is larger: tokens, channels, heads of all images, places of a grid. A kernel's sums of a few sizes, or its
// products of one with the number of lanes, then stay far inside an int; products of two are 64 bits wide.
constexpr int64_t kLargest = int64_t(1) << 24;
// More threads are asked for by mistake: a runtime that cannot start them ends the process.
constexpr int kMostThreads = 256;

template <class... Part>
[[noreturn, gnu::cold, gnu::noinline]] void fail(const Part&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw std::invalid_argument(text.str());
}

// The text is put together only if it is needed.
template <class... Part>
inline void require(bool truth, const Part&... parts) {
  if (__builtin_expect(!truth, 0)) fail(parts...);
}

inline int size_of(uint64_t size, const char* name) {
  require(size <= uint64_t(kLargest), name, ": ", size, " is too large; the kernels take up to ", kLargest);
  return int(size);
}

// Members of groups that lie inside their array and are tokens. Passes without a branch in them are vectorised.
inline Groups groups_of(const int32_t* start, uint64_t starts, const int32_t* member, uint64_t members, int tokens,
                        const char* name) {
  const int count = size_of(starts, name) - 1;
  require(count >= 0 && start[0] == 0 && start[count] >= 0 && uint64_t(start[count]) == members, name,
          " must start at 0 and end at their number");
  bool ascend = true;
  for (int g = 0; g < count; ++g) ascend &= start[g] <= start[g + 1];
  require(ascend, name, " of a tile cannot end before they start");
  bool outside = false;
  for (uint64_t i = 0; i < members; ++i) outside |= uint32_t(member[i]) >= uint32_t(tokens);
  require(!outside, name, " must be tokens, from 0 to ", tokens - 1);
  return {count, start, member};
}

inline void require_each_token_once(const Groups& groups, int tokens) {
  std::vector<char> seen(size_t(tokens), 0);
  const int members = groups.start[groups.count];
  for (int i = 0; i < members; ++i) seen[size_t(groups.member[i])] = 1;
  int different = 0;
  for (const char one : seen) different += one;
  require(members == tokens && different == tokens, "every token must be a query of one tile");
}

// Whether any group names a token more than once.
inline bool has_repeats(const Groups& groups, int tokens) {
  std::vector<int> last(size_t(tokens), -1);
  bool repeats = false;
  for (int g = 0; g < groups.count; ++g) {
    for (int i = groups.start[g]; i < groups.start[g + 1]; ++i) {
      int& group = last[size_t(groups.member[i])];
      repeats |= group == g;
      group = g;
    }
  }
  return repeats;
}

}  // namespace attendless
