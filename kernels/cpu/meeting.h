// How the threads of a parallel region share work and wait for each other.
#pragma once

#include <atomic>
#include <climits>
#include <cstdint>
#include <memory>

#include <linux/futex.h>
#include <omp.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace eagle {

// Where the threads of a parallel region wait for each other, some 250 times a forward. OpenMP's own barrier puts them to
// sleep each time where several threads of the process have used OpenMP, as in a server: a forward took 1.4 times as long
// there. This one spins, unless a thread that is missing was last seen on this one's own core, where it cannot come while
// this one spins; and sleeps at last. It does not yield: on a busy core that gives a whole slice to another process.
class Meeting {
 public:
  // The calling thread's, for regions of up to so many threads. It lives on: who ran where is known from the last region.
  static Meeting& of_caller(int threads) {
    static thread_local Meeting meeting;
    if (threads > meeting.size_) {
      meeting.places_ = std::make_unique<Place[]>(threads);
      meeting.size_ = threads;
    }
    return meeting;
  }

  void wait() {
    int all = omp_get_num_threads(), thread = omp_get_thread_num();
    uint32_t turn = turn_.load(std::memory_order_relaxed), core = sched_getcpu();
    places_[thread].seen.store(uint64_t(turn) << 32 | core, std::memory_order_relaxed);
    if (here_.fetch_add(1, std::memory_order_acq_rel) + 1 == all) {
      here_.store(0, std::memory_order_relaxed);
      turn_.store(turn + 1);
      if (asleep_.load()) syscall(SYS_futex, &turn_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
      return;
    }
    if (spin(turn, FEW) || (!shares(turn, core, thread, all) && spin(turn, MANY))) return;
    // Either the last to come sees that somebody is asleep, or the turn has changed before the kernel looks at it.
    asleep_.fetch_add(1);
    while (!ended(turn)) syscall(SYS_futex, &turn_, FUTEX_WAIT_PRIVATE, turn, nullptr, nullptr, 0);
    asleep_.fetch_sub(1, std::memory_order_relaxed);
  }

 private:
  static constexpr int FEW = 16, MANY = 1 << 16;  // 0.5 us and 2 ms

  struct alignas(64) Place {
    std::atomic<uint64_t> seen{UINT64_MAX};  // a turn, and the core at its end
  };

  bool ended(uint32_t turn) const { return turn_.load(std::memory_order_acquire) != turn; }

  bool spin(uint32_t turn, int times) const {
    for (int i = 0; i < times; ++i) {
      if (ended(turn)) return true;
#if defined(__x86_64__)
      __builtin_ia32_pause();
#elif defined(__aarch64__)
      asm volatile("yield");
#endif
    }
    return false;
  }

  // Whether a thread that has not come yet was last seen on this core.
  bool shares(uint32_t turn, uint32_t core, int thread, int all) const {
    for (int other = 0; other < all; ++other) {
      uint64_t seen = places_[other].seen.load(std::memory_order_relaxed);
      if (other != thread && uint32_t(seen >> 32) != turn && uint32_t(seen) == core) return true;
    }
    return false;
  }

  std::unique_ptr<Place[]> places_;
  int size_ = 0;
  alignas(64) std::atomic<int> here_{0};
  alignas(64) std::atomic<uint32_t> turn_{0};  // a futex: four bytes
  std::atomic<int> asleep_{0};
};

// Shares work among the threads of a parallel region, in runs; all have ended when it returns.
template <typename F>
void share(Meeting& meeting, int64_t count, const F& work) {
  int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
  for (int64_t i = count * thread / threads; i < count * (thread + 1) / threads; ++i) work(i);
  meeting.wait();
}

}  // namespace eagle
