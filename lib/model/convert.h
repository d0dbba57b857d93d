// Conversions in host memory, for backends whose uploads and downloads change the dtype.
#pragma once

#include "core/dtype.h"

namespace dspark::model {

// n elements; floats to floats (f32, f64, bf16, and from f16; rounded once, to nearest even) or integers to integers
// (range-checked: an Error). The same dtype keeps its bits.
void convert_elements(void* dst, DType dst_dtype, const void* src, DType src_dtype, int64_t n);

}  // namespace dspark::model
