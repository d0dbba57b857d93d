#include "core/threads.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "core/error.h"
#include "core/stop.h"

namespace dspark {

namespace {

// A step of a small model starts thousands of short loops a second: sleeping and waking a thread costs more than many of them.
// About 20 to 100 us of spinning, by the CPU's pause; longer waits sleep.
constexpr int kSpins = 2000;

void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Returns once `value` differs from `old`; what was written before the change is visible.
void wait_for_change(const std::atomic<uint32_t>& value, uint32_t old) {
  for (int i = 0; i < kSpins; ++i) {
    if (value.load(std::memory_order_acquire) != old) return;
    pause_cpu();
  }
  value.wait(old, std::memory_order_acquire);
}

}  // namespace

struct ThreadPool::Impl {
  std::vector<std::thread> workers;
  std::atomic<uint32_t> generation{0};  // of the loop to run; a change starts the workers
  std::atomic<uint32_t> running{0};     // workers that are not done with it
  bool stop = false;                    // this and the next lines are written before generation changes
  int64_t n = 0, share = 0;
  const LoopBody* body = nullptr;
  std::mutex error_mutex;
  std::exception_ptr error;

  void run_share(int index) {
    const int64_t begin = std::min(n, share * index), end = std::min(n, begin + share);
    if (begin >= end) return;
    try {
      (*body)(begin, end, index);
    } catch (...) {
      std::lock_guard lock(error_mutex);
      if (!error) error = std::current_exception();
    }
  }

  void start() {
    generation.fetch_add(1, std::memory_order_release);
    generation.notify_all();
  }

  void end() {
    stop = true;
    start();
    for (auto& t : workers) t.join();
  }

  void worker(int index) {
    for (uint32_t seen = 0;; ++seen) {
      wait_for_change(generation, seen);
      if (stop) return;
      run_share(index);
      if (running.fetch_sub(1, std::memory_order_acq_rel) == 1) running.notify_one();
    }
  }
};

ThreadPool::ThreadPool(int n_threads) : impl_(std::make_unique<Impl>()) {
  try {
    for (int i = 1; i < std::max(1, n_threads); ++i) impl_->workers.emplace_back([impl = impl_.get(), i] { impl->worker(i); });
  } catch (const std::system_error& e) {
    const size_t started = impl_->workers.size() + 1;
    impl_->end();
    fail("cannot start thread {} of {}: {}; ask for fewer with --threads", started + 1, n_threads, e.code().message());
  }
}

ThreadPool::~ThreadPool() { impl_->end(); }

int ThreadPool::size() const { return static_cast<int>(impl_->workers.size()) + 1; }

void ThreadPool::parallel_for(int64_t n, int64_t grain, const LoopBody& body) {
  stop_point();
  if (n <= 0) return;
  const int64_t parts = std::min<int64_t>(size(), (n + std::max<int64_t>(grain, 1) - 1) / std::max<int64_t>(grain, 1));
  if (parts <= 1) return body(0, n, 0);
  impl_->n = n;
  impl_->share = (n + parts - 1) / parts;
  impl_->body = &body;
  impl_->error = nullptr;
  impl_->running.store(static_cast<uint32_t>(impl_->workers.size()), std::memory_order_relaxed);
  impl_->start();
  impl_->run_share(0);
  for (uint32_t left; (left = impl_->running.load(std::memory_order_acquire)) != 0;) wait_for_change(impl_->running, left);
  if (impl_->error) std::rethrow_exception(impl_->error);
}

int usable_cores() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return 1;
  return std::max(1, CPU_COUNT(&set));
}

}  // namespace dspark
