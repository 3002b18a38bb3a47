// Argument checks that run before a kernel. Kernels compute with ints and check nothing, except gather.hpp, which
// checks its lists while it reads them.
#pragma once

#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <vector>

#include "kernels.hpp"

namespace attendless {

// Upper bound of every size: tokens, channels, batch · heads, grid positions. Sums of a few sizes, and products of a
// size with the number of lanes, then fit an int. Products of two sizes are computed in 64 bits.
constexpr int64_t kLargest = int64_t(1) << 24;
// Upper bound of the thread count. Larger counts are mistakes, and a runtime that cannot start them ends the process.
constexpr int kMostThreads = 256;

template <class... Part>
[[noreturn, gnu::cold, gnu::noinline]] void fail(const Part&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw std::invalid_argument(text.str());
}

// Throws std::invalid_argument unless `truth`. The message is built only on failure.
template <class... Part>
inline void require(bool truth, const Part&... parts) {
  if (__builtin_expect(!truth, 0)) fail(parts...);
}

inline int size_of(uint64_t size, const char* name) {
  require(size <= uint64_t(kLargest), name, ": ", size, " is too large; the kernels take up to ", kLargest);
  return int(size);
}

// Checks groups in CSR form: starts ascend and end at the number of members; members are tokens. The loops have no
// branches, so that the compiler vectorises them.
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

// Whether a group names a token more than once.
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
