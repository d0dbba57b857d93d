// cuda/device.h for nvcc. Only device.h includes this; what each function means is said there and in the PTX manual.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/dtype.h"

#define DS_KERNEL __global__
#define DS_DEVICE __device__ __forceinline__
#define DS_DEVICE_CALL __device__ __noinline__
#define DS_UNROLL _Pragma("unroll")
// At most this many threads a block: lets the compiler use the registers that leaves.
#define DS_THREADS(n) __launch_bounds__(n)
// The same for a kernel that needs the registers more than it needs a second block on its multiprocessor.
#define DS_THREADS_ALONE(n) __launch_bounds__(n, 1)

namespace dspark::cuda {

using Stream = void*;  // a CUstream

struct Dim {
  unsigned x = 1, y = 1, z = 1;
};

DS_DEVICE int thread() { return static_cast<int>(threadIdx.x); }
DS_DEVICE int threads() { return static_cast<int>(blockDim.x); }
DS_DEVICE int64_t block_x() { return blockIdx.x; }
DS_DEVICE int64_t block_y() { return blockIdx.y; }
DS_DEVICE int64_t blocks_x() { return gridDim.x; }
DS_DEVICE int64_t blocks_y() { return gridDim.y; }

DS_DEVICE float bits_as_float(uint32_t u) { return __uint_as_float(u); }
DS_DEVICE uint32_t float_as_bits(float f) { return __float_as_uint(f); }

// sin and cos of pi x, |x| <= 1.
DS_DEVICE void sin_cos_pi(float x, float& s, float& c) { sincospif(x, &s, &c); }

// ---- memory ----------------------------------------------------------------------------------------------------------------

template <typename T>
DS_DEVICE T load(const T* p) {
  return *p;
}
template <typename T>
DS_DEVICE void store(T* p, const T& v) {
  *p = v;
}

DS_DEVICE char* shared_base() {
  extern __shared__ __align__(16) char dspark_shared_memory[];
  return dspark_shared_memory;
}

template <typename T>
class Shared {
 public:
  // `count` elements from byte `offset` of the block's shared memory on.
  DS_DEVICE Shared(int offset, int) : p_(reinterpret_cast<T*>(shared_base() + offset)) {}
  DS_DEVICE T operator[](int i) const { return p_[i]; }
  DS_DEVICE void set(int i, T v) const { p_[i] = v; }
  // Element i on as one vector access: i * sizeof(T) must be a multiple of sizeof(V).
  template <typename V>
  DS_DEVICE V get(int i) const {
    return *reinterpret_cast<const V*>(p_ + i);
  }
  template <typename V>
  DS_DEVICE void set_vector(int i, V v) const {
    *reinterpret_cast<V*>(p_ + i) = v;
  }
  DS_DEVICE uint32_t address(int i) const { return static_cast<uint32_t>(__cvta_generic_to_shared(p_ + i)); }

 private:
  T* p_;
};

// ---- block and warp --------------------------------------------------------------------------------------------------------

DS_DEVICE void sync_block() { __syncthreads(); }
DS_DEVICE void sync_warp() { __syncwarp(); }
template <typename T>
DS_DEVICE T shuffle(T v, int source, uint32_t mask = 0xffffffffu) {
  return __shfl_sync(mask, v, source);
}
template <typename T>
DS_DEVICE T shuffle_xor(T v, int bits, uint32_t mask = 0xffffffffu) {
  return __shfl_xor_sync(mask, v, bits);
}
template <typename T>
DS_DEVICE T shuffle_up(T v, int by, uint32_t mask = 0xffffffffu) {
  return __shfl_up_sync(mask, v, by);
}
template <typename T>
DS_DEVICE T shuffle_down(T v, int by, uint32_t mask = 0xffffffffu) {
  return __shfl_down_sync(mask, v, by);
}
DS_DEVICE uint32_t vote_ballot(bool v, uint32_t mask = 0xffffffffu) { return __ballot_sync(mask, v); }
DS_DEVICE bool vote_any(bool v, uint32_t mask = 0xffffffffu) { return __any_sync(mask, v) != 0; }
DS_DEVICE bool vote_all(bool v, uint32_t mask = 0xffffffffu) { return __all_sync(mask, v) != 0; }

// ---- asynchronous copies ---------------------------------------------------------------------------------------------------

// 16 bytes from global to shared memory, both 16-byte aligned; zeros when not `valid` (p is then not read). The target is
// undefined until cp_async_wait has covered the group; other threads need a barrier after that.
template <typename T>
DS_DEVICE void cp_async16(Shared<T> to, int i, const T* p, bool valid = true) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to.address(i)), "l"(p), "r"(valid ? 16 : 0) : "memory");
}
DS_DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most kPending of this thread's groups are still on their way.
template <int kPending>
DS_DEVICE void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// ---- tensor cores ----------------------------------------------------------------------------------------------------------

// Four 8x8 matrices of 16-bit elements. Lane l names row l % 8 of matrix l / 8 (16 bytes, 16-byte aligned); register i of lane l
// is elements (l / 4, 2 (l % 4)) and the next of matrix i, or of its transpose.
DS_DEVICE void ldmatrix4(uint32_t (&r)[4], Shared<bf16> from, int i) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(from.address(i)) : "memory");
}
DS_DEVICE void ldmatrix4_transposed(uint32_t (&r)[4], Shared<bf16> from, int i) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(from.address(i)) : "memory");
}
// c [16, 8] += a [16, 16] b [16, 8]; fragments as in the PTX manual's mma.m16n8k16.
DS_DEVICE void mma_bf16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// ---- launch ----------------------------------------------------------------------------------------------------------------

// Throws an Error that names what CUDA said (cuda/toolkit/launch_check.cc).
void check_launch(int error, const char* what, const char* text);

template <typename... Params, typename... Args>
void launch(Stream stream, Dim grid, Dim block, int shared_bytes, void (*kernel)(Params...), const Args&... args) {
  if (shared_bytes > 48 << 10) {
    const cudaError_t e = cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    check_launch(e, "ask for shared memory", cudaGetErrorString(e));
  }
  kernel<<<dim3(grid.x, grid.y, grid.z), dim3(block.x, block.y, block.z), static_cast<size_t>(shared_bytes), static_cast<cudaStream_t>(stream)>>>(static_cast<Params>(args)...);
  const cudaError_t e = cudaGetLastError();
  check_launch(e, "launch a kernel", cudaGetErrorString(e));
}

}  // namespace dspark::cuda
