// Shared by the tile sources of one ISA level: the tile shape and the end of a tile product.
#pragma once

#include "model/ops_cpu/gemm_table.h"
#include "model/ops_cpu/isa/gemm_simd.h"

namespace dspark::model::cpu::DS_ISA {

constexpr int kVecs = 2;  // vectors across a tile
constexpr int kNr = kVecs * kLanes;
// Accumulators (rows x kVecs), kVecs of B and a broadcast must fit the 32 (AVX-512, NEON) or 16 registers. Products that
// widen bf16 need a few more; with full rows GCC spills.
#if DS_ISA_LEVEL >= 2 || defined(__aarch64__)
constexpr int kMr = 14, kMrWiden = 12;
#else
constexpr int kMr = 6, kMrWiden = 5;
#endif
constexpr int kMrBf16 = DS_ISA_LEVEL >= 3 ? kMr : kMrWiden;

// The general end of a tile product: `sums` [rows][kNr] plus `in`, to `out`. Columns from t.n on are neither read nor
// written: they go through a buffer, so that the arithmetic is the same code.
void finish_rows(const float* sums, int rows, const TileArgs& t);

// The end of a tile product whose sums are in registers. A whole f32 tile is written from there.
template <int R>
static inline void finish(const Vec (&acc)[R][kVecs], const TileArgs& t) {
  if (t.n < kNr || t.out_bf16) {
    alignas(64) float sums[R * kNr];
    DS_UNROLL for (int r = 0; r < R; ++r)
      DS_UNROLL for (int v = 0; v < kVecs; ++v) vec_store(sums + r * kNr + v * kLanes, acc[r][v]);
    return finish_rows(sums, R, t);
  }
  float* out = static_cast<float*>(t.out);
  if (t.in == nullptr) {
    DS_UNROLL for (int r = 0; r < R; ++r, out += t.out_stride)
      DS_UNROLL for (int v = 0; v < kVecs; ++v) vec_store(out + v * kLanes, acc[r][v]);
  } else {
    const float* in = t.in;
    DS_UNROLL for (int r = 0; r < R; ++r, in += t.in_stride, out += t.out_stride)
      DS_UNROLL for (int v = 0; v < kVecs; ++v) vec_store(out + v * kLanes, acc[r][v] + vec_load(in + v * kLanes));
  }
}

// The tile of C arrives while the product is computed.
static inline void prefetch_tile(const TileArgs& t, int rows) {
  const char* p = static_cast<const char*>(t.out_bf16 || t.in == nullptr ? t.out : t.in);
  const int64_t step = t.out_bf16 ? t.out_stride * 2 : (t.in == nullptr ? t.out_stride : t.in_stride) * 4;
  for (int r = 0; r < rows; ++r, p += step) {
    __builtin_prefetch(p, 1, 3);
    __builtin_prefetch(p + 64, 1, 3);
  }
}

void fill_packing(GemmTable& table);  // gemm_pack.cc
#if DS_ISA_LEVEL == 4
void fill_amx(GemmTable& table);  // gemm_amx.cc
#endif

}  // namespace dspark::model::cpu::DS_ISA
