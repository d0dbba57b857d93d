// One Muon step: contract in model/ops.h. X [m, n], m the smaller side, lives in fp32; products see it rounded to the activations'
// dtype. G = X X^T comes close to a multiple of the identity, and rounding its diagonal to bf16 would be most of the error:
// diagonals are multiplied in fp32, products see what is off them.
//
// A step is some thirty small kernels a matrix, the same ones on the same memory every time: a graph.
#include <algorithm>
#include <bit>

#include "cuda/backend.h"
#include "cuda/matrices.h"
#include "model/backend_access.h"

namespace dspark::cuda {

namespace {

// All that a step's kernels get from the host.
std::vector<int64_t> key_of(const model::Muon& a) {
  std::vector<int64_t> key;
  for (const model::Tensor* t : {&a.master, &a.buf, &a.grad, &a.value, &a.scalars, &a.work}) {
    key.push_back(static_cast<int64_t>(reinterpret_cast<uintptr_t>(model::BackendAccess::raw(t->data))));
    key.insert(key.end(), {static_cast<int64_t>(t->dtype), t->rows, t->cols, t->stride});
  }
  for (const double x : {a.size, a.momentum, a.weight_decay, a.lr_factor}) key.push_back(std::bit_cast<int64_t>(x));
  key.push_back(a.iterations);
  return key;
}

}  // namespace

void CudaOps::muon(model::Context& ctx, const model::Muon& a) {
  if (a.master.size() == 0) return;
  const int64_t m = std::min(a.master.rows, a.master.cols), n = std::max(a.master.rows, a.master.cols);
  model::Address at = a.work.data;
  at = at + static_cast<int64_t>((64 - reinterpret_cast<uintptr_t>(model::BackendAccess::raw(at)) % 64) % 64);
  const auto take = [&](DType dtype, int64_t rows, int64_t cols) {
    const model::Tensor t{at, dtype, rows, cols, cols};
    at = at + (rows * cols * dtype_bytes(dtype) + 63) / 64 * 64;
    return mat(t);
  };
  const Matrix rounded = take(ctx.act_dtype(), m, n), poly = take(ctx.act_dtype(), m, m), x = take(DType::f32, m, n), gram = take(DType::f32, m, m),
               square = take(DType::f32, m, m), diagonal = take(DType::f32, 1, m), factor = take(DType::f32, 1, m);
  auto *d = static_cast<float*>(diagonal.data), *f = static_cast<float*>(factor.data);
  const MuonStep step{mat(a.master), mat(a.buf), mat(a.grad), mat(a.value), x, model::pointer<float>(a.scalars), a.lr_factor, a.weight_decay, a.size,
                      static_cast<float>(a.momentum), static_cast<float>(1 - a.momentum)};
  const Stream s = stream();
  graphs_.run(key_of(a), [&] {
    muon_momentum(s, step);
    cuda::sum_squares(s, f, x, scratch_);
    for (int i = 0; i < a.iterations; ++i) {
      muon_round(s, rounded, x, i == 0 ? f : nullptr);
      blas_.multiply(s, {gram, rounded, rounded, false, true, false});
      muon_split(s, poly, gram, d);
      blas_.multiply(s, {square, poly, poly, false, true, false});
      muon_poly(s, poly, gram, square, d, f, static_cast<float>(model::kMuonA), static_cast<float>(model::kMuonB), static_cast<float>(model::kMuonC));
      scale_rows(s, x, f);
      blas_.multiply(s, {x, poly, rounded, false, false, true});
    }
    muon_apply(s, step);
  });
}

}  // namespace dspark::cuda
