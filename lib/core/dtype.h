// Element types and the conversions between them that every layer needs.
#pragma once

#include <bit>
#include <cstdint>
#include <string_view>

namespace dspark {

enum class DType : uint8_t { f32, f64, c128, bf16, f16, i64, i32, u8, boolean };

// Bytes of one element.
constexpr int64_t dtype_bytes(DType t) {
  switch (t) {
    case DType::c128: return 16;
    case DType::f64: case DType::i64: return 8;
    case DType::f32: case DType::i32: return 4;
    case DType::bf16: case DType::f16: return 2;
    case DType::u8: case DType::boolean: return 1;
  }
  return 0;
}

// The safetensors spelling: "F32", "BF16", "I64", "BOOL", ...
std::string_view dtype_name(DType t);
// Throws on a name that is not one of ours.
DType dtype_from_name(std::string_view name);

// bf16 as stored: the high half of an fp32. A plain integer type, so that kernels of every ISA share it.
struct bf16 {
  uint16_t bits;
};

inline float to_float(bf16 v) { return std::bit_cast<float>(static_cast<uint32_t>(v.bits) << 16); }

// Round to nearest, ties to even; NaN stays NaN.
inline bf16 to_bf16(float f) {
  uint32_t u = std::bit_cast<uint32_t>(f);
  if ((u & 0x7fffffffu) > 0x7f800000u) return bf16{static_cast<uint16_t>((u >> 16) | 0x40u)};
  u += 0x7fffu + ((u >> 16) & 1u);
  return bf16{static_cast<uint16_t>(u >> 16)};
}

float f16_to_float(uint16_t bits);

}  // namespace dspark
