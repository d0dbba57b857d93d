// Tile products of one ISA level: `rows` x kNr elements of C from one packed panel of A and one of B.
//
// The accumulators of a whole tile stay in registers over k; every step loads kVecs vectors of B and broadcasts one number
// of A a row. fp32 products are one FMA chain an element; bf16 ones either VDPBF16PS on pairs of k, or both halves of a
// pair widened (exact) and two FMAs in the order of k.
#include "model/ops_cpu/isa/gemm_tile.h"

namespace dspark::model::cpu::DS_ISA {
namespace {

template <int R>
void tile_f32(const TileArgs& t) {
  prefetch_tile(t, R);
  Vec acc[R][kVecs] = {};
  const float* a = static_cast<const float*>(t.a);
  const float* b = static_cast<const float*>(t.b);
  for (int64_t k = 0; k < t.k; ++k, a += R, b += kNr) {
    Vec bv[kVecs];
    DS_UNROLL for (int v = 0; v < kVecs; ++v) bv[v] = vec_load(b + v * kLanes);
    DS_UNROLL for (int r = 0; r < R; ++r) {
      const Vec av = vec_splat(a[r]);
      DS_UNROLL for (int v = 0; v < kVecs; ++v) acc[r][v] = vec_fma(av, bv[v], acc[r][v]);
    }
  }
  finish(acc, t);
}

#if DS_ISA_LEVEL >= 3
template <int R>
void tile_bf16(const TileArgs& t) {
  prefetch_tile(t, R);
  Vec acc[R][kVecs] = {};
  const uint32_t* a = static_cast<const uint32_t*>(t.a);
  const uint32_t* b = static_cast<const uint32_t*>(t.b);
  for (int64_t k = 0; k < t.k; k += 2, a += R, b += kNr) {
    VecBits bv[kVecs];
    DS_UNROLL for (int v = 0; v < kVecs; ++v) bv[v] = vec_load_bits(b + v * kLanes);
    DS_UNROLL for (int r = 0; r < R; ++r) {
      const __m512bh av = (__m512bh)_mm512_set1_epi32(static_cast<int>(a[r]));
      DS_UNROLL for (int v = 0; v < kVecs; ++v)
        acc[r][v] = (Vec)_mm512_dpbf16_ps((__m512)acc[r][v], av, (__m512bh)bv[v]);
    }
  }
  finish(acc, t);
}
#else
template <int R>
void tile_bf16(const TileArgs& t) {
  prefetch_tile(t, R);
  Vec acc[R][kVecs] = {};
  const float* a = static_cast<const float*>(t.a);  // [k][R], widened when packed
  const uint32_t* b = static_cast<const uint32_t*>(t.b);
  for (int64_t k = 0; k < t.k; k += 2, a += 2 * R, b += kNr) {
    Vec half[kVecs];
    DS_UNROLL for (int v = 0; v < kVecs; ++v) half[v] = (Vec)(vec_load_bits(b + v * kLanes) << 16);
    DS_UNROLL for (int r = 0; r < R; ++r) {
      const Vec av = vec_splat(a[r]);
      DS_UNROLL for (int v = 0; v < kVecs; ++v) acc[r][v] = vec_fma(av, half[v], acc[r][v]);
    }
    // The pairs are loaded again rather than kept: there are no registers left to keep them in.
    asm volatile("" ::: "memory");
    DS_UNROLL for (int v = 0; v < kVecs; ++v) half[v] = (Vec)(vec_load_bits(b + v * kLanes) & 0xffff0000u);
    DS_UNROLL for (int r = 0; r < R; ++r) {
      const Vec av = vec_splat(a[R + r]);
      DS_UNROLL for (int v = 0; v < kVecs; ++v) acc[r][v] = vec_fma(av, half[v], acc[r][v]);
    }
  }
  finish(acc, t);
}
#endif

template <int R>
void fill_tiles(GemmTable& table) {
  table.tile_f32[R] = tile_f32<R>;
  if constexpr (R <= kMrBf16) table.tile_bf16[R] = tile_bf16<R>;
  if constexpr (R > 1) fill_tiles<R - 1>(table);
}

// Independent chains in registers only: enough of them to hide the latency of two FMA pipes.
constexpr int kChains = kMr >= 14 ? 24 : 12;

double peak_f32(int64_t rounds, float* sink) {
  Vec acc[kChains];
  for (int i = 0; i < kChains; ++i) acc[i] = vec_splat(1.0f + 0.01f * static_cast<float>(i));
  Vec x = vec_splat(0.9999f), y = vec_splat(sink[0]);
  for (int64_t k = 0; k < rounds; ++k) {
    DS_UNROLL for (int i = 0; i < kChains; ++i) acc[i] = vec_fma(acc[i], x, y);
  }
  for (int i = 1; i < kChains; ++i) acc[0] += acc[i];
  sink[0] = acc[0][0];
  return 2.0 * kLanes * kChains * static_cast<double>(rounds);
}

#if DS_ISA_LEVEL >= 3
double peak_bf16(int64_t rounds, float* sink) {
  Vec acc[kChains];
  for (int i = 0; i < kChains; ++i) acc[i] = vec_splat(1.0f + 0.01f * static_cast<float>(i));
  const __m512bh x = (__m512bh)_mm512_set1_epi32(0x3f803e12), y = (__m512bh)_mm512_set1_epi32(0x3a123c34);
  for (int64_t k = 0; k < rounds; ++k) {
    DS_UNROLL for (int i = 0; i < kChains; ++i) acc[i] = (Vec)_mm512_dpbf16_ps((__m512)acc[i], x, y);
  }
  for (int i = 1; i < kChains; ++i) acc[0] += acc[i];
  sink[0] = acc[0][0];
  return 4.0 * kLanes * kChains * static_cast<double>(rounds);
}
#endif

void nothing() {}

GemmTable make_table() {
  GemmTable t = {};
  t.nr = kNr;
  t.mr_f32 = kMr;
  t.mr_bf16 = kMrBf16;
  t.k_unit_bf16 = 2;
  t.row_unit_bf16 = 1;
  t.a_bf16 = DS_ISA_LEVEL >= 3;
  fill_tiles<kMr>(t);
  t.enter = t.leave = nothing;
  t.peak_f32 = peak_f32;
#if DS_ISA_LEVEL >= 3
  t.peak_bf16 = peak_bf16;
#else
  t.peak_bf16 = peak_f32;
#endif
  fill_packing(t);
#if DS_ISA_LEVEL == 4
  fill_amx(t);
#endif
  return t;
}

}  // namespace

void finish_rows(const float* sums, int rows, const TileArgs& t) {
  for (int r = 0; r < rows; ++r, sums += kNr) {
    float in[kNr] = {};
    if (t.in != nullptr) memcpy(in, t.in + r * t.in_stride, static_cast<size_t>(t.n) * 4);
    alignas(64) float out[kNr];
    for (int v = 0; v < kVecs; ++v) {
      Vec sum = vec_load(sums + v * kLanes);
      if (t.in != nullptr) sum += vec_load(in + v * kLanes);
      if (t.out_bf16) vec_store_bf16(reinterpret_cast<uint16_t*>(out) + v * kLanes, sum);
      else vec_store(out + v * kLanes, sum);
    }
    const int64_t e = t.out_bf16 ? 2 : 4;
    memcpy(static_cast<char*>(t.out) + r * t.out_stride * e, out, static_cast<size_t>(t.n * e));
  }
}

const GemmTable* gemm_table() {
  static const GemmTable table = make_table();
  return &table;
}

}  // namespace dspark::model::cpu::DS_ISA
