#include "core/threads.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace dspark {

struct ThreadPool::Impl {
  std::vector<std::thread> workers;
  std::mutex mutex;
  std::condition_variable wake, done;
  uint64_t generation = 0;
  int running = 0;
  bool stop = false;
  int64_t n = 0, share = 0;
  const std::function<void(int64_t, int64_t, int)>* body = nullptr;
  std::exception_ptr error;

  void run_share(int index) {
    const int64_t begin = std::min(n, share * index), end = std::min(n, begin + share);
    if (begin >= end) return;
    try {
      (*body)(begin, end, index);
    } catch (...) {
      std::lock_guard lock(mutex);
      if (!error) error = std::current_exception();
    }
  }

  void worker(int index) {
    uint64_t seen = 0;
    for (;;) {
      {
        std::unique_lock lock(mutex);
        wake.wait(lock, [&] { return stop || generation != seen; });
        if (stop) return;
        seen = generation;
      }
      run_share(index);
      std::lock_guard lock(mutex);
      if (--running == 0) done.notify_one();
    }
  }
};

ThreadPool::ThreadPool(int n_threads) : impl_(std::make_unique<Impl>()) {
  for (int i = 1; i < std::max(1, n_threads); ++i) impl_->workers.emplace_back([this, i] { impl_->worker(i); });
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard lock(impl_->mutex);
    impl_->stop = true;
  }
  impl_->wake.notify_all();
  for (auto& t : impl_->workers) t.join();
}

int ThreadPool::size() const { return static_cast<int>(impl_->workers.size()) + 1; }

void ThreadPool::parallel_for(int64_t n, int64_t grain,
                              const std::function<void(int64_t, int64_t, int)>& body) {
  if (n <= 0) return;
  const int64_t parts = std::min<int64_t>(size(), (n + std::max<int64_t>(grain, 1) - 1) / std::max<int64_t>(grain, 1));
  if (parts <= 1) return body(0, n, 0);
  {
    std::lock_guard lock(impl_->mutex);
    impl_->n = n;
    impl_->share = (n + parts - 1) / parts;
    impl_->body = &body;
    impl_->error = nullptr;
    impl_->running = static_cast<int>(impl_->workers.size());
    ++impl_->generation;
  }
  impl_->wake.notify_all();
  impl_->run_share(0);
  std::unique_lock lock(impl_->mutex);
  impl_->done.wait(lock, [&] { return impl_->running == 0; });
  if (impl_->error) std::rethrow_exception(impl_->error);
}

int usable_cores() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return 1;
  return std::max(1, CPU_COUNT(&set));
}

}  // namespace dspark
