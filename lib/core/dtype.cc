#include "core/dtype.h"

#include <array>
#include <cmath>
#include <utility>

#include "core/error.h"

namespace dspark {
namespace {
constexpr std::array<std::pair<DType, std::string_view>, 9> kNames = {{{DType::f32, "F32"},
                                                                      {DType::f64, "F64"},
                                                                      {DType::c128, "C128"},
                                                                      {DType::bf16, "BF16"},
                                                                      {DType::f16, "F16"},
                                                                      {DType::i64, "I64"},
                                                                      {DType::i32, "I32"},
                                                                      {DType::u8, "U8"},
                                                                      {DType::boolean, "BOOL"}}};
}

std::string_view dtype_name(DType t) {
  for (const auto& [type, name] : kNames)
    if (type == t) return name;
  return "?";
}

DType dtype_from_name(std::string_view name) {
  for (const auto& [type, known] : kNames)
    if (known == name) return type;
  fail("element type '{}' is not supported (F32, F64, BF16, F16, I64, I32, U8, BOOL are)", name);
}

float f16_to_float(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits >> 15) << 31;
  const int exponent = (bits >> 10) & 31;
  const uint32_t mantissa = bits & 1023u;
  if (exponent == 0) {
    const float v = std::ldexp(static_cast<float>(mantissa), -24);
    return sign ? -v : v;
  }
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
  return std::bit_cast<float>(sign | (static_cast<uint32_t>(exponent + 112) << 23) | (mantissa << 13));
}

}  // namespace dspark
