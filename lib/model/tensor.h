// Tensor: a typed view of a matrix in some device's memory. It owns nothing and cannot be dereferenced.
//
// Everything is [rows, cols] with a row stride in elements; [A, B, D] is [A*B, D], a vector is [1, n]. Only backends
// turn an Address into a pointer (model/backend_access.h); code above ops.h can slice views and hand them to operators,
// nothing else, so it runs unchanged on a GPU, on the scalar reference and on the planner.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "core/error.h"

namespace dspark::model {

class Address {
 public:
  constexpr Address() = default;
  constexpr explicit operator bool() const { return bits_ != 0; }
  constexpr Address operator+(int64_t bytes) const { return Address(bits_ + static_cast<uintptr_t>(bytes)); }
  constexpr bool operator==(const Address&) const = default;

 private:
  friend struct BackendAccess;
  constexpr explicit Address(uintptr_t bits) : bits_(bits) {}
  uintptr_t bits_ = 0;
};

struct Tensor {
  Address data;
  DType dtype = DType::f32;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t stride = 0;  // elements from one row to the next, >= cols

  explicit operator bool() const { return static_cast<bool>(data); }
  int64_t size() const { return rows * cols; }

  // Rows [first, first + count).
  Tensor row_range(int64_t first, int64_t count) const {
    DS_ASSERT(first >= 0 && count >= 0 && first + count <= rows, "rows [{}, +{}) of {}", first, count, rows);
    return {data + first * stride * dtype_bytes(dtype), dtype, count, cols, stride};
  }
  // Columns [first, first + count), in place through the stride.
  Tensor col_range(int64_t first, int64_t count) const {
    DS_ASSERT(first >= 0 && count >= 0 && first + count <= cols, "columns [{}, +{}) of {}", first, count, cols);
    return {data + first * dtype_bytes(dtype), dtype, rows, count, stride};
  }
  // Every `step`-th row from `first` on: slot `first` of all blocks of `step` rows.
  Tensor every(int64_t step, int64_t first) const {
    DS_ASSERT(step > 0 && first >= 0 && first < step && rows % step == 0, "row {} of every {} of {}", first, step, rows);
    return {data + first * stride * dtype_bytes(dtype), dtype, rows / step, cols, stride * step};
  }
  // The same memory as another matrix of equal size; contiguous tensors only.
  Tensor reshaped(int64_t new_rows, int64_t new_cols) const {
    DS_ASSERT(new_rows * new_cols == rows * cols && (stride == cols || rows <= 1), "{}x{} as {}x{}, stride {}", rows,
              cols, new_rows, new_cols, stride);
    return {data, dtype, new_rows, new_cols, new_cols};
  }
};

// A matrix in host memory, for uploads and downloads. dtype conversions happen on the way.
struct HostMatrix {
  void* data = nullptr;
  DType dtype = DType::f32;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t stride = 0;
};

struct ConstHostMatrix {
  const void* data = nullptr;
  DType dtype = DType::f32;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t stride = 0;
};

}  // namespace dspark::model
