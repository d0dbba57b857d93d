// Internal to the GGUF reader: one function a block type. Each turns `n` consecutive blocks into n * block_elements
// floats with exactly ggml's order of operations, so that values agree with it bit for bit (no contraction: see
// CMakeLists.txt).
// The comment above each definition is the block's layout in bytes.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/dtype.h"

namespace dspark::formats::dequant {

using Fn = void (*)(const uint8_t* blocks, int64_t n, float* out);

inline uint16_t u16_at(const uint8_t* p) { return static_cast<uint16_t>(p[0] | (p[1] << 8)); }
inline uint32_t u32_at(const uint8_t* p) {
  uint32_t v;
  std::memcpy(&v, p, 4);
  return v;
}
inline float half_at(const uint8_t* p) { return f16_to_float(u16_at(p)); }

// gguf_dequant.cc: plain types and the blocks of 32.
void f32(const uint8_t*, int64_t, float*);
void f64(const uint8_t*, int64_t, float*);
void f16(const uint8_t*, int64_t, float*);
void bf16(const uint8_t*, int64_t, float*);
void q4_0(const uint8_t*, int64_t, float*);
void q4_1(const uint8_t*, int64_t, float*);
void q5_0(const uint8_t*, int64_t, float*);
void q5_1(const uint8_t*, int64_t, float*);
void q8_0(const uint8_t*, int64_t, float*);
// gguf_dequant_k.cc: super-blocks of 256.
void q2_k(const uint8_t*, int64_t, float*);
void q3_k(const uint8_t*, int64_t, float*);
void q4_k(const uint8_t*, int64_t, float*);
void q5_k(const uint8_t*, int64_t, float*);
void q6_k(const uint8_t*, int64_t, float*);
// gguf_dequant_fp4.cc: 4-bit tables and ternary.
void iq4_nl(const uint8_t*, int64_t, float*);
void iq4_xs(const uint8_t*, int64_t, float*);
void mxfp4(const uint8_t*, int64_t, float*);
void nvfp4(const uint8_t*, int64_t, float*);
void tq1_0(const uint8_t*, int64_t, float*);
void tq2_0(const uint8_t*, int64_t, float*);
// gguf_dequant_iq.cc: code books of signed grids.
void iq2_xxs(const uint8_t*, int64_t, float*);
void iq2_xs(const uint8_t*, int64_t, float*);
void iq2_s(const uint8_t*, int64_t, float*);
void iq3_xxs(const uint8_t*, int64_t, float*);
void iq3_s(const uint8_t*, int64_t, float*);
void iq1_s(const uint8_t*, int64_t, float*);
void iq1_m(const uint8_t*, int64_t, float*);

}  // namespace dspark::formats::dequant
