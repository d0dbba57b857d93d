#include "job/bench_memory.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>

#include "core/log.h"

namespace dspark::job {

namespace {

typedef float Vec __attribute__((vector_size(64)));
constexpr int64_t kVecs = int64_t{64} << 20 >> 6;  // of one array: 64 MiB
constexpr int kStreams = 4;                        // places that are read at once: a core follows several

// Two arrays in pages of their own, made once.
struct Arrays {
  std::unique_ptr<std::byte[]> memory{new std::byte[2 * kVecs * sizeof(Vec) + 64]};
  Vec *x, *y;
  Arrays() {
    const auto start = (reinterpret_cast<uintptr_t>(memory.get()) + 63) / 64 * 64;
    x = reinterpret_cast<Vec*>(start), y = x + kVecs;
    for (int64_t i = 0; i < kVecs; ++i) x[i] = Vec{} + 1e-3f, y[i] = Vec{} + 1.0f;
  }
};

}  // namespace

double memory_bytes_per_s(ThreadPool& pool) {
  static const Arrays arrays;
  Vec *const x = arrays.x, *const y = arrays.y;
  constexpr int kTurns = 4;  // one may be over before every thread is awake
  const auto rate = [&](double bytes_a_vec, const std::function<void(int64_t, int64_t, int)>& body) {
    double best = 0;
    for (int turn = 0; turn < kTurns; ++turn) {
      const double start = now_s();
      pool.parallel_for(kVecs / kStreams, 1024, body);
      best = std::max(best, bytes_a_vec * static_cast<double>(kVecs) / (now_s() - start));
    }
    return best;
  };
  std::vector<float> sink(static_cast<size_t>(pool.size()));
  const double read = rate(64, [&](int64_t begin, int64_t end, int thread) {
    Vec sum[kStreams] = {};
    for (int64_t i = begin; i < end; ++i)
      for (int j = 0; j < kStreams; ++j) sum[j] += x[j * (kVecs / kStreams) + i];
    for (int j = 1; j < kStreams; ++j) sum[0] += sum[j];
    sink[static_cast<size_t>(thread)] = sum[0][0];
  });
  const double update = rate(192, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i)
      for (int j = 0; j < kStreams; ++j) y[j * (kVecs / kStreams) + i] += x[j * (kVecs / kStreams) + i];
  });
  const double copy = rate(128, [&](int64_t begin, int64_t end, int) {
    std::memcpy(y + begin * kStreams, x + begin * kStreams, static_cast<size_t>((end - begin) * kStreams) * sizeof(Vec));
  });
  return std::max({read, update, copy}) + (sink[0] < 0 ? 1e-9 : 0);
}

}  // namespace dspark::job
