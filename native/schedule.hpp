// Every head of every image, shared out among threads without a barrier: on a busy machine each would cost as long as
// it takes until all threads have had their turn.
//
// A thread takes a head, prepares its table and works on its pieces. A thread that finds no head left takes pieces of
// the heads others are working on. Backward, a head belongs to one thread, so that sums are always taken in one order.
//
// A Worker is one head of an attention `Args`. It lays out its table in the memory it is made with, its Local what a
// thread needs besides, and it has
//     prepare()                before any piece
//     pieces(), forward(piece, local)
//     backward(grads, local)   all of it; `grads` are zeros, one for each row
#pragma once

#include "head.hpp"
#include "memory.hpp"
#include "parallel.hpp"

namespace attendless::ATTENDLESS_ISA {

template <class Worker>
class Run {
  using Args = typename Worker::Args;
  using Local = typename Worker::Local;
  enum State { kIdle, kPreparing, kReady };

  // What a thread is working on, for others to help with.
  struct alignas(64) Slot {
    int state, head, taken;
  };

  const Args& args_;
  const bool backward_;
  const int heads_, threads_;
  const int64_t table_, local_;  // floats of each
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
    for (int rank = 0; rank < threads_; ++rank) slots_[rank] = {kIdle, 0, 0};
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
    for (int head;;) {
      // Before a head is taken: whoever finds none left then sees that this slot's last one is not open any more.
      set(mine.state, kPreparing);
      if (!take(head, &taken_, heads_)) break;
      Cursor memory = table(rank, head);
      const Worker worker(args_, head / args_.problem.heads, head % args_.problem.heads, memory);
      if (backward_) {
        worker.backward(zeros(memory), local);
        continue;
      }
      worker.prepare();
      mine.head = head;
      mine.taken = 0;
      set(mine.state, kReady);
      work_on(worker, mine, local);
    }
    set(mine.state, kIdle);
    for (bool more = true; more;) {
      more = false;
      for (int other = 0; other < threads_; ++other) {
        const int state = __atomic_load_n(&slots_[other].state, __ATOMIC_ACQUIRE);
        more |= state == kPreparing;
        if (state == kReady) help(other, local);
      }
      if (more) give_way();
    }
  }

  void help(int other, const Local& local) {
    const int head = slots_[other].head;
    Cursor memory = table(other, head);
    const Worker worker(args_, head / args_.problem.heads, head % args_.problem.heads, memory);
    work_on(worker, slots_[other], local);
  }

  static void work_on(const Worker& worker, Slot& slot, const Local& local) {
    for (int piece; take(piece, &slot.taken, worker.pieces());) worker.forward(piece, local);
  }

  // No more heads than tables: each has its own. Otherwise each thread has.
  Cursor table(int rank, int head) const {
    return Cursor(tables_ + (heads_ <= threads_ ? head : rank) * table_, table_);
  }

  KvTable gradients(Cursor& memory) const {
    return KvTable(memory, Worker::table_rows(args_), args_.problem.q.width, args_.problem.v.width);
  }

  KvTable zeros(Cursor& memory) const {
    const int64_t count = Worker::table_rows(args_);
    const KvTable rows = gradients(memory);
    std::memset(rows.k, 0, sizeof(float) * count * padded(rows.width));
    std::memset(rows.v, 0, sizeof(float) * count * padded(rows.value_width));
    std::memset(rows.bias, 0, sizeof(float) * count);
    return rows;
  }

  static bool take(int& piece, int* counter, int count) {
    piece = __atomic_fetch_add(counter, 1, __ATOMIC_ACQ_REL);
    return piece < count;
  }

  static void set(int& state, State value) { __atomic_store_n(&state, value, __ATOMIC_RELEASE); }
};

}  // namespace attendless::ATTENDLESS_ISA
