// What one ISA level offers to the driver in gemm.cc: packing, tile products and a peak measurement, as plain function
// pointers. Included by the kernel sources too, so: no std types, no inline code.
//
// Packed forms (a "panel" is a group of rows of A, or `nr` columns of B, for a range of k; K is padded with zeros to a
// multiple of the k unit):
//   f32 panel         [k][width] f32
//   bf16 pair panel   [k/2][width][2] bf16: two neighbouring k beside each other, 32 bits a column, what VDPBF16PS eats
//   AMX A panel       [k/32][rows, 16 or 32][32] bf16: whole tile rows
// A tile product computes rows x nr elements; each element is one chain of fused multiply-adds in the order of k, the same
// for every row count, so a row's bits do not depend on its neighbours.
#pragma once

#include <stdint.h>

namespace dspark::model::cpu {

struct TileArgs {
  int64_t k;         // a multiple of the k unit
  const void* a;     // packed panel of A
  const void* b;     // packed panel of B
  const float* in;   // added to the product; null for none
  int64_t in_stride;
  void* out;         // f32, or bf16 when out_bf16
  int64_t out_stride;
  int out_bf16;
  int n;             // columns to read from `in` and write to `out`, 1..nr
};
using TileFn = void (*)(const TileArgs&);

struct PackArgs {
  const void* src;   // [width_used, k] when rows, [k, width_used] when cols
  int64_t stride;    // elements
  int src_bf16;
  int dst_bf16;      // dst is a bf16 panel; otherwise f32
  int width;         // width of the panel
  int width_used;    // <= width: the rest is zero
  int64_t k;         // of the source
  int64_t k_pad;     // of the panel, >= k: the rest is zero
  void* dst;
  int past_caches;   // dst is read much later: 64-byte aligned, of whole vectors
};
using PackFn = void (*)(const PackArgs&);

inline constexpr int kMaxTileRows = 32;

struct GemmTable {
  const char* name;
  int nr;            // columns of a B panel
  int mr_f32, mr_bf16;  // most rows of a tile
  int k_unit_bf16;   // K padding of bf16 panels (f32: 1)
  int row_unit_bf16; // panels of A are padded to a multiple of this many rows (AMX: 16), else 1
  int a_bf16;        // A panels for bf16 products are bf16 (VDPBF16PS, AMX) rather than widened to f32
  TileFn tile_f32[kMaxTileRows + 1];   // by row count; [0] unused
  TileFn tile_bf16[kMaxTileRows + 1];
  PackFn pack_rows, pack_cols;          // f32 and bf16 pair panels, of A and B
  PackFn pack_a16_rows, pack_a16_cols;  // A panels of bf16 products (AMX has its own form)
  void (*enter)();   // before and after a thread's tile products (AMX tile configuration)
  void (*leave)();
  // Registers only: runs `rounds` rounds and returns the floating-point operations done, through `sink` what keeps it alive.
  double (*peak_f32)(int64_t rounds, float* sink);
  double (*peak_bf16)(int64_t rounds, float* sink);
};

}  // namespace dspark::model::cpu

#define DS_DECLARE_GEMM_TABLE(level) \
  namespace dspark::model::cpu::level { const GemmTable* gemm_table(); }
DS_DECLARE_GEMM_TABLE(base)
DS_DECLARE_GEMM_TABLE(avx2)
DS_DECLARE_GEMM_TABLE(avx512)
DS_DECLARE_GEMM_TABLE(avx512bf16)
DS_DECLARE_GEMM_TABLE(amx)
#undef DS_DECLARE_GEMM_TABLE
