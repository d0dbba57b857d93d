// sum_squares, finish_norm, adamw
#include <algorithm>

#include "model/ops_ref/scalar.h"

namespace dspark::model::ref {

template <typename S>
void sum_squares(const SumSquares& a) {
  const Matrix<S> sum(a.sum), grad(a.grad);
  sum(0) = S(0);
  for (int64_t i = 0; i < grad.rows(); ++i)
    for (int64_t j = 0; j < grad.cols(); ++j) sum(0) += grad(i, j) * grad(i, j);
}

template <typename S>
void finish_norm(const FinishNorm& a) {
  const Matrix<S> scalars(a.scalars), sums(a.sums);
  S total = 0;
  for (int64_t j = 0; j < sums.cols(); ++j) total += sums(j);
  const S norm = scalars(kGradScale) * std::sqrt(total);
  const S clip = scalars(kMaxNorm) / (norm + 1e-6);
  scalars(kGradNorm) = norm;
  scalars(kClip) = real(scalars(kMaxNorm)) > 0 && real(clip) < 1 ? clip : S(1);
  scalars(kFinite) = std::isfinite(real(norm)) ? S(1) : S(0);
}

template <typename S>
void adamw(const AdamW& a) {
  const Matrix<S> master(a.master), m(a.m), v(a.v), grad(a.grad), value(a.value), scalars(a.scalars);
  if (real(scalars(kFinite)) == 0) return;
  const S lr = scalars(kLr) * a.lr_factor;
  for (int64_t i = 0; i < master.rows(); ++i)
    for (int64_t j = 0; j < master.cols(); ++j) {
      const S g = grad(i, j) * scalars(kGradScale) * scalars(kClip);
      m(i, j) = a.beta1 * m(i, j) + (1 - a.beta1) * g;
      v(i, j) = a.beta2 * v(i, j) + (1 - a.beta2) * g * g;
      const S step = m(i, j) / scalars(kBias1) / (std::sqrt(v(i, j) / scalars(kBias2)) + a.eps);
      master(i, j) = master(i, j) * (S(1) - lr * a.weight_decay) - lr * step;
      if (value) value(i, j) = master(i, j);
    }
}

DS_REF_INSTANTIATE(sum_squares, SumSquares)
DS_REF_INSTANTIATE(finish_norm, FinishNorm)
DS_REF_INSTANTIATE(adamw, AdamW)

}  // namespace dspark::model::ref
