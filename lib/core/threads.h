// A fixed pool of worker threads and one way to use it: parallel_for over static, contiguous shares.
//
// Which thread computes which share never changes a result: every kernel's sums are ordered by its shape alone.
#pragma once

#include <cstdint>
#include <memory>

namespace dspark {

// Refers to a callable body(begin, end, thread) that outlives the loop. A std::function would allocate once a loop, and a
// training step is thousands of loops.
class LoopBody {
 public:
  template <typename F>
  LoopBody(const F& f)
      : object_(&f), call_([](const void* object, int64_t begin, int64_t end, int thread) { (*static_cast<const F*>(object))(begin, end, thread); }) {}
  void operator()(int64_t begin, int64_t end, int thread) const { call_(object_, begin, end, thread); }

 private:
  const void* object_;
  void (*call_)(const void*, int64_t, int64_t, int);
};

class ThreadPool {
 public:
  explicit ThreadPool(int n_threads);  // the caller counts as one; throws when the system starts no more
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const;
  // Calls body(begin, end, thread) for disjoint shares of [0, n), each at least `grain` long; returns when all are done.
  // Exceptions thrown by a share are rethrown here. Not re-entrant: a body must not call parallel_for on the same pool.
  // A stop_point() (core/stop.h).
  void parallel_for(int64_t n, int64_t grain, const LoopBody& body);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Usable cores of this process (its affinity mask), at least 1.
int usable_cores();

}  // namespace dspark
