// Packing: copies operands into the panel forms of gemm_table.h, converting on the way.
//
// A panel is filled in units of 32 bits a row and step: one f32, or a pair of bf16 with neighbouring k. `rows` sources have
// k contiguous (a transposition), `cols` sources have the panel's width contiguous.
#include "model/ops_cpu/isa/gemm_tile.h"

namespace dspark::model::cpu::DS_ISA {
namespace {

static inline uint32_t half_at(const PackArgs& p, int64_t offset) {
  if (p.src_bf16) return static_cast<const uint16_t*>(p.src)[offset];
  return bf16_of(static_cast<const float*>(p.src)[offset]);
}
static inline float float_at(const PackArgs& p, int64_t offset) {
  if (p.src_bf16) return bits_to_float(static_cast<uint32_t>(static_cast<const uint16_t*>(p.src)[offset]) << 16);
  return static_cast<const float*>(p.src)[offset];
}

template <bool kRows>
void pack(const PackArgs& p) {
  const int64_t step_w = kRows ? p.stride : 1, step_k = kRows ? 1 : p.stride;
  if (p.dst_bf16) {
    uint32_t* dst = static_cast<uint32_t*>(p.dst);
    for (int64_t k = 0; k < p.k_pad; k += 2, dst += p.width) {
      for (int w = 0; w < p.width; ++w) {
        uint32_t low = 0, high = 0;
        if (w < p.width_used && k < p.k) low = half_at(p, w * step_w + k * step_k);
        if (w < p.width_used && k + 1 < p.k) high = half_at(p, w * step_w + (k + 1) * step_k);
        dst[w] = low | high << 16;
      }
    }
  } else {
    float* dst = static_cast<float*>(p.dst);
    for (int64_t k = 0; k < p.k_pad; ++k, dst += p.width)
      for (int w = 0; w < p.width; ++w)
        dst[w] = w < p.width_used && k < p.k ? float_at(p, w * step_w + k * step_k) : 0.0f;
  }
}

}  // namespace

void fill_packing(GemmTable& table) {
  table.pack_rows = table.pack_a16_rows = pack<true>;
  table.pack_cols = table.pack_a16_cols = pack<false>;
}

}  // namespace dspark::model::cpu::DS_ISA
