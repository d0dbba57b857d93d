// Copies between element types: f64 -> c128 is the real part, c128 -> f64 drops the imaginary part, c128 -> c128 keeps
// both.
#pragma once

#include "model/tensor.h"

namespace dspark::model::ref {

// dst = src, [rows, cols], strides in elements. Integers are range-checked against dst's type (an Error).
void convert(void* dst, DType dst_dtype, int64_t dst_stride, const void* src, DType src_dtype, int64_t src_stride,
             int64_t rows, int64_t cols);

}  // namespace dspark::model::ref
