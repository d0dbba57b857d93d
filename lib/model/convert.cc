#include "model/convert.h"

#include <cmath>
#include <cstring>
#include <limits>

#include "core/error.h"

namespace dspark::model {
namespace {

bool is_integer(DType t) { return t == DType::i32 || t == DType::i64 || t == DType::u8 || t == DType::boolean; }

// One rounding to bf16, although there is an fp32 between: fp32 is rounded to odd first.
bf16 double_to_bf16(double v) {
  float f = static_cast<float>(v);
  if (std::isfinite(f) && static_cast<double>(f) != v) {
    uint32_t u = std::bit_cast<uint32_t>(f);
    if (std::fabs(static_cast<double>(f)) > std::fabs(v)) --u;
    f = std::bit_cast<float>(u | 1u);
  }
  return to_bf16(f);
}

double load_float(const void* p, DType t, int64_t i) {
  switch (t) {
    case DType::f32:
      return static_cast<const float*>(p)[i];
    case DType::f64:
      return static_cast<const double*>(p)[i];
    case DType::bf16:
      return to_float(static_cast<const bf16*>(p)[i]);
    case DType::f16:
      return f16_to_float(static_cast<const uint16_t*>(p)[i]);
    default:
      DS_ASSERT(false, "{} as a number", dtype_name(t));
  }
}

void store_float(void* p, DType t, int64_t i, double v) {
  switch (t) {
    case DType::f32:
      static_cast<float*>(p)[i] = static_cast<float>(v);
      return;
    case DType::f64:
      static_cast<double*>(p)[i] = v;
      return;
    case DType::bf16:
      static_cast<bf16*>(p)[i] = double_to_bf16(v);
      return;
    default:
      DS_ASSERT(false, "a number as {}", dtype_name(t));
  }
}

int64_t load_integer(const void* p, DType t, int64_t i) {
  switch (t) {
    case DType::i32:
      return static_cast<const int32_t*>(p)[i];
    case DType::i64:
      return static_cast<const int64_t*>(p)[i];
    default:
      return static_cast<const uint8_t*>(p)[i];
  }
}

void store_integer(void* p, DType t, int64_t i, int64_t v) {
  switch (t) {
    case DType::i32:
      DS_REQUIRE(v >= std::numeric_limits<int32_t>::min() && v <= std::numeric_limits<int32_t>::max(),
                 "index {} does not fit into 32 bits", v);
      static_cast<int32_t*>(p)[i] = static_cast<int32_t>(v);
      return;
    case DType::i64:
      static_cast<int64_t*>(p)[i] = v;
      return;
    default:
      DS_REQUIRE(v >= 0 && v <= 255, "value {} does not fit into 8 bits", v);
      static_cast<uint8_t*>(p)[i] = static_cast<uint8_t>(v);
  }
}

}  // namespace

void convert_elements(void* dst, DType dst_dtype, const void* src, DType src_dtype, int64_t n) {
  DS_ASSERT(is_integer(dst_dtype) == is_integer(src_dtype), "a transfer of {} to {}", dtype_name(src_dtype), dtype_name(dst_dtype));
  if (dst_dtype == src_dtype) {
    std::memcpy(dst, src, static_cast<size_t>(n * dtype_bytes(dst_dtype)));
  } else if (is_integer(dst_dtype)) {
    for (int64_t i = 0; i < n; ++i) store_integer(dst, dst_dtype, i, load_integer(src, src_dtype, i));
  } else if (dst_dtype == DType::bf16 && src_dtype == DType::f32) {
    for (int64_t i = 0; i < n; ++i) static_cast<bf16*>(dst)[i] = to_bf16(static_cast<const float*>(src)[i]);
  } else if (dst_dtype == DType::f32 && src_dtype == DType::bf16) {
    for (int64_t i = 0; i < n; ++i) static_cast<float*>(dst)[i] = to_float(static_cast<const bf16*>(src)[i]);
  } else {
    for (int64_t i = 0; i < n; ++i) store_float(dst, dst_dtype, i, load_float(src, src_dtype, i));
  }
}

}  // namespace dspark::model
