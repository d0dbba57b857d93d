#include "model/ops_ref/convert.h"

#include <complex>
#include <limits>

namespace dspark::model::ref {
namespace {

bool is_integer(DType t) { return t == DType::i64 || t == DType::i32 || t == DType::u8 || t == DType::boolean; }

const char* at(const void* base, DType dtype, int64_t i) {
  return static_cast<const char*>(base) + i * dtype_bytes(dtype);
}
char* at(void* base, DType dtype, int64_t i) { return static_cast<char*>(base) + i * dtype_bytes(dtype); }

int64_t load_integer(const void* p, DType t) {
  switch (t) {
    case DType::i64:
      return *static_cast<const int64_t*>(p);
    case DType::i32:
      return *static_cast<const int32_t*>(p);
    case DType::u8:
    case DType::boolean:
      return *static_cast<const uint8_t*>(p);
    default:
      break;
  }
  fail("convert: {} is not an integer dtype", dtype_name(t));
}

void store_integer(void* p, DType t, int64_t v) {
  switch (t) {
    case DType::i64:
      *static_cast<int64_t*>(p) = v;
      return;
    case DType::i32:
      DS_REQUIRE(v >= std::numeric_limits<int32_t>::min() && v <= std::numeric_limits<int32_t>::max(),
                 "convert: {} does not fit into 32 bits", v);
      *static_cast<int32_t*>(p) = static_cast<int32_t>(v);
      return;
    case DType::u8:
    case DType::boolean:
      DS_REQUIRE(v >= 0 && v <= 255, "convert: {} does not fit into a byte", v);
      *static_cast<uint8_t*>(p) = static_cast<uint8_t>(v);
      return;
    default:
      break;
  }
  fail("convert: {} is not an integer dtype", dtype_name(t));
}

std::complex<double> load_float(const void* p, DType t) {
  switch (t) {
    case DType::c128:
      return *static_cast<const std::complex<double>*>(p);
    case DType::f64:
      return *static_cast<const double*>(p);
    case DType::f32:
      return *static_cast<const float*>(p);
    case DType::bf16:
      return to_float(*static_cast<const bf16*>(p));
    case DType::f16:
      return f16_to_float(*static_cast<const uint16_t*>(p));
    default:
      return static_cast<double>(load_integer(p, t));
  }
}

void store_float(void* p, DType t, std::complex<double> v) {
  switch (t) {
    case DType::c128:
      *static_cast<std::complex<double>*>(p) = v;
      return;
    case DType::f64:
      *static_cast<double*>(p) = v.real();
      return;
    case DType::f32:
      *static_cast<float*>(p) = static_cast<float>(v.real());
      return;
    case DType::bf16:
      *static_cast<bf16*>(p) = to_bf16(static_cast<float>(v.real()));
      return;
    default:
      fail("convert: no conversion to {}", dtype_name(t));
  }
}

}  // namespace

void convert(void* dst, DType dst_dtype, int64_t dst_stride, const void* src, DType src_dtype, int64_t src_stride,
             int64_t rows, int64_t cols) {
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < cols; ++j) {
      char* to = at(dst, dst_dtype, i * dst_stride + j);
      const char* from = at(src, src_dtype, i * src_stride + j);
      if (is_integer(dst_dtype))
        store_integer(to, dst_dtype, load_integer(from, src_dtype));
      else
        store_float(to, dst_dtype, load_float(from, src_dtype));
    }
  }
}

}  // namespace dspark::model::ref
