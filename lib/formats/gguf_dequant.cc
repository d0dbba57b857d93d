// The plain types, the blocks of 32 with one half-precision scale, and the table of all decoders.
#include "formats/gguf_dequant.h"

#include "core/error.h"
#include "formats/gguf.h"

namespace dspark::formats {
namespace dequant {

void f32(const uint8_t* p, int64_t n, float* y) { std::memcpy(y, p, static_cast<size_t>(n) * 4); }

void f64(const uint8_t* p, int64_t n, float* y) {
  for (int64_t i = 0; i < n; ++i) {
    double v;
    std::memcpy(&v, p + 8 * i, 8);
    y[i] = static_cast<float>(v);
  }
}

void f16(const uint8_t* p, int64_t n, float* y) {
  for (int64_t i = 0; i < n; ++i) y[i] = half_at(p + 2 * i);
}

void bf16(const uint8_t* p, int64_t n, float* y) {
  for (int64_t i = 0; i < n; ++i) y[i] = to_float(dspark::bf16{u16_at(p + 2 * i)});
}

// In all of these byte j holds the low bits of elements j (low nibble) and j + 16 (high nibble).

// d, 16 bytes
void q4_0(const uint8_t* p, int64_t n, float* y) {
  for (; n-- > 0; p += 18, y += 32) {
    const float d = half_at(p);
    for (int j = 0; j < 16; ++j) {
      y[j] = d * static_cast<float>((p[2 + j] & 15) - 8);
      y[j + 16] = d * static_cast<float>((p[2 + j] >> 4) - 8);
    }
  }
}

// d, minimum, 16 bytes
void q4_1(const uint8_t* p, int64_t n, float* y) {
  for (; n-- > 0; p += 20, y += 32) {
    const float d = half_at(p), m = half_at(p + 2);
    for (int j = 0; j < 16; ++j) {
      y[j] = d * static_cast<float>(p[4 + j] & 15) + m;
      y[j + 16] = d * static_cast<float>(p[4 + j] >> 4) + m;
    }
  }
}

// d, the 32 fifth bits, 16 bytes
void q5_0(const uint8_t* p, int64_t n, float* y) {
  for (; n-- > 0; p += 22, y += 32) {
    const float d = half_at(p);
    const uint32_t high = u32_at(p + 2);
    for (int j = 0; j < 16; ++j) {
      const int a = (p[6 + j] & 15) | static_cast<int>((high >> j & 1) << 4);
      const int b = (p[6 + j] >> 4) | static_cast<int>((high >> (j + 16) & 1) << 4);
      y[j] = d * static_cast<float>(a - 16);
      y[j + 16] = d * static_cast<float>(b - 16);
    }
  }
}

// d, minimum, the 32 fifth bits, 16 bytes
void q5_1(const uint8_t* p, int64_t n, float* y) {
  for (; n-- > 0; p += 24, y += 32) {
    const float d = half_at(p), m = half_at(p + 2);
    const uint32_t high = u32_at(p + 4);
    for (int j = 0; j < 16; ++j) {
      const int a = (p[8 + j] & 15) | static_cast<int>((high >> j & 1) << 4);
      const int b = (p[8 + j] >> 4) | static_cast<int>((high >> (j + 16) & 1) << 4);
      y[j] = d * static_cast<float>(a) + m;
      y[j + 16] = d * static_cast<float>(b) + m;
    }
  }
}

// d, 32 signed bytes
void q8_0(const uint8_t* p, int64_t n, float* y) {
  for (; n-- > 0; p += 34, y += 32) {
    const float d = half_at(p);
    for (int j = 0; j < 32; ++j) y[j] = d * static_cast<float>(static_cast<int8_t>(p[2 + j]));
  }
}

namespace {
Fn decoder(GgmlType type) {
  switch (type) {
    case GgmlType::F32:
      return f32;
    case GgmlType::F64:
      return f64;
    case GgmlType::F16:
      return f16;
    case GgmlType::BF16:
      return bf16;
    case GgmlType::Q4_0:
      return q4_0;
    case GgmlType::Q4_1:
      return q4_1;
    case GgmlType::Q5_0:
      return q5_0;
    case GgmlType::Q5_1:
      return q5_1;
    case GgmlType::Q8_0:
      return q8_0;
    case GgmlType::Q2_K:
      return q2_k;
    case GgmlType::Q3_K:
      return q3_k;
    case GgmlType::Q4_K:
      return q4_k;
    case GgmlType::Q5_K:
      return q5_k;
    case GgmlType::Q6_K:
      return q6_k;
    case GgmlType::IQ4_NL:
      return iq4_nl;
    case GgmlType::IQ4_XS:
      return iq4_xs;
    case GgmlType::MXFP4:
      return mxfp4;
    case GgmlType::NVFP4:
      return nvfp4;
    case GgmlType::TQ1_0:
      return tq1_0;
    case GgmlType::TQ2_0:
      return tq2_0;
    case GgmlType::IQ2_XXS:
      return iq2_xxs;
    case GgmlType::IQ2_XS:
      return iq2_xs;
    case GgmlType::IQ2_S:
      return iq2_s;
    case GgmlType::IQ3_XXS:
      return iq3_xxs;
    case GgmlType::IQ3_S:
      return iq3_s;
    case GgmlType::IQ1_S:
      return iq1_s;
    case GgmlType::IQ1_M:
      return iq1_m;
    case GgmlType::I8:
    case GgmlType::I16:
    case GgmlType::I32:
    case GgmlType::I64:
    case GgmlType::Q8_1:
    case GgmlType::Q8_K:
      return nullptr;
  }
  return nullptr;
}
}  // namespace
}  // namespace dequant

void dequantise(GgmlType type, std::span<const std::byte> bytes, std::span<float> out) {
  const GgmlTypeInfo& info = ggml_type_info(type);
  const dequant::Fn decode = dequant::decoder(type);
  DS_REQUIRE(decode, "values of type {} cannot be read as floats", info.name);
  const auto n = static_cast<int64_t>(bytes.size()) / info.block_bytes;
  DS_ASSERT(n * info.block_bytes == static_cast<int64_t>(bytes.size()) &&
                n * info.block_elements == static_cast<int64_t>(out.size()),
            "{} bytes of {} for {} floats", bytes.size(), info.name, out.size());
  if (n > 0) decode(reinterpret_cast<const uint8_t*>(bytes.data()), n, out.data());
}

}  // namespace dspark::formats
