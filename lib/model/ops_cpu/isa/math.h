// Arithmetic shared by the kernel sources: bf16 conversions, exp and log without branches, fixed-order sums, and the
// dispatch over fp32 and bf16 rows. Everything sits in DS_ISA, so that each level has its own copy, and is written so
// that the compiler can vectorise loops around it.
#pragma once

#include <stdint.h>

#include "model/ops_cpu/kernels.h"

namespace dspark::model::cpu::DS_ISA {

// The loop's iterations touch equal indices only, although its pointers may be equal (in place).
#if defined(__clang__)
#define DS_IVDEP _Pragma("clang loop vectorize(assume_safety)")
#else
#define DS_IVDEP _Pragma("GCC ivdep")
#endif

#define DS_INLINE static inline __attribute__((always_inline, unused))

// bf16 as the kernels see it.
struct Half {
  uint16_t bits;
};

DS_INLINE float as_float(uint32_t u) { return __builtin_bit_cast(float, u); }
DS_INLINE uint32_t as_bits(float f) { return __builtin_bit_cast(uint32_t, f); }

DS_INLINE float load(float v) { return v; }
DS_INLINE float load(Half v) { return as_float(static_cast<uint32_t>(v.bits) << 16); }

// Round to nearest, ties to even; NaN stays NaN (made quiet): the same bits as dspark::to_bf16.
DS_INLINE void store(float* dst, float f) { *dst = f; }
DS_INLINE void store(Half* dst, float f) {
  const uint32_t u = as_bits(f);
  const uint32_t rounded = u + 0x7fffu + ((u >> 16) & 1u);
  const uint32_t bits = (u & 0x7fffffffu) > 0x7f800000u ? (u | 0x400000u) : rounded;
  dst->bits = static_cast<uint16_t>(bits >> 16);
}

// e^r * 2^n for |r| <= ln 2 / 2 and n in [-151, 129]: gradual underflow to 0, +inf above.
DS_INLINE float exp_reduced(float r, int32_t n) {
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  // Two factors: n reaches beyond the exponents of one float.
  const int32_t half = n >> 1;
  const float a = as_float(static_cast<uint32_t>(half + 127) << 23);
  const float b = as_float(static_cast<uint32_t>(n - half + 127) << 23);
  return p * a * b;
}

// e^x, about 1 ulp over the whole range; NaN for NaN.
DS_INLINE float exp_f(float x) {
  x = x < -104.0f ? -104.0f : x;
  x = x > 89.0f ? 89.0f : x;
  // n = round(x / ln 2): adding 1.5 * 2^23 rounds to an integer and leaves it in the low mantissa bits.
  const float magic = 12582912.0f;
  const float shifted = x * 1.44269504088896341f + magic;
  const int32_t n = static_cast<int32_t>(as_bits(shifted) - 0x4b400000u);
  const float nf = shifted - magic;
  const float r = (x - nf * 0.693359375f) - nf * -2.12194440e-4f;  // ln 2 in two parts; the first product is exact
  return exp_reduced(r, n);
}

// ln x, about 1 ulp; -inf for 0, NaN below.
DS_INLINE float log_f(float x) {
  const bool tiny = x < 1.17549435e-38f;
  const float y = tiny ? x * 8388608.0f : x;  // subnormals
  const uint32_t u = as_bits(y);
  // x = m 2^e with m in [sqrt(1/2), sqrt(2))
  const uint32_t shifted = u - 0x3f3504f3u;
  const int32_t e = (static_cast<int32_t>(shifted) >> 23) - (tiny ? 23 : 0);
  const float m = as_float((shifted & 0x007fffffu) + 0x3f3504f3u);
  const float f = m - 1.0f, ef = static_cast<float>(e), z = f * f;
  float p = 7.0376836292e-2f;
  p = p * f - 1.1514610310e-1f;
  p = p * f + 1.1676998740e-1f;
  p = p * f - 1.2420140846e-1f;
  p = p * f + 1.4249322787e-1f;
  p = p * f - 1.6668057665e-1f;
  p = p * f + 2.0000714765e-1f;
  p = p * f - 2.4999993993e-1f;
  p = p * f + 3.3333331174e-1f;
  p = p * f * z;
  p = p + ef * -2.12194440e-4f;
  p = p - 0.5f * z;
  float result = f + p + ef * 0.693359375f;
  result = x > 3.4e38f ? x : result;  // +inf; the largest floats come out right either way
  result = x == 0.0f ? -__builtin_inff() : result;
  return x >= 0.0f ? result : __builtin_nanf("");
}

// Logistic function and x * logistic(x).
DS_INLINE float sigmoid_f(float x) { return 1.0f / (1.0f + exp_f(-x)); }

constexpr int kLanes = 16;  // partial sums of a reduction: a full AVX-512 register, and enough chains for narrower ones
typedef float Lanes __attribute__((vector_size(kLanes * sizeof(float))));

// sum over i < n of term(i), in kLanes interleaved partial sums that add up as a tree: the same order everywhere. Terms
// go through a small buffer: that leaves two plain loops, which every compiler vectorises, where it often keeps lanes
// scalar when they are summed in place.
template <typename F>
DS_INLINE float lane_sum(int64_t n, F term) {
  constexpr int64_t kBuffer = 16 * kLanes;
  Lanes sum = {};
  for (int64_t i = 0; i < n; i += kBuffer) {
    const int64_t m = n - i < kBuffer ? n - i : kBuffer;
    alignas(64) float t[kBuffer];
    for (int64_t j = 0; j < m; ++j) t[j] = term(i + j);
    for (int64_t j = m; j % kLanes != 0; ++j) t[j] = 0;
    for (int64_t j = 0; j < m; j += kLanes) {
      Lanes v;
      __builtin_memcpy(&v, t + j, sizeof(v));
      sum += v;
    }
  }
  float lane[kLanes];
  __builtin_memcpy(lane, &sum, sizeof(lane));
  for (int w = kLanes / 2; w > 0; w /= 2)
    for (int j = 0; j < w; ++j) lane[j] += lane[j + w];
  return lane[0];
}

// Calls f with a typed pointer.
template <typename F>
DS_INLINE void with(In in, F f) {
  if (in.bf16)
    f(static_cast<const Half*>(in.p));
  else
    f(static_cast<const float*>(in.p));
}
template <typename F>
DS_INLINE void with(Out out, F f) {
  if (out.bf16)
    f(static_cast<Half*>(out.p));
  else
    f(static_cast<float*>(out.p));
}

}  // namespace dspark::model::cpu::DS_ISA
