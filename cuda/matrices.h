// From tensors to what kernels take.
#pragma once

#include "core/error.h"
#include "cuda/kernels.h"
#include "model/backend_access.h"

namespace dspark::cuda {

// An empty tensor stays empty. i32 matrices pass as fp32 where they are only moved.
inline Matrix mat(const model::Tensor& t) {
  if (!t) return {};
  const int64_t bytes = dtype_bytes(t.dtype);
  DS_REQUIRE(t.dtype == DType::bf16 || t.dtype == DType::f32 || t.dtype == DType::i32, "the cuda backend has no kernels for {}", dtype_name(t.dtype));
  void* p = model::BackendAccess::raw(t.data);
  return {p, t.rows, t.cols, t.stride, bytes == 2, reinterpret_cast<uintptr_t>(p) % 16 == 0 && (t.rows <= 1 || t.stride * bytes % 16 == 0)};
}

// Heads of head_dim columns side by side: 16-byte accesses need heads that begin at multiples of 16 bytes.
inline Matrix heads_of(const model::Tensor& t, int64_t head_dim) {
  DS_REQUIRE(head_dim <= kMaxHeadDim, "the cuda backend has attention for heads of up to {} columns, not {}; use --device cpu", kMaxHeadDim, head_dim);
  Matrix m = mat(t);
  m.vector = m.vector && head_dim % 8 == 0;
  return m;
}

}  // namespace dspark::cuda
