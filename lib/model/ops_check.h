// Tools of the argument checks (ops_check*.cc): shapes, dtypes, strides, aliasing.
#pragma once

#include <algorithm>
#include <initializer_list>

#include "model/backend_access.h"
#include "model/ops.h"

namespace dspark::model {

struct Named {
  const char* name;
  const Tensor& t;
};

inline bool is_float(DType t) {
  return t == DType::bf16 || t == DType::f16 || t == DType::f32 || t == DType::f64 || t == DType::c128;
}

inline uintptr_t begin_of(const Tensor& t) { return reinterpret_cast<uintptr_t>(BackendAccess::raw(t.data)); }

// Whether two views share an element. Views side by side in one wider matrix (q|k|v) interleave without sharing any.
inline bool overlap(const Tensor& a, const Tensor& b) {
  if (!a || !b || a.size() == 0 || b.size() == 0) return false;
  const int64_t a_bytes = dtype_bytes(a.dtype), b_bytes = dtype_bytes(b.dtype);
  const uintptr_t a0 = begin_of(a), b0 = begin_of(b);
  const uintptr_t a1 = a0 + static_cast<uintptr_t>(((a.rows - 1) * a.stride + a.cols) * a_bytes);
  const uintptr_t b1 = b0 + static_cast<uintptr_t>(((b.rows - 1) * b.stride + b.cols) * b_bytes);
  if (a1 <= b0 || b1 <= a0) return false;
  const int64_t pitch = a.rows > 1 ? a.stride * a_bytes : b.stride * b_bytes;
  if ((a.rows > 1 && b.rows > 1 && a.stride * a_bytes != b.stride * b_bytes) || pitch == 0) return true;
  // Column intervals modulo the common pitch.
  const int64_t gap = static_cast<int64_t>(b0 - a0);
  const int64_t offset = ((gap % pitch) + pitch) % pitch;
  return offset < a.cols * a_bytes || offset + b.cols * b_bytes > pitch;
}

class Checker {
 public:
  Checker(const Context& ctx, const char* op) : ctx_(ctx), op_(op) {}

  void shape(const char* name, const Tensor& t, int64_t rows, int64_t cols) const {
    DS_ASSERT(t.rows == rows && t.cols == cols, "{}: {} is [{}, {}], expected [{}, {}]", op_, name, t.rows, t.cols,
              rows, cols);
    valid(name, t);
  }
  void act(const char* name, const Tensor& t, int64_t rows, int64_t cols) const {
    shape(name, t, rows, cols);
    is(name, t, ctx_.act_dtype());
  }
  void acc(const char* name, const Tensor& t, int64_t rows, int64_t cols) const {
    shape(name, t, rows, cols);
    is(name, t, ctx_.acc_dtype());
  }
  void floating(const char* name, const Tensor& t, int64_t rows, int64_t cols) const {
    shape(name, t, rows, cols);
    DS_ASSERT(t.dtype == ctx_.act_dtype() || t.dtype == ctx_.acc_dtype(), "{}: {} is {}, expected {} or {}", op_, name,
              dtype_name(t.dtype), dtype_name(ctx_.act_dtype()), dtype_name(ctx_.acc_dtype()));
  }
  void any_float(const char* name, const Tensor& t, int64_t rows, int64_t cols) const {
    shape(name, t, rows, cols);
    DS_ASSERT(is_float(t.dtype), "{}: {} is {}, expected a float dtype", op_, name, dtype_name(t.dtype));
  }
  void i32(const char* name, const Tensor& t, int64_t n) const { typed(name, t, DType::i32, n); }
  void typed(const char* name, const Tensor& t, DType dtype, int64_t n) const {
    shape(name, t, 1, n);
    is(name, t, dtype);
  }
  // y of a product: act or acc, acc when it is added to.
  void product(const char* name, const Tensor& t, int64_t rows, int64_t cols, Write write) const {
    if (write == Write::add)
      acc(name, t, rows, cols);
    else
      floating(name, t, rows, cols);
  }
  void distinct(std::initializer_list<Named> outputs, std::initializer_list<Named> inputs) const {
    for (auto o = outputs.begin(); o != outputs.end(); ++o) {
      for (const Named& i : inputs)
        DS_ASSERT(!overlap(o->t, i.t), "{}: output {} shares memory with input {}", op_, o->name, i.name);
      for (auto p = outputs.begin(); p != o; ++p)
        DS_ASSERT(!overlap(o->t, p->t), "{}: outputs {} and {} share memory", op_, o->name, p->name);
    }
  }
  // In place: the same view or separate memory, nothing in between.
  void same_or_distinct(const char* name, const Tensor& out, const char* in_name, const Tensor& in) const {
    const bool same = out.data == in.data && out.stride == in.stride && out.dtype == in.dtype;
    DS_ASSERT(same || !overlap(out, in), "{}: {} and {} overlap without being the same view", op_, name, in_name);
  }
  void weight(const Weight* w) const {
    DS_ASSERT(w != nullptr, "{}: no weight", op_);
    act("w", w->value, w->value.rows, w->value.cols);
  }
  void rope(const Rope& rope, int64_t head_dim) const {
    DS_ASSERT(rope.rot >= 0 && rope.rot <= head_dim && rope.rot % 2 == 0, "{}: rot {} of head size {}", op_, rope.rot,
              head_dim);
    if (rope.rot > 0) acc("inv_freq", rope.inv_freq, 1, rope.rot / 2);
  }
  int64_t heads(const char* name, const Tensor& t, int64_t head_dim) const {
    DS_ASSERT(head_dim > 0 && t.cols % head_dim == 0, "{}: {} has {} columns, head size {}", op_, name, t.cols,
              head_dim);
    return t.cols / head_dim;
  }

 private:
  void is(const char* name, const Tensor& t, DType dtype) const {
    DS_ASSERT(t.dtype == dtype, "{}: {} is {}, expected {}", op_, name, dtype_name(t.dtype), dtype_name(dtype));
  }
  void valid(const char* name, const Tensor& t) const {
    DS_ASSERT(t.rows >= 0 && t.cols >= 0, "{}: {} is [{}, {}]", op_, name, t.rows, t.cols);
    DS_ASSERT(t.rows <= 1 || t.stride >= t.cols, "{}: {} has stride {} below its {} columns", op_, name, t.stride,
              t.cols);
    DS_ASSERT(t.size() == 0 || t, "{}: {} [{}, {}] has no memory", op_, name, t.rows, t.cols);
    const auto bytes = static_cast<uintptr_t>(std::min<int64_t>(dtype_bytes(t.dtype), 8));
    DS_ASSERT(begin_of(t) % bytes == 0, "{}: {} is not aligned to its elements", op_, name);
  }
  const Context& ctx_;
  const char* op_;
};

}  // namespace dspark::model
