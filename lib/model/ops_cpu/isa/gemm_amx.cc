// AMX tile products: 32 x 32 elements of C in four tiles (2x2), two tiles of A, two of B, 32 k a step.
//
// B comes in the same pair panels as for VDPBF16PS: 16 pairs of k deep, a panel's half is exactly a tile. A panels hold whole
// tile rows, [k/32][16 or 32][32], with zero rows below the last one; those cost time on small M and change no other row.
// fp32 products use the AVX-512 tiles.
#if DS_ISA_LEVEL == 4
#include "model/ops_cpu/isa/gemm_tile.h"

namespace dspark::model::cpu::DS_ISA {
namespace {

constexpr int kTileRows = 16, kTileBytes = 64, kStepK = 32;
static_assert(kNr == 2 * kTileRows);

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {kTileBytes, kTileBytes, kTileBytes, kTileBytes,
                            kTileBytes, kTileBytes, kTileBytes, kTileBytes};
  uint8_t rows[16] = {kTileRows, kTileRows, kTileRows, kTileRows, kTileRows, kTileRows, kTileRows, kTileRows};
};
static_assert(sizeof(TileConfig) == 64);

void enter() {
  const TileConfig config;
  _tile_loadconfig(&config);
}
void leave() { _tile_release(); }

template <bool kTwo>  // 17 to 32 rows
void product(const TileArgs& t, float* sums) {
  constexpr int kRows = kTwo ? 32 : 16;
  const uint8_t* a = static_cast<const uint8_t*>(t.a);
  const uint8_t* b = static_cast<const uint8_t*>(t.b);
  _tile_zero(0);
  _tile_zero(1);
  if (kTwo) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t k = 0; k < t.k; k += kStepK, a += kRows * kTileBytes, b += kTileRows * kNr * 4) {
    _tile_loadd(6, b, kNr * 4);
    _tile_loadd(4, a, kTileBytes);
    _tile_loadd(7, b + kTileBytes, kNr * 4);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (kTwo) {
      _tile_loadd(5, a + kTileRows * kTileBytes, kTileBytes);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums, kNr * 4);
  _tile_stored(1, sums + kTileRows, kNr * 4);
  if (kTwo) {
    _tile_stored(2, sums + kTileRows * kNr, kNr * 4);
    _tile_stored(3, sums + kTileRows * kNr + kTileRows, kNr * 4);
  }
}

template <int R>
void tile(const TileArgs& t) {
  alignas(64) float sums[(R > 16 ? 32 : 16) * kNr];
  product<(R > 16)>(t, sums);
  finish_rows(sums, R, t);
}

template <int R>
void fill_tiles(GemmTable& table) {
  table.tile_bf16[R] = tile<R>;
  if constexpr (R > 1) fill_tiles<R - 1>(table);
}

double peak_bf16(int64_t rounds, float* sink) {
  alignas(64) uint16_t values[2][kTileRows * 32];
  for (int i = 0; i < kTileRows * 32; ++i) {
    values[0][i] = static_cast<uint16_t>(bf16_of(0.001f * static_cast<float>(i % 97 - 48)));
    values[1][i] = static_cast<uint16_t>(bf16_of(0.001f * static_cast<float>(i % 89 - 44)));
  }
  enter();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_loadd(4, values[0], kTileBytes);
  _tile_loadd(5, values[1], kTileBytes);
  _tile_loadd(6, values[0], kTileBytes);
  _tile_loadd(7, values[1], kTileBytes);
  for (int64_t i = 0; i < rounds; ++i) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  alignas(64) float sums[kTileRows * kTileRows];
  _tile_stored(0, sums, kTileBytes);
  leave();
  sink[0] = sums[0];
  return 4.0 * 2.0 * kTileRows * kTileRows * kStepK * static_cast<double>(rounds);
}

}  // namespace

void fill_amx(GemmTable& table) {
  table.mr_bf16 = 32;
  table.k_unit_bf16 = kStepK;
  table.row_unit_bf16 = 16;
  fill_tiles<32>(table);
  table.enter = enter;
  table.leave = leave;
  table.peak_bf16 = peak_bf16;
}

}  // namespace dspark::model::cpu::DS_ISA
#endif
