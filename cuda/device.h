// What kernels are written against. nvcc compiles these as thin wrappers on CUDA; g++ with DS_CUDA_EMULATION compiles them as
// calls into the emulation of the execution model (tests/cuda_emulation), which checks what hardware leaves undefined.
//
// Rules for kernel code, so that both compile it and the emulation sees everything:
//   - global memory through load() and store(), shared memory through Shared<T>, never through plain pointers;
//   - collectives (sync_block, sync_warp, shuffles, votes, ldmatrix, mma) are reached by all threads they name, together;
//   - no atomics on floats, no order that depends on anything but shapes: two runs give the same bits;
//   - kernels are plain functions marked DS_KERNEL, started by launch().
//
//     DS_KERNEL void twice(float* p, int64_t n) {
//       const int64_t i = block_x() * threads() + thread();
//       if (i < n) store(p + i, 2 * load(p + i));
//     }
//     launch(stream, {blocks}, {256}, 0, twice, p, n);
#pragma once

#include <cstdint>

#include "core/dtype.h"

#ifdef DS_CUDA_EMULATION
#include "cuda_emulation/device_emulation.h"
#else
#include "cuda/device_cuda.h"
#endif

namespace dspark::cuda {

constexpr int kWarp = 32;
constexpr uint32_t kAllLanes = 0xffffffffu;

DS_DEVICE int lane() { return thread() % kWarp; }
DS_DEVICE int warp() { return thread() / kWarp; }
DS_DEVICE int warps() { return (threads() + kWarp - 1) / kWarp; }

// N elements that move in one access; the address must be a multiple of their size.
template <typename T, int N>
struct alignas(sizeof(T) * N) Vector {
  T v[N];
};

// ---- bf16 ------------------------------------------------------------------------------------------------------------------

DS_DEVICE float widen(float v) { return v; }
DS_DEVICE float widen(bf16 v) { return bits_as_float(static_cast<uint32_t>(v.bits) << 16); }
// Round to nearest, ties to even; NaN stays NaN: the bits of dspark::to_bf16.
DS_DEVICE bf16 narrow(float f) {
  uint32_t u = float_as_bits(f);
  if ((u & 0x7fffffffu) > 0x7f800000u) return bf16{static_cast<uint16_t>((u >> 16) | 0x40u)};
  u += 0x7fffu + ((u >> 16) & 1u);
  return bf16{static_cast<uint16_t>(u >> 16)};
}
template <typename T>
DS_DEVICE T from_float(float f) {
  if constexpr (sizeof(T) == 2) return narrow(f);
  else return f;
}

// ---- sums in a fixed order -------------------------------------------------------------------------------------------------

// The sum over a warp's lanes, in every lane, by halving: the same tree whatever else is at work.
template <typename T>
DS_DEVICE T warp_sum(T v) {
  for (int step = kWarp / 2; step > 0; step /= 2) v += shuffle_xor(v, step);
  return v;
}
// The sum over a block's threads, in every thread: warps first, then their sums in order. `scratch` holds warps() values and
// may be used again after the next sync_block().
template <typename T>
DS_DEVICE T block_sum(T v, Shared<T> scratch) {
  v = warp_sum(v);
  sync_block();
  if (lane() == 0) scratch.set(warp(), v);
  sync_block();
  T total = scratch[0];
  for (int w = 1; w < warps(); ++w) total += scratch[w];
  return total;
}

}  // namespace dspark::cuda
