// Packing: copies operands into the panel forms of gemm_table.h, converting on the way.
//
// A panel is filled in units of 32 bits a column and step: one f32, or a pair of bf16 with neighbouring k. `rows` sources
// have k contiguous, so blocks of kLanes x kLanes units are transposed in registers; `cols` sources have the panel's width
// contiguous and are read a vector at a time.
#include "model/ops_cpu/isa/gemm_tile.h"

namespace dspark::model::cpu::DS_ISA {
namespace {

// What a unit is made of.
enum class Unit { f32, widened, pair, rounded_pair };
constexpr bool is_pair(Unit u) { return u == Unit::pair || u == Unit::rounded_pair; }

// The first n (at most kLanes, may be <= 0) values, zeros behind them. Reads nothing behind them.
static inline VecBits load32(const void* p, int64_t n) {
  if (n >= kLanes) return vec_load_bits(p);
#if DS_ISA_LEVEL >= 2
  const __mmask16 mask = static_cast<__mmask16>(n <= 0 ? 0 : (1u << n) - 1);
  return (VecBits)_mm512_maskz_loadu_epi32(mask, p);
#else
  VecBits v = {};
  if (n > 0) memcpy(&v, p, static_cast<size_t>(n) * 4);
  return v;
#endif
}
static inline VecBits load16(const uint16_t* p, int64_t n) {
  VecHalf h = {};
  if (n >= kLanes) {
    memcpy(&h, p, sizeof h);
  } else {
#if DS_ISA_LEVEL >= 2
    const __mmask16 mask = static_cast<__mmask16>(n <= 0 ? 0 : (1u << n) - 1);
    const __m256i v = _mm256_maskz_loadu_epi16(mask, p);
    memcpy(&h, &v, sizeof h);
#else
    if (n > 0) memcpy(&h, p, static_cast<size_t>(n) * 2);
#endif
  }
  return __builtin_convertvector(h, VecBits);
}

static inline const float* floats(const PackArgs& p, int64_t offset) { return static_cast<const float*>(p.src) + offset; }
static inline const uint16_t* halves(const PackArgs& p, int64_t offset) {
  return static_cast<const uint16_t*>(p.src) + offset;
}

// kLanes units along k from `offset` on, where `left` elements are left of the row.
template <Unit kUnit>
static inline VecBits units_along_k(const PackArgs& p, int64_t offset, int64_t left) {
  if constexpr (kUnit == Unit::f32) return load32(floats(p, offset), left);
  if constexpr (kUnit == Unit::widened) return load16(halves(p, offset), left) << 16;
  uint16_t buffer[2 * kLanes] = {};
  if constexpr (kUnit == Unit::pair) {
    if (left >= 2 * kLanes) return vec_load_bits(halves(p, offset));
    if (left > 0) memcpy(buffer, halves(p, offset), static_cast<size_t>(left) * 2);
  } else {
    vec_store_bf16(buffer, (Vec)load32(floats(p, offset), left));
    vec_store_bf16(buffer + kLanes, (Vec)load32(floats(p, offset) + kLanes, left - kLanes));
  }
  return vec_load_bits(buffer);
}

// kLanes units along the width: step k (and k + 1 where a unit is a pair and `second`), `left` columns left.
template <Unit kUnit>
static inline VecBits units_along_w(const PackArgs& p, int64_t offset, int64_t left, bool second) {
  if constexpr (kUnit == Unit::f32) return load32(floats(p, offset), left);
  if constexpr (kUnit == Unit::widened) return load16(halves(p, offset), left) << 16;
  if constexpr (kUnit == Unit::pair) {
    const VecBits low = load16(halves(p, offset), left);
    return second ? low | load16(halves(p, offset + p.stride), left) << 16 : low;
  }
  uint16_t low[kLanes], high[kLanes] = {};
  vec_store_bf16(low, (Vec)load32(floats(p, offset), left));
  if (second) vec_store_bf16(high, (Vec)load32(floats(p, offset + p.stride), left));
  return load16(low, kLanes) | load16(high, kLanes) << 16;
}

// Each stage interleaves row i with row i + kLanes/2, which rotates the bits of the pair (row, lane) by one.
static inline void transpose(VecBits (&x)[kLanes]) {
  DS_UNROLL for (int stage = 1; stage < kLanes; stage *= 2) {
    VecBits y[kLanes];
    DS_UNROLL for (int i = 0; i < kLanes / 2; ++i) {
      const VecBits a = x[i], b = x[i + kLanes / 2];
#if DS_ISA_LEVEL >= 2
      y[2 * i] = __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      y[2 * i + 1] = __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#elif DS_ISA_LEVEL == 1
      y[2 * i] = __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
      y[2 * i + 1] = __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
#else
      y[2 * i] = __builtin_shufflevector(a, b, 0, 4, 1, 5);
      y[2 * i + 1] = __builtin_shufflevector(a, b, 2, 6, 3, 7);
#endif
    }
    DS_UNROLL for (int i = 0; i < kLanes; ++i) x[i] = y[i];
  }
}

// Writes units w0.. of one step. A panel narrower than a vector is written whole vectors at a time: each runs over into
// the next step's units, which are written after it. There is no next step after the `last`.
static inline void store_units(const PackArgs& p, uint32_t* step, int w0, VecBits v, bool last) {
  const int width = p.width;
#if DS_ISA_LEVEL >= 2
  if (p.past_caches) {
    _mm512_stream_si512((__m512i*)(step + w0), (__m512i)v);
    return;
  }
#endif
  if (w0 + kLanes <= width || (w0 == 0 && !last)) memcpy(step + w0, &v, sizeof v);
  else memcpy(step + w0, &v, static_cast<size_t>(width - w0) * 4);
}

// Orders stores past the caches before whatever tells other threads that they are done.
static inline void finish_stores(const PackArgs& p) {
#if DS_ISA_LEVEL >= 2
  if (p.past_caches) _mm_sfence();
#else
  (void)p;
#endif
}

template <Unit kUnit>
void pack_rows_as(const PackArgs& p) {
  constexpr int kPer = is_pair(kUnit) ? 2 : 1;
  const int64_t steps = p.k_pad / kPer;
  uint32_t* dst = static_cast<uint32_t*>(p.dst);
  for (int64_t s0 = 0; s0 < steps; s0 += kLanes, dst += kLanes * p.width) {
    const int64_t n = steps - s0 < kLanes ? steps - s0 : kLanes;
    for (int w0 = 0; w0 < p.width; w0 += kLanes) {
      VecBits block[kLanes];
      const int rows = p.width_used - w0;
      DS_UNROLL for (int i = 0; i < kLanes; ++i) {
        block[i] = VecBits{};
        if (i < rows) block[i] = units_along_k<kUnit>(p, (w0 + i) * p.stride + s0 * kPer, p.k - s0 * kPer);
      }
      transpose(block);
      if (n == kLanes) {
        DS_UNROLL for (int i = 0; i < kLanes; ++i) store_units(p, dst + i * p.width, w0, block[i], s0 + i + 1 == steps);
      } else {
        for (int64_t i = 0; i < n; ++i) store_units(p, dst + i * p.width, w0, block[i], s0 + i + 1 == steps);
      }
    }
  }
  finish_stores(p);
}

template <Unit kUnit>
void pack_cols_as(const PackArgs& p) {
  constexpr int kPer = is_pair(kUnit) ? 2 : 1;
  uint32_t* dst = static_cast<uint32_t*>(p.dst);
  for (int64_t k = 0; k < p.k_pad; k += kPer, dst += p.width)
    for (int w0 = 0; w0 < p.width; w0 += kLanes) {
      const int64_t left = k < p.k ? p.width_used - w0 : 0;
      const VecBits units = units_along_w<kUnit>(p, k * p.stride + w0, left, k + 1 < p.k);
      store_units(p, dst, w0, units, k + kPer >= p.k_pad);
    }
  finish_stores(p);
}

void pack_rows(const PackArgs& p) {
  if (p.dst_bf16) return p.src_bf16 ? pack_rows_as<Unit::pair>(p) : pack_rows_as<Unit::rounded_pair>(p);
  return p.src_bf16 ? pack_rows_as<Unit::widened>(p) : pack_rows_as<Unit::f32>(p);
}
void pack_cols(const PackArgs& p) {
  if (p.dst_bf16) return p.src_bf16 ? pack_cols_as<Unit::pair>(p) : pack_cols_as<Unit::rounded_pair>(p);
  return p.src_bf16 ? pack_cols_as<Unit::widened>(p) : pack_cols_as<Unit::f32>(p);
}

#if DS_ISA_LEVEL == 4
// A panels of AMX: tile rows of 16 pairs.
template <Unit kUnit, bool kAlongK>
void pack_tiles_as(const PackArgs& p) {
  uint32_t* dst = static_cast<uint32_t*>(p.dst);
  for (int64_t k0 = 0; k0 < p.k_pad; k0 += 2 * kLanes)
    for (int w0 = 0; w0 < p.width; w0 += kLanes, dst += kLanes * kLanes) {
      VecBits block[kLanes];
      const int rows = p.width_used - w0;
      DS_UNROLL for (int i = 0; i < kLanes; ++i) {
        block[i] = VecBits{};
        const int64_t k = k0 + 2 * i;
        if constexpr (kAlongK) {
          if (i < rows) block[i] = units_along_k<kUnit>(p, (w0 + i) * p.stride + k0, p.k - k0);
        } else {
          if (k < p.k) block[i] = units_along_w<kUnit>(p, k * p.stride + w0, rows, k + 1 < p.k);
        }
      }
      if constexpr (!kAlongK) transpose(block);
      memcpy(dst, block, sizeof block);
    }
}
void pack_tiles_rows(const PackArgs& p) {
  return p.src_bf16 ? pack_tiles_as<Unit::pair, true>(p) : pack_tiles_as<Unit::rounded_pair, true>(p);
}
void pack_tiles_cols(const PackArgs& p) {
  return p.src_bf16 ? pack_tiles_as<Unit::pair, false>(p) : pack_tiles_as<Unit::rounded_pair, false>(p);
}
#endif

}  // namespace

void fill_packing(GemmTable& table) {
  table.pack_rows = table.pack_a16_rows = pack_rows;
  table.pack_cols = table.pack_a16_cols = pack_cols;
#if DS_ISA_LEVEL == 4
  table.pack_a16_rows = pack_tiles_rows;
  table.pack_a16_cols = pack_tiles_cols;
#endif
}

}  // namespace dspark::model::cpu::DS_ISA
