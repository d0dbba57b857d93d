#include <array>

#include "core/error.h"
#include "formats/gguf.h"

namespace dspark::formats {
namespace {

using enum GgmlType;
constexpr std::array<GgmlTypeInfo, 33> kTypes = {{
    {F32, "F32", 1, 4},
    {F16, "F16", 1, 2},
    {Q4_0, "Q4_0", 32, 18},
    {Q4_1, "Q4_1", 32, 20},
    {Q5_0, "Q5_0", 32, 22},
    {Q5_1, "Q5_1", 32, 24},
    {Q8_0, "Q8_0", 32, 34},
    {Q8_1, "Q8_1", 32, 36},
    {Q2_K, "Q2_K", 256, 84},
    {Q3_K, "Q3_K", 256, 110},
    {Q4_K, "Q4_K", 256, 144},
    {Q5_K, "Q5_K", 256, 176},
    {Q6_K, "Q6_K", 256, 210},
    {Q8_K, "Q8_K", 256, 292},
    {IQ2_XXS, "IQ2_XXS", 256, 66},
    {IQ2_XS, "IQ2_XS", 256, 74},
    {IQ3_XXS, "IQ3_XXS", 256, 98},
    {IQ1_S, "IQ1_S", 256, 50},
    {IQ4_NL, "IQ4_NL", 32, 18},
    {IQ3_S, "IQ3_S", 256, 110},
    {IQ2_S, "IQ2_S", 256, 82},
    {IQ4_XS, "IQ4_XS", 256, 136},
    {I8, "I8", 1, 1},
    {I16, "I16", 1, 2},
    {I32, "I32", 1, 4},
    {I64, "I64", 1, 8},
    {F64, "F64", 1, 8},
    {IQ1_M, "IQ1_M", 256, 56},
    {BF16, "BF16", 1, 2},
    {TQ1_0, "TQ1_0", 256, 54},
    {TQ2_0, "TQ2_0", 256, 66},
    {MXFP4, "MXFP4", 32, 17},
    {NVFP4, "NVFP4", 64, 36},
}};

}  // namespace

const GgmlTypeInfo* ggml_type_info(uint32_t number) {
  for (const GgmlTypeInfo& info : kTypes)
    if (static_cast<uint32_t>(info.type) == number) return &info;
  return nullptr;
}

const GgmlTypeInfo& ggml_type_info(GgmlType type) {
  const GgmlTypeInfo* info = ggml_type_info(static_cast<uint32_t>(type));
  DS_ASSERT(info, "ggml type {}", static_cast<uint32_t>(type));
  return *info;
}

const char* gguf_type_name(GgufType type) {
  constexpr std::array<const char*, 13> kNames = {"u8",   "i8",     "u16",   "i16", "u32", "i32", "f32",
                                                  "bool", "string", "array", "u64", "i64", "f64"};
  return kNames.at(static_cast<size_t>(type));
}

int64_t GgufTensor::count() const {
  const GgmlTypeInfo& info = ggml_type_info(type);
  return static_cast<int64_t>(data.size()) / info.block_bytes * info.block_elements;
}

std::vector<float> read_f32(const GgufTensor& tensor) {
  std::vector<float> out(static_cast<size_t>(tensor.count()));
  try {
    dequantise(tensor.type, tensor.data, out);
  } catch (const Error& e) {
    fail("tensor '{}': {}", tensor.name, e.what());
  }
  return out;
}

}  // namespace dspark::formats
