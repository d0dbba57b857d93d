// IQ1, IQ2, IQ3: indices into code books ("grids") of eight or four magnitudes, with signs beside them.
#include "formats/gguf_dequant.h"
#include "formats/gguf_grids.h"

namespace dspark::formats::dequant {
namespace {

constexpr float kIq2[4] = {8, 25, 43, 0};  // three levels are used
constexpr float kIq3Xxs[8] = {4, 12, 20, 28, 36, 44, 52, 62};
constexpr float kIq3S[8] = {1, 3, 5, 7, 9, 11, 13, 15};
constexpr float kDelta = 0.125f;  // IQ1

// Seven stored signs; the eighth makes the number of minus signs even.
uint8_t with_parity(uint32_t seven) {
  const auto low = static_cast<uint8_t>(seven & 127);
  return static_cast<uint8_t>(low | (__builtin_parity(low) << 7));
}

// `n` values of a grid entry with `bits` bits an element, scaled, minus where a sign bit is set.
float* signed_grid(uint32_t entry, int bits, int n, const float* levels, uint32_t signs, float scale, float* y) {
  for (int j = 0; j < n; ++j) {
    const float v = scale * levels[(entry >> (bits * j)) & ((1u << bits) - 1)];
    *y++ = (signs >> j) & 1 ? -v : v;
  }
  return y;
}

float* iq2_eight(uint16_t entry, uint8_t signs, float scale, float* y) {
  return signed_grid(entry, 2, 8, kIq2, signs, scale, y);
}

// Two entries of four.
float* iq3_eight(uint16_t a, uint16_t b, const float* levels, uint8_t signs, float scale, float* y) {
  y = signed_grid(a, 3, 4, levels, signs, scale, y);
  return signed_grid(b, 3, 4, levels, signs >> 4, scale, y);
}

float* iq1_eight(uint16_t entry, float delta, float scale, float* y) {
  for (int j = 0; j < 8; ++j) *y++ = scale * (static_cast<float>(((entry >> (2 * j)) & 3) - 1) + delta);
  return y;
}

float quarter_scale(float d, uint32_t s) { return d * (0.5f + static_cast<float>(s)) * 0.25f; }

}  // namespace

// d, 8 x (4 index bytes, 4 x 7 sign bits and a 4-bit scale)
void iq2_xxs(const uint8_t* p, int64_t n, float* y) {
  for (; n-- > 0; p += 66) {
    const float d = half_at(p);
    for (int sub = 0; sub < 8; ++sub) {
      const uint8_t* q = p + 2 + 8 * sub;
      const uint32_t rest = u32_at(q + 4);
      const float scale = quarter_scale(d, rest >> 28);
      for (int k = 0; k < 4; ++k) y = iq2_eight(kIq2XxsGrid[q[k]], with_parity(rest >> (7 * k)), scale, y);
    }
  }
}

// d, 32 x (9-bit index, 7 sign bits), 16 4-bit scales
void iq2_xs(const uint8_t* p, int64_t n, float* y) {
  for (; n-- > 0; p += 74) {
    const float d = half_at(p);
    for (int k = 0; k < 32; ++k) {
      const uint32_t q = u16_at(p + 2 + 2 * k);
      const uint32_t s = (p[66 + k / 4] >> (k / 2 % 2 * 4)) & 15;
      y = iq2_eight(kIq2XsGrid[q & 511], with_parity(q >> 9), quarter_scale(d, s), y);
    }
  }
}

// d, 32 index bytes, 32 sign bytes, 8 bytes of index bits 8-9, 16 scales
void iq2_s(const uint8_t* p, int64_t n, float* y) {
  for (; n-- > 0; p += 82) {
    const float d = half_at(p);
    for (int k = 0; k < 32; ++k) {
      const int idx = p[2 + k] | (((p[66 + k / 4] >> (k % 4 * 2)) & 3) << 8);
      const uint32_t s = (p[74 + k / 4] >> (k / 2 % 2 * 4)) & 15;
      y = iq2_eight(kIq2SGrid[idx], p[34 + k], quarter_scale(d, s), y);
    }
  }
}

// d, 64 index bytes, 8 x (4 x 7 sign bits and a 4-bit scale)
void iq3_xxs(const uint8_t* p, int64_t n, float* y) {
  for (; n-- > 0; p += 98) {
    const float d = half_at(p);
    for (int sub = 0; sub < 8; ++sub) {
      const uint8_t* q = p + 2 + 8 * sub;
      const uint32_t rest = u32_at(p + 66 + 4 * sub);
      const float scale = d * (0.5f + static_cast<float>(rest >> 28)) * 0.5f;
      for (int k = 0; k < 4; ++k)
        y = iq3_eight(kIq3XxsGrid[q[2 * k]], kIq3XxsGrid[q[2 * k + 1]], kIq3Xxs, with_parity(rest >> (7 * k)), scale,
                      y);
    }
  }
}

// d, 64 index bytes, 8 bytes of ninth bits, 32 sign bytes, 8 scales
void iq3_s(const uint8_t* p, int64_t n, float* y) {
  for (; n-- > 0; p += 110) {
    const float d = half_at(p);
    const auto entry = [&](int i) { return kIq3SGrid[p[2 + i] | (((p[66 + i / 8] >> (i % 8)) & 1) << 8)]; };
    for (int k = 0; k < 32; ++k) {
      const int s = (p[106 + k / 8] >> (k / 4 % 2 * 4)) & 15;
      y = iq3_eight(entry(2 * k), entry(2 * k + 1), kIq3S, p[74 + k], d * static_cast<float>(1 + 2 * s), y);
    }
  }
}

// d, 32 index bytes, 8 x (4 x 3 index bits, 3-bit scale, sign of delta)
void iq1_s(const uint8_t* p, int64_t n, float* y) {
  for (; n-- > 0; p += 50) {
    const float d = half_at(p);
    for (int sub = 0; sub < 8; ++sub) {
      const int high = u16_at(p + 34 + 2 * sub);
      const float scale = d * static_cast<float>(2 * ((high >> 12) & 7) + 1), delta = high & 0x8000 ? -kDelta : kDelta;
      for (int k = 0; k < 4; ++k)
        y = iq1_eight(kIq1Grid[p[2 + 4 * sub + k] | (((high >> (3 * k)) & 7) << 8)], delta, scale, y);
    }
  }
}

// 32 index bytes, 32 x (3 index bits, sign of delta), then four 16-bit words: each four 3-bit scales, and in its top
// four bits a quarter of the half-precision d.
void iq1_m(const uint8_t* p, int64_t n, float* y) {
  for (; n-- > 0; p += 56) {
    int words[4], d_bits = 0;
    for (int i = 0; i < 4; ++i) {
      words[i] = u16_at(p + 48 + 2 * i);
      d_bits |= (words[i] >> 12) << (4 * i);
    }
    const float d = f16_to_float(static_cast<uint16_t>(d_bits));
    for (int k = 0; k < 32; ++k) {
      const int high = p[32 + k / 2] >> (k % 2 * 4), sub = k / 2;
      const float scale = d * static_cast<float>(2 * ((words[sub / 4] >> (sub % 4 * 3)) & 7) + 1);
      y = iq1_eight(kIq1Grid[p[k] | ((high & 7) << 8)], high & 8 ? -kDelta : kDelta, scale, y);
    }
  }
}

}  // namespace dspark::formats::dequant
