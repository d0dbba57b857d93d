#include "cuda_emulation/memory.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>

#include "cuda_emulation/block.h"

namespace dspark::emulation {
namespace {

struct Heap {
  std::map<uintptr_t, int64_t> live;  // first byte -> bytes
  uintptr_t last_begin = 1, last_end = 0;  // the allocation that was hit last
};

Heap& heap() {
  static Heap h;
  return h;
}

}  // namespace

void* allocate_global(int64_t bytes) {
  const auto rounded = static_cast<size_t>(std::max<int64_t>(1, (bytes + 255) / 256)) * 256;
  void* p = std::aligned_alloc(256, rounded);
  if (p == nullptr) throw Fault(fmt::format("out of memory: {} bytes", bytes));
  std::memset(p, 0xff, rounded);
  heap().live[reinterpret_cast<uintptr_t>(p)] = bytes;
  return p;
}

void free_global(void* p) {
  if (heap().live.erase(reinterpret_cast<uintptr_t>(p)) == 0) throw Fault(fmt::format("free of {}, which is no allocation", p));
  heap().last_begin = 1, heap().last_end = 0;
  std::free(p);
}

void check_global(const void* p, int64_t bytes, int64_t align, bool write) {
  Heap& h = heap();
  const auto begin = reinterpret_cast<uintptr_t>(p), end = begin + static_cast<uintptr_t>(bytes);
  const char* verb = write ? "write" : "read";
  if (begin < h.last_begin || end > h.last_end) {
    auto it = h.live.upper_bound(begin);
    const bool inside = it != h.live.begin() && (--it, end <= it->first + static_cast<uintptr_t>(it->second));
    if (!inside) {
      const std::string message = fmt::format("{} of {} global bytes at {}, outside every allocation", verb, bytes, p);
      if (begin == 0) throw Fault(fmt::format("{} of {} global bytes through a null pointer", verb, bytes));
      throw Fault(it != h.live.end() && begin >= it->first ? fmt::format("{} (byte {} of one of {})", message, begin - it->first, it->second) : message);
    }
    h.last_begin = it->first, h.last_end = it->first + static_cast<uintptr_t>(it->second);
  }
  if (begin % static_cast<uintptr_t>(align) != 0) throw Fault(fmt::format("misaligned {} of {} global bytes at {}", verb, bytes, p));
}

int64_t global_allocations() { return static_cast<int64_t>(heap().live.size()); }

}  // namespace dspark::emulation
