// Small products on scratch memory, for attention: C [M, N] (+)= A [M, K] B [K, N] with B's rows in vectors and A's units
// broadcast; C is fp32, a unit is an fp32 or a pair of bf16 with neighbouring k. Each element of C is one chain of
// multiply-adds in the order of k, whatever M, N and its place are.
#pragma once

#if DS_ISA_LEVEL == 3
#include <immintrin.h>
#endif

#include "model/ops_cpu/isa/vec.h"

namespace dspark::model::cpu::DS_ISA {

struct Pair {
  uint32_t bits;  // the lower half has the lower k
};
// Not for amx: its CPUs are Intel's, where VDPBF16PS is no faster than two FMAs.
#if DS_ISA_LEVEL == 3
#define DS_HAS_PAIRS 1
#else
#define DS_HAS_PAIRS 0
#endif

// A's unit (m, k) is a[m * row_step + k * k_step], so that A may be read transposed.
template <typename Unit>
struct SmallProduct {
  int64_t m, n, k;  // n: a multiple of kWidth; k in units
  const Unit* a;
  int64_t a_row_step, a_k_step;
  const Unit* b;
  int64_t b_stride;
  float* c;
  int64_t c_stride;
  bool add;
};

DS_INLINE vf units(const float* p) { return load_v(p); }
DS_INLINE vf broadcast(float x) { return splat(x); }
DS_INLINE vf multiply_add(float, vf acc, vf a, vf b) { return acc + a * b; }
#if DS_HAS_PAIRS
DS_INLINE __m512bh units(const Pair* p) { return (__m512bh)_mm512_loadu_si512(p); }
DS_INLINE __m512bh broadcast(Pair x) { return (__m512bh)_mm512_set1_epi32(static_cast<int>(x.bits)); }
DS_INLINE vf multiply_add(Pair, vf acc, __m512bh a, __m512bh b) { return (vf)_mm512_dpbf16_ps((__m512)acc, a, b); }
#endif

template <int kRows, int kVectors, typename Unit>
DS_INLINE void product_block(const SmallProduct<Unit>& p, int64_t row, int64_t col) {
  vf acc[kRows][kVectors];
  float* c = p.c + row * p.c_stride + col;
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v) acc[r][v] = p.add ? load_v(c + r * p.c_stride + v * kWidth) : vf{};
  const Unit* a = p.a + row * p.a_row_step;
  const Unit* b = p.b + col;
  const int64_t row_step = p.a_row_step, k_step = p.a_k_step, b_stride = p.b_stride;
  for (int64_t k = 0; k < p.k; ++k, a += k_step, b += b_stride) {
    decltype(units(b)) bv[kVectors];
    for (int v = 0; v < kVectors; ++v) bv[v] = units(b + v * kWidth);
    for (int r = 0; r < kRows; ++r) {
      const auto av = broadcast(a[r * row_step]);
      for (int v = 0; v < kVectors; ++v) acc[r][v] = multiply_add(Unit{}, acc[r][v], av, bv[v]);
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v) store_v(c + r * p.c_stride + v * kWidth, acc[r][v]);
}

template <int kVectors, typename Unit>
DS_INLINE void product_column(const SmallProduct<Unit>& p, int64_t col) {
  int64_t row = 0;
  for (; row + 6 <= p.m; row += 6) product_block<6, kVectors>(p, row, col);
  switch (p.m - row) {
    case 5: product_block<5, kVectors>(p, row, col); break;
    case 4: product_block<4, kVectors>(p, row, col); break;
    case 3: product_block<3, kVectors>(p, row, col); break;
    case 2: product_block<2, kVectors>(p, row, col); break;
    case 1: product_block<1, kVectors>(p, row, col); break;
    default: break;
  }
}

template <typename Unit>
void small_product(const SmallProduct<Unit>& p) {
  int64_t col = 0;
#if DS_ISA_LEVEL >= 2  // 32 registers: 6 x 4 sums; 16 registers: 6 x 2
  for (; col + 4 * kWidth <= p.n; col += 4 * kWidth) product_column<4>(p, col);
#endif
  for (; col + 2 * kWidth <= p.n; col += 2 * kWidth) product_column<2>(p, col);
  for (; col + kWidth <= p.n; col += kWidth) product_column<1>(p, col);
}

}  // namespace dspark::model::cpu::DS_ISA
