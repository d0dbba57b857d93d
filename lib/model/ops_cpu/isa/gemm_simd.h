// Vectors of one ISA level for the matrix-product kernels: a float vector, its bits, and the three operations whose exact
// instruction matters. Everything is static: no symbol of this header may be shared between ISA levels.
#pragma once

#include <stdint.h>
#include <string.h>
#if DS_ISA_LEVEL >= 1
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__clang__)
#define DS_UNROLL _Pragma("unroll")
#else
#define DS_UNROLL _Pragma("GCC unroll 64")
#endif

namespace dspark::model::cpu::DS_ISA {

#if DS_ISA_LEVEL >= 2
constexpr int kLanes = 16;
#elif DS_ISA_LEVEL == 1
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef uint32_t VecBits __attribute__((vector_size(kLanes * 4)));
typedef uint16_t VecHalf __attribute__((vector_size(kLanes * 2)));

static inline Vec vec_load(const float* p) {
  Vec v;
  memcpy(&v, p, sizeof v);
  return v;
}
static inline VecBits vec_load_bits(const void* p) {
  VecBits v;
  memcpy(&v, p, sizeof v);
  return v;
}
static inline void vec_store(float* p, Vec v) { memcpy(p, &v, sizeof v); }

static inline Vec vec_splat(float x) {
#if DS_ISA_LEVEL >= 2
  return (Vec)_mm512_set1_ps(x);
#elif DS_ISA_LEVEL == 1
  return (Vec)_mm256_set1_ps(x);
#else
  return Vec{x, x, x, x};
#endif
}

// a * b + c, fused wherever the level has it (x86-64-v2 has not).
static inline Vec vec_fma(Vec a, Vec b, Vec c) {
#if DS_ISA_LEVEL >= 2
  return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif DS_ISA_LEVEL == 1
  return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (Vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

// The same rounding as to_bf16: nearest even, NaN stays NaN. Not VCVTNEPS2BF16, which flushes denormals.
static inline void vec_store_bf16(uint16_t* p, Vec v) {
  const VecBits u = (VecBits)v;
  const VecBits nan = (VecBits)((u & 0x7fffffffu) > 0x7f800000u);
  const VecBits rounded = u + 0x7fffu + ((u >> 16) & 1u);
  const VecBits r = ((nan & (u | 0x400000u)) | (~nan & rounded)) >> 16;
  const VecHalf h = __builtin_convertvector(r, VecHalf);
  memcpy(p, &h, sizeof h);
}

static inline float bits_to_float(uint32_t u) {
  float f;
  memcpy(&f, &u, 4);
  return f;
}
static inline uint32_t bf16_of(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  if ((u & 0x7fffffffu) > 0x7f800000u) return (u >> 16) | 0x40u;
  return (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
}

}  // namespace dspark::model::cpu::DS_ISA
