// Arithmetic shared by the kernel sources: bf16 conversions, exp and log without branches, fixed-order sums, and the dispatch
// over fp32 and bf16 rows. Everything sits in DS_ISA, so that each level has its own copy, and is written so that the
// compiler can vectorise loops around it.
#pragma once

#include <stdint.h>

#include "model/ops_cpu/kernels.h"

namespace dspark::model::cpu::DS_ISA {

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

// e^x, about 1 ulp over the whole range, gradual underflow to 0, +inf above, NaN for NaN.
DS_INLINE float exp_f(float x) {
  x = x < -104.0f ? -104.0f : x;
  x = x > 89.0f ? 89.0f : x;
  // n = round(x / ln 2): the addition of 1.5 * 2^23 rounds to an integer and leaves it in the low mantissa bits.
  const float magic = 12582912.0f;
  const float shifted = x * 1.44269504088896341f + magic;
  const int32_t n = static_cast<int32_t>(as_bits(shifted)) - 0x4b400000;
  const float nf = shifted - magic;
  float r = x - nf * 0.693359375f;  // ln 2 in two parts; the first product is exact
  r = r - nf * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  // 2^n in two factors: n reaches from -150 to 128, beyond the exponents of one float.
  const int32_t half = n >> 1;
  const float a = as_float(static_cast<uint32_t>(half + 127) << 23);
  const float b = as_float(static_cast<uint32_t>(n - half + 127) << 23);
  return p * a * b;
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

// Adds up the lanes as a tree: the same order everywhere.
DS_INLINE float sum_lanes(const float* lane) {
  float s[kLanes];
  for (int j = 0; j < kLanes; ++j) s[j] = lane[j];
  for (int w = kLanes / 2; w > 0; w /= 2)
    for (int j = 0; j < w; ++j) s[j] += s[j + w];
  return s[0];
}

// sum over i < n of term(i), in kLanes interleaved partial sums; the tail goes into the first lanes.
template <typename F>
DS_INLINE float lane_sum(int64_t n, F term) {
  float lane[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int j = 0; j < kLanes; ++j) lane[j] += term(i + j);
  for (int j = 0; i + j < n; ++j) lane[j] += term(i + j);
  return sum_lanes(lane);
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
