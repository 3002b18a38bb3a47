// Divides the heads of all images among threads, without global barriers: on a busy machine, a barrier waits until
// every thread has been scheduled.
//
// The work of a head is a sequence of steps. The parts of a step depend on earlier steps only, not on each other. Loop
// order of a thread:
//     while heads are left: take a head; for each step, for each part that is left: work
//     then help: take parts of the heads that other threads work on
// The result of a part does not depend on the thread that computes it, so results do not depend on the number of
// threads. In the backward pass, one thread processes a whole head, so that the order of every sum is fixed.
//
// A Worker is one head of an attention with arguments `Args`, whose keys and values are stored as `Numbers`. Its
// constructor lays out its table in the given memory; its `Local` is the scratch memory of a thread. Its members:
//     kSteps, parts(step)
//     work(step, part, local)  the last step is the forward pass; earlier steps prepare the table
//     backward(grads, local)   the backward pass, after the table is prepared; `grads` has the same rows and is zero
#pragma once

#include "head.hpp"
#include "memory.hpp"
#include "parallel.hpp"

namespace attendless::ATTENDLESS_ISA {

template <class Worker>
class Run {
  using Args = typename Worker::Args;
  using Local = typename Worker::Local;
  using Table = KvTable<typename Worker::Numbers>;
  static constexpr int kSteps = Worker::kSteps, kForward = kSteps - 1, kOpening = -1;

  // The shared state of the head that a thread works on. `step`: the current step, kSteps if all are finished, kOpening
  // while the owner sets up another head. `taken` and `done` count the parts of each step.
  struct alignas(64) Slot {
    int step, head;
    int taken[kSteps], done[kSteps];
  };

  const Args& args_;
  const bool backward_;
  const int heads_, threads_;
  const int64_t table_, local_;  // sizes in floats
  float *tables_, *locals_;
  Slot* slots_;
  int taken_ = 0;

 public:
  Run(const Args& args, bool backward)
      : args_(args),
        backward_(backward),
        heads_(args.problem.batch * args.problem.heads),
        threads_(backward ? least(args.problem.threads, heads_) : args.problem.threads),
        table_(counted([&](Cursor& memory) {
          const Worker worker(args, 0, 0, memory);
          if (backward) gradients(memory);
        })),
        local_(counted([&](Cursor& memory) { Local(args, memory); })) {
    const int64_t floats = counted([&](Cursor& memory) { lay_out(memory); });
    const Memory memory(floats);
    Cursor all(memory.data(), floats);
    lay_out(all);
    for (int rank = 0; rank < threads_; ++rank) slots_[rank] = {kSteps, 0, {}, {}};
    run_parallel(threads_, [](void* run, int rank) { static_cast<Run*>(run)->work(rank); }, this);
  }

 private:
  void lay_out(Cursor& memory) {
    tables_ = memory.floats(table_ * least(threads_, heads_));
    locals_ = memory.floats(local_ * threads_);
    slots_ = reinterpret_cast<Slot*>(memory.floats(int64_t(sizeof(Slot) / sizeof(float)) * threads_));
  }

  void work(int rank) {
    Slot& mine = slots_[rank];
    Cursor memory_of_mine(locals_ + rank * local_, local_);
    const Local local(args_, memory_of_mine);
    bool alone = true;
    for (int head; alone;) {
      // Set before a head is taken, so that a thread that finds no head left does not help with the previous head.
      set(mine.step, kOpening);
      if (!take(head, &taken_, heads_)) {
        set(mine.step, kSteps);
        break;
      }
      Cursor memory = table(rank, head);
      const Worker worker(args_, head / args_.problem.heads, head % args_.problem.heads, memory);
      if constexpr (!Table::kRounds) {  // backward passes are fp32 only
        if (backward_) {
          prepare(worker, local);
          worker.backward(zeros(memory), local);
          continue;
        }
      }
      mine.head = head;
      for (int step = 0; step < kSteps; ++step) mine.taken[step] = mine.done[step] = 0;
      begin(worker, mine, 0);
      alone = work_on(worker, mine, local) == kSteps;  // otherwise others help, so no head is left
    }
    for (bool more = true; more;) {
      more = false;
      for (int other = 0; other < threads_; ++other) more |= help(other, local) < kForward;
      if (more) give_way();
    }
  }

  static void prepare(const Worker& worker, const Local& local) {
    for (int step = 0; step < kForward; ++step) {
      for (int part = 0; part < worker.parts(step); ++part) work_part(worker, step, part, local);
    }
  }

  // Not inlined: contains the whole kernel and has several callers.
  static __attribute__((noinline)) void work_part(const Worker& worker, int step, int part, const Local& local) {
    worker.work(step, part, local);
  }

  // Opens `step`, or the next step that has parts.
  static void begin(const Worker& worker, Slot& slot, int step) {
    while (step < kSteps && worker.parts(step) == 0) ++step;
    set(slot.step, step);
  }

  // `help` and `work_on` return the step at which they stopped: kSteps if all steps are finished, kOpening if the owner
  // has closed the slot in the meantime.
  int help(int other, const Local& local) {
    Slot& slot = slots_[other];
    const int step = get(slot.step);
    if (step == kOpening || step == kSteps) return step;  // slot.head must not be read
    Cursor memory = table(other, slot.head);
    const Worker worker(args_, slot.head / args_.problem.heads, slot.head % args_.problem.heads, memory);
    return work_on(worker, slot, local);
  }

  static __attribute__((noinline)) int work_on(const Worker& worker, Slot& slot, const Local& local) {
    for (int step = get(slot.step);;) {
      if (step == kOpening || step == kSteps) return step;
      const int parts = worker.parts(step);
      for (int part; take(part, &slot.taken[step], parts);) {
        work_part(worker, step, part, local);
        if (__atomic_add_fetch(&slot.done[step], 1, __ATOMIC_ACQ_REL) == parts) begin(worker, slot, step + 1);
      }
      const int next = get(slot.step);
      if (next == step) return step;
      step = next;
    }
  }

  // One table per head if there are at most as many heads as threads, otherwise one table per thread.
  Cursor table(int rank, int head) const {
    return Cursor(tables_ + (heads_ <= threads_ ? head : rank) * table_, table_);
  }

  Table gradients(Cursor& memory) const {
    return Table(memory, Worker::table_rows(args_), args_.problem.q.width, args_.problem.v.width);
  }

  Table zeros(Cursor& memory) const {
    const int64_t count = Worker::table_rows(args_);
    const Table rows = gradients(memory);
    std::memset(rows.k, 0, sizeof(float) * count * padded(rows.width));
    std::memset(rows.v, 0, sizeof(float) * count * padded(rows.value_width));
    std::memset(rows.bias, 0, sizeof(float) * count);
    return rows;
  }

  static bool take(int& piece, int* counter, int count) {
    piece = __atomic_fetch_add(counter, 1, __ATOMIC_ACQ_REL);
    return piece < count;
  }

  static int get(const int& step) { return __atomic_load_n(&step, __ATOMIC_ACQUIRE); }
  static void set(int& step, int value) { __atomic_store_n(&step, value, __ATOMIC_RELEASE); }
};

}  // namespace attendless::ATTENDLESS_ISA
