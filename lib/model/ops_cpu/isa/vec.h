// Vectors of the level's natural width, for the kernels whose registers are laid out by hand (attention, the loss sweeps).
// They are the compiler's own vector types: the same source is SSE, AVX2, AVX-512 or NEON. Lane-wise arithmetic gives the
// same bits at every width; only sums over lanes depend on it, and those are part of the level's numerics.
#pragma once

#include "model/ops_cpu/isa/math.h"

namespace dspark::model::cpu::DS_ISA {

#if DS_ISA_LEVEL >= 2
#define DS_VEC_BYTES 64
#elif DS_ISA_LEVEL == 1
#define DS_VEC_BYTES 32
#else
#define DS_VEC_BYTES 16
#endif
constexpr int kWidth = DS_VEC_BYTES / 4;  // floats of a vector; divides kPad

typedef float vf __attribute__((vector_size(DS_VEC_BYTES)));
typedef int32_t vi __attribute__((vector_size(DS_VEC_BYTES)));
typedef uint32_t vu __attribute__((vector_size(DS_VEC_BYTES)));
// In memory: any address, any type beside them.
typedef float vf_mem __attribute__((vector_size(DS_VEC_BYTES), aligned(4), may_alias));
typedef uint32_t vu_mem __attribute__((vector_size(DS_VEC_BYTES), aligned(4), may_alias));
typedef uint16_t vh_mem __attribute__((vector_size(DS_VEC_BYTES / 2), aligned(2), may_alias));
typedef uint16_t vh __attribute__((vector_size(DS_VEC_BYTES / 2)));

// x - 0 is x for every x (0 + x is not: -0), so this is one broadcast.
DS_INLINE vf splat(float x) { return x - vf{}; }
DS_INLINE vi splat(int32_t x) { return vi{} + x; }
DS_INLINE vi iota() {
  vi v{};
  for (int i = 0; i < kWidth; ++i) v[i] = i;
  return v;
}
DS_INLINE vf select(vi mask, vf yes, vf no) { return mask ? yes : no; }
DS_INLINE vf max(vf a, vf b) { return a > b ? a : b; }

DS_INLINE vf load_v(const float* p) { return *reinterpret_cast<const vf_mem*>(p); }
DS_INLINE vf load_v(const Half* p) {
  const vh half = *reinterpret_cast<const vh_mem*>(p);
  return reinterpret_cast<vf>(__builtin_convertvector(half, vu) << 16);
}
DS_INLINE void store_v(float* p, vf x) { *reinterpret_cast<vf_mem*>(p) = x; }
DS_INLINE void store_v(Half* p, vf x) {
  const vu u = reinterpret_cast<vu>(x);
  const vu rounded = u + 0x7fffu + ((u >> 16) & 1u);
  const vu quiet = u | 0x400000u;
  const vu bits = (x == x ? rounded : quiet) >> 16;
  *reinterpret_cast<vh_mem*>(p) = __builtin_convertvector(bits, vh);
}
// The first n < kWidth elements; the other lanes are `fill`.
template <typename T>
DS_INLINE vf load_part(const T* p, int64_t n, float fill) {
  vf v = splat(fill);
  for (int i = 0; i < kWidth; ++i)
    if (i < n) v[i] = load(p[i]);
  return v;
}
template <typename T>
DS_INLINE void store_part(T* p, int64_t n, vf v) {
  for (int i = 0; i < kWidth; ++i)
    if (i < n) store(p + i, v[i]);
}

// All lanes folded into one, by quarters of 128 bits and then inside the last one.
template <typename Op>
DS_INLINE float fold(vf v, Op op) {
  typedef float v4 __attribute__((vector_size(16)));
  v4 part[kWidth / 4];
  __builtin_memcpy(part, &v, sizeof v);
  for (int w = kWidth / 8; w > 0; w /= 2)
    for (int i = 0; i < w; ++i) part[i] = op(part[i], part[i + w]);
  const v4 x = part[0];
  const v4 y = op(x, __builtin_shufflevector(x, x, 2, 3, 0, 1));
  return op(y, __builtin_shufflevector(y, y, 1, 0, 3, 2))[0];
}
DS_INLINE float sum_of(vf v) {
  return fold(v, [](auto a, auto b) { return a + b; });
}
DS_INLINE float max_of(vf v) {
  return fold(v, [](auto a, auto b) { return a > b ? a : b; });
}

// e^x about 1 ulp; 0 below -87 (the reach of normal floats), for softmax, where x <= 0. NaN for NaN.
DS_INLINE vf exp_v(vf x) {
  const vf magic = splat(12582912.0f);  // see exp_f
  const vf y = x > splat(88.0f) ? splat(88.0f) : x;
  const vf shifted = y * 1.44269504088896341f + magic;
  const vi n = reinterpret_cast<vi>(shifted) - 0x4b400000;
  const vf nf = shifted - magic;
  vf r = y - nf * 0.693359375f;
  r = r - nf * -2.12194440e-4f;
  vf p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const vf result = p * reinterpret_cast<vf>((n + 127) << 23);
  return x < splat(-87.0f) ? vf{} : result;
}

// ln(1 + x) for x in [0, 1], about 2 ulp: the series of log_f after a halving of 1 + x above sqrt(2).
DS_INLINE vf log1p_v(vf x) {
  const vi big = x > splat(0.41421356f);
  const vf f = select(big, (x - 1.0f) * 0.5f, x);
  const vf e = select(big, splat(1.0f), vf{});
  const vf z = f * f;
  vf p = splat(7.0376836292e-2f);
  p = p * f - 1.1514610310e-1f;
  p = p * f + 1.1676998740e-1f;
  p = p * f - 1.2420140846e-1f;
  p = p * f + 1.4249322787e-1f;
  p = p * f - 1.6668057665e-1f;
  p = p * f + 2.0000714765e-1f;
  p = p * f - 2.4999993993e-1f;
  p = p * f + 3.3333331174e-1f;
  p = p * f * z;
  p = p + e * -2.12194440e-4f;
  p = p - 0.5f * z;
  return f + p + e * 0.693359375f;
}

}  // namespace dspark::model::cpu::DS_ISA
