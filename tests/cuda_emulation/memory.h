// The emulated device's memory: separate allocations, poisoned when they are made, every access checked.
#pragma once

#include <cstdint>

namespace dspark::emulation {

// 256-byte aligned, filled with 0xff (NaN in every float type, -1 in every integer).
void* allocate_global(int64_t bytes);
// A Fault unless `p` is what allocate_global gave and was not freed.
void free_global(void* p);
// A Fault unless [p, p + bytes) lies inside one live allocation and p is a multiple of `align`.
void check_global(const void* p, int64_t bytes, int64_t align, bool write);
// Live allocations and their bytes, for tests that nothing leaks.
int64_t global_allocations();

}  // namespace dspark::emulation
