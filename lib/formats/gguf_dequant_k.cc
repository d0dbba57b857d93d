// K-quants: super-blocks of 256 elements whose 16 or 32 element sub-blocks have small integer scales of their own.
#include "formats/gguf_dequant.h"

namespace dspark::formats::dequant {
namespace {

// Q4_K and Q5_K: eight 6-bit scales and eight 6-bit minima in 12 bytes. The first four of each are the low 6 bits of
// bytes 0-3 and 4-7; the others take their low nibble from bytes 8-11 and their top two bits from the former's spare
// ones.
struct Scales {
  int scale[8], minimum[8];
  explicit Scales(const uint8_t* p) {
    for (int i = 0; i < 4; ++i) {
      scale[i] = p[i] & 63;
      minimum[i] = p[i + 4] & 63;
      scale[i + 4] = (p[i + 8] & 15) | ((p[i] >> 6) << 4);
      minimum[i + 4] = (p[i + 8] >> 4) | ((p[i + 4] >> 6) << 4);
    }
  }
};

}  // namespace

// 16 x (4-bit scale | 4-bit minimum), 64 bytes of 2 bits, d, dmin
void q2_k(const uint8_t* p, int64_t n, float* y) {
  for (; n-- > 0; p += 84) {
    const float d = half_at(p + 80), dmin = half_at(p + 82);
    const uint8_t* scales = p;
    for (int half = 0; half < 2; ++half)
      for (int shift = 0; shift < 8; shift += 2)
        for (int sub = 0; sub < 2; ++sub) {
          const uint8_t s = *scales++;
          const uint8_t* q = p + 16 + 32 * half + 16 * sub;
          const float dl = d * static_cast<float>(s & 15), ml = dmin * static_cast<float>(s >> 4);
          for (int j = 0; j < 16; ++j) *y++ = dl * static_cast<float>((q[j] >> shift) & 3) - ml;
        }
  }
}

// 32 bytes of third bits, 64 bytes of 2 bits, 12 bytes of scales, d
void q3_k(const uint8_t* p, int64_t n, float* y) {
  for (; n-- > 0; p += 110) {
    const float d = half_at(p + 108);
    const uint8_t *packed = p + 96, *high = p;
    int idx = 0;
    for (int half = 0; half < 2; ++half)
      for (int shift = 0; shift < 8; shift += 2)
        for (int sub = 0; sub < 2; ++sub, ++idx) {
          // 6-bit scales: low nibbles in bytes 0-7 (0-7 low half, 8-15 high half), top two bits in bytes 8-11.
          const int low = (packed[idx % 8] >> (idx < 8 ? 0 : 4)) & 15,
                    top = (packed[8 + idx % 4] >> (2 * (idx / 4))) & 3;
          const float dl = d * static_cast<float>((low | (top << 4)) - 32);
          const uint8_t* q = p + 32 + 32 * half + 16 * sub;
          const int bit = 4 * half + shift / 2;
          // The third bit counts as 0 where it is set and as -4 where it is not.
          for (int j = 0; j < 16; ++j) {
            const int minus = (high[16 * sub + j] >> bit) & 1 ? 0 : 4;
            *y++ = dl * static_cast<float>(((q[j] >> shift) & 3) - minus);
          }
        }
  }
}

// d, dmin, 12 bytes of scales and minima, 128 bytes of nibbles
void q4_k(const uint8_t* p, int64_t n, float* y) {
  for (; n-- > 0; p += 144) {
    const float d = half_at(p), dmin = half_at(p + 2);
    const Scales s(p + 4);
    for (int sub = 0; sub < 8; ++sub) {
      const uint8_t* q = p + 16 + 32 * (sub / 2);
      const int shift = sub % 2 * 4;
      const float dl = d * static_cast<float>(s.scale[sub]), ml = dmin * static_cast<float>(s.minimum[sub]);
      for (int j = 0; j < 32; ++j) *y++ = dl * static_cast<float>((q[j] >> shift) & 15) - ml;
    }
  }
}

// as Q4_K with 32 bytes of fifth bits before the nibbles
void q5_k(const uint8_t* p, int64_t n, float* y) {
  for (; n-- > 0; p += 176) {
    const float d = half_at(p), dmin = half_at(p + 2);
    const Scales s(p + 4);
    const uint8_t* high = p + 16;
    for (int sub = 0; sub < 8; ++sub) {
      const uint8_t* q = p + 48 + 32 * (sub / 2);
      const int shift = sub % 2 * 4;
      const float dl = d * static_cast<float>(s.scale[sub]), ml = dmin * static_cast<float>(s.minimum[sub]);
      for (int j = 0; j < 32; ++j)
        *y++ = dl * static_cast<float>(((q[j] >> shift) & 15) | (((high[j] >> sub) & 1) << 4)) - ml;
    }
  }
}

// 128 bytes of nibbles, 64 bytes of 2 bits, 16 signed scales, d
void q6_k(const uint8_t* p, int64_t n, float* y) {
  for (; n-- > 0; p += 210) {
    const float d = half_at(p + 208);
    for (int i = 0; i < 256; ++i) {
      const int half = i / 128, quarter = i % 128 / 32, j = i % 32;
      const int low = (p[64 * half + 32 * (quarter % 2) + j] >> (quarter / 2 * 4)) & 15;
      const int top = (p[128 + 32 * half + j] >> (2 * quarter)) & 3;
      const float dl = d * static_cast<float>(static_cast<int8_t>(p[192 + i / 16]));
      *y++ = dl * static_cast<float>((low | (top << 4)) - 32);
    }
  }
}

}  // namespace dspark::formats::dequant
