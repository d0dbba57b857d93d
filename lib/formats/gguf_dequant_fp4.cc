// Four-bit indices into a table of 16 values (IQ4, MXFP4, NVFP4) and ternary weights (TQ).
#include <bit>
#include <cmath>

#include "formats/gguf_dequant.h"

namespace dspark::formats::dequant {
namespace {

constexpr int8_t kNonLinear[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
// E2M1 values, doubled to be integers; the scales below are halved instead.
constexpr int8_t kE2m1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// n_bytes bytes -> 2 * n_bytes values: low nibbles first, then high ones.
void nibbles(const uint8_t* q, int n_bytes, const int8_t* table, float d, float* y) {
  for (int j = 0; j < n_bytes; ++j) {
    y[j] = d * static_cast<float>(table[q[j] & 15]);
    y[j + n_bytes] = d * static_cast<float>(table[q[j] >> 4]);
  }
}

// 2^(e - 128): half of an E8M0 scale. The two smallest are subnormal.
float e8m0_half(uint8_t e) {
  return std::bit_cast<float>(e < 2 ? 0x00200000u << e : static_cast<uint32_t>(e - 1) << 23);
}

// Half of an unsigned E4M3 scale (bias 7); 0x7f, its NaN, counts as 0 as in ggml.
float ue4m3_half(uint8_t x) {
  if (x == 0 || x == 0x7f) return 0.0f;
  const int exponent = (x >> 3) & 15, mantissa = x & 7;
  return exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -10)
                       : std::ldexp(static_cast<float>(8 + mantissa), exponent - 11);
}

}  // namespace

// d, 16 bytes
void iq4_nl(const uint8_t* p, int64_t n, float* y) {
  for (; n-- > 0; p += 18, y += 32) nibbles(p + 2, 16, kNonLinear, half_at(p), y);
}

// d, 8 x 2 high scale bits, 8 x 4 low scale bits, 128 bytes
void iq4_xs(const uint8_t* p, int64_t n, float* y) {
  for (; n-- > 0; p += 136) {
    const float d = half_at(p);
    const int high = u16_at(p + 2);
    for (int sub = 0; sub < 8; ++sub, y += 32) {
      const int low = (p[4 + sub / 2] >> (sub % 2 * 4)) & 15, top = (high >> (2 * sub)) & 3;
      nibbles(p + 8 + 16 * sub, 16, kNonLinear, d * static_cast<float>((low | (top << 4)) - 32), y);
    }
  }
}

// E8M0 scale, 16 bytes
void mxfp4(const uint8_t* p, int64_t n, float* y) {
  for (; n-- > 0; p += 17, y += 32) nibbles(p + 1, 16, kE2m1, e8m0_half(p[0]), y);
}

// four E4M3 scales, 4 x 8 bytes
void nvfp4(const uint8_t* p, int64_t n, float* y) {
  for (; n-- > 0; p += 36)
    for (int sub = 0; sub < 4; ++sub, y += 16) nibbles(p + 4 + 8 * sub, 8, kE2m1, ue4m3_half(p[sub]), y);
}

// Five ternary digits a byte, as a fixed-point fraction: multiplying by 3^k (modulo 256) brings digit k to the top.
// 48 bytes of five digits, 4 bytes of four, d
void tq1_0(const uint8_t* p, int64_t n, float* y) {
  constexpr uint8_t kPower[5] = {1, 3, 9, 27, 81};
  for (; n-- > 0; p += 54) {
    const float d = half_at(p + 52);
    const auto run = [&](int begin, int bytes, int digits) {
      for (int k = 0; k < digits; ++k)
        for (int j = 0; j < bytes; ++j) {
          const auto turned = static_cast<uint8_t>(p[begin + j] * kPower[k]);
          *y++ = d * static_cast<float>(((turned * 3) >> 8) - 1);
        }
    };
    run(0, 32, 5);
    run(32, 16, 5);
    run(48, 4, 4);
  }
}

// 64 bytes of 2 bits, d
void tq2_0(const uint8_t* p, int64_t n, float* y) {
  for (; n-- > 0; p += 66) {
    const float d = half_at(p + 64);
    for (int half = 0; half < 2; ++half)
      for (int shift = 0; shift < 8; shift += 2)
        for (int j = 0; j < 32; ++j) *y++ = d * static_cast<float>(((p[32 * half + j] >> shift) & 3) - 1);
  }
}

}  // namespace dspark::formats::dequant
