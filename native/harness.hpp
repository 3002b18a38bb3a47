// Shared by the problems of the harness: random numbers, comparison and failure.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "dispatch.hpp"

namespace attendless {

using Values = std::vector<float>;

struct Random {
  std::mt19937 engine;
  int from(int low, int high) { return low + int(engine() % unsigned(high - low + 1)); }
  bool flip() { return engine() & 1; }
  Values values(size_t count) {
    std::normal_distribution<float> normal;
    Values result(count);
    for (float& x : result) x = normal(engine);
    return result;
  }
};

[[noreturn]] inline void wrong(const std::string& what) {
  std::printf("wrong: %s on %s\n", what.c_str(), kernels().name);
  std::exit(1);
}

inline void compare(const char* what, const Values& ours, const std::vector<double>& truth) {
  double most = 1.;
  for (const double x : truth) most = std::max(most, std::fabs(x));
  for (size_t i = 0; i < truth.size(); ++i) {
    if (!(std::fabs(ours[i] - truth[i]) <= 1e-4 * most)) {
      wrong(std::string(what) + ", number " + std::to_string(i) + ": " + std::to_string(ours[i]) + " is not " +
            std::to_string(truth[i]));
    }
  }
}

void try_merge(Random& random);

}  // namespace attendless
