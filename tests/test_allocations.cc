// Nothing is allocated inside a step: from its enqueueing to its results, on any thread.

#include <atomic>
#include <catch2/catch.hpp>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "golden_train.h"
#include "train/optimizer.h"

// The sanitizers bring an allocator of their own.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define DS_COUNTS 0
#else
#define DS_COUNTS 1
#endif

#if DS_COUNTS
namespace {
std::atomic<int64_t> g_allocations{0};
}

extern "C" {
void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);
void* __libc_memalign(size_t, size_t);

void* malloc(size_t n) {
  g_allocations.fetch_add(1, std::memory_order_relaxed);
  return __libc_malloc(n);
}
void* calloc(size_t n, size_t size) {
  g_allocations.fetch_add(1, std::memory_order_relaxed);
  return __libc_calloc(n, size);
}
void* realloc(void* p, size_t n) {
  g_allocations.fetch_add(1, std::memory_order_relaxed);
  return __libc_realloc(p, n);
}
void* aligned_alloc(size_t align, size_t n) {
  g_allocations.fetch_add(1, std::memory_order_relaxed);
  return __libc_memalign(align, n);
}
}

using namespace dspark;
using namespace dspark::golden;

TEST_CASE("a training step allocates nothing", "[train][golden]") {
  int n = 0;
  for (const Case& c : cases("drafter_step")) {
    const Json d = description(c);
    const formats::SafetensorsFile file(c.folder / "tensors.safetensors");
    for (const bool muon : {false, true}) {
      INFO(c.name << (muon ? " muon" : " adamw"));
      model::BackendOptions backend;
      backend.threads = 2;
      Harness h(backend, d, file);
      const auto p = pack_case(file, "in.", h.config, h.objective);
      train::OptimizerOptions options;
      options.muon = muon;
      train::Optimizer optimizer(*h.drafter, options);
      model::Readback slots, scalars;
      auto step = [&] {
        h.step->enqueue(p->batch, true, model::Write::overwrite, slots);
        slots.wait();
        optimizer.enqueue(1e-3, 1.0, scalars);
        scalars.wait();
      };
      step();
      const int64_t before = g_allocations.load();
      step();
      CHECK(g_allocations.load() - before == 0);
      ++n;
    }
  }
  CHECK(n > 0);
  // The count counts.
  const int64_t before = g_allocations.load();
  std::vector<int> some(10);
  CHECK(some.size() == 10);
  CHECK(g_allocations.load() > before);
}
#endif
