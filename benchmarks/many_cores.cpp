// Times every part of foveal attention's work, as the scheduler divides it for a number of threads: the kernel's own code,
// one part after the other on one thread. benchmarks/many_cores.py compiles, runs and reads it.
//
//     many_cores THREADS HEADS HEIGHT WIDTH PREFIX CELL TILE COARSE BUDGET ORDER
//
// A line for each step: the milliseconds of its parts, each the least of several repetitions.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>

#include "foveal.hpp"
#include "geometry.hpp"
#include "memory.hpp"

using namespace attendless;
using namespace attendless::ATTENDLESS_ISA;
using Worker = FovealHead<ATTENDLESS_WIDTH, Single>;

int main(int count, char** given) {
  constexpr int kWidth = 64, kRepeats = 7;
  std::vector<int64_t> numbers;
  for (int i = 1; i < count; ++i) numbers.push_back(std::atoll(given[i]));
  if (numbers.size() != 10) return 1;
  const Layout layout(Fields<Layout>{{numbers.begin() + 2, numbers.end()}});
  Foveal args{};
  const auto geometry = geometry_of(layout);
  geometry->fill(args);
  Problem& problem = args.problem;
  problem.batch = 1;
  problem.heads = int(numbers[1]);
  problem.threads = int(numbers[0]);
  problem.tokens = layout.prefix + layout.patches();
  problem.scale = 0.125f;
  const size_t floats = size_t(problem.tokens) * problem.heads * kWidth;
  std::vector<float> tensors(4 * floats), lse(floats / kWidth);
  std::mt19937 random(0);
  std::normal_distribution<float> normal;
  for (float& x : tensors) x = normal(random);
  View* const views[] = {&problem.q, &problem.k, &problem.v, &problem.out};
  for (int i = 0; i < 4; ++i) {  // heads side by side, as a projection leaves them
    *views[i] = {tensors.data() + i * floats, 0, kWidth, int64_t(problem.heads) * kWidth, kWidth};
  }
  problem.lse = lse.data();
  args.select = args.attend = true;

  const int64_t table = counted([&](Cursor& memory) { Worker(args, 0, 0, memory); });
  const int64_t scratch = counted([&](Cursor& memory) { Worker::Local(args, memory); });
  const Memory table_memory(table), scratch_memory(scratch);
  Cursor table_cursor(table_memory.data(), table), scratch_cursor(scratch_memory.data(), scratch);
  const Worker worker(args, 0, 0, table_cursor);
  const Worker::Local local(args, scratch_cursor);
  for (int step = 0; step < Worker::kSteps; ++step) {
    std::vector<double> best(size_t(worker.parts(step)), 1e9);
    for (int repeat = 0; repeat < kRepeats; ++repeat) {
      for (size_t part = 0; part < best.size(); ++part) {
        const auto start = std::chrono::steady_clock::now();
        worker.work(step, int(part), local);
        const std::chrono::duration<double, std::milli> taken = std::chrono::steady_clock::now() - start;
        best[part] = std::min(best[part], taken.count());
      }
    }
    for (const double ms : best) std::printf("%.5f ", ms);
    std::printf("\n");
  }
}
