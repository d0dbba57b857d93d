// Shared by the tile sources of one ISA level: the tile shape and the end of a tile product.
#pragma once

#include "model/ops_cpu/gemm_table.h"
#include "model/ops_cpu/isa/gemm_simd.h"

namespace dspark::model::cpu::DS_ISA {

constexpr int kVecs = 2;  // vectors across a tile
constexpr int kNr = kVecs * kLanes;
// Accumulators rows x kVecs, plus kVecs of B and one broadcast, fill the 32 (AVX-512, NEON) or 16 registers.
#if DS_ISA_LEVEL >= 2 || defined(__aarch64__)
constexpr int kMr = 14;
#else
constexpr int kMr = 6;
#endif

// Adds `in` to row `r` of a finished tile and writes it out. Columns from t.n on are neither read nor written: they go
// through a buffer, so that the arithmetic is the same code.
static inline void finish_row(const Vec* acc, const TileArgs& t, int r) {
  Vec sum[kVecs];
  for (int v = 0; v < kVecs; ++v) sum[v] = acc[v];
  if (t.in != nullptr) {
    const float* in = t.in + r * t.in_stride;
    float buffer[kNr] = {};
    if (t.n < kNr) {
      memcpy(buffer, in, static_cast<size_t>(t.n) * 4);
      in = buffer;
    }
    for (int v = 0; v < kVecs; ++v) sum[v] += vec_load(in + v * kLanes);
  }
  if (t.out_bf16) {
    uint16_t* out = static_cast<uint16_t*>(t.out) + r * t.out_stride;
    uint16_t buffer[kNr];
    uint16_t* to = t.n < kNr ? buffer : out;
    for (int v = 0; v < kVecs; ++v) vec_store_bf16(to + v * kLanes, sum[v]);
    if (t.n < kNr) memcpy(out, buffer, static_cast<size_t>(t.n) * 2);
  } else {
    float* out = static_cast<float*>(t.out) + r * t.out_stride;
    float buffer[kNr];
    float* to = t.n < kNr ? buffer : out;
    for (int v = 0; v < kVecs; ++v) vec_store(to + v * kLanes, sum[v]);
    if (t.n < kNr) memcpy(out, buffer, static_cast<size_t>(t.n) * 4);
  }
}

void fill_packing(GemmTable& table);  // gemm_pack.cc
#if DS_ISA_LEVEL == 4
void fill_amx(GemmTable& table);  // gemm_amx.cc
#endif

}  // namespace dspark::model::cpu::DS_ISA
