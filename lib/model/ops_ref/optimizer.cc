// sum_squares, finish_norm, adamw, muon
#include <algorithm>
#include <vector>

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
  scalars(kSteps) += scalars(kFinite);
  scalars(kBias1) = 1 - std::pow(a.beta1, real(scalars(kSteps)));
  scalars(kBias2) = 1 - std::pow(a.beta2, real(scalars(kSteps)));
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

template <typename S>
void muon(const Muon& a) {
  const Matrix<S> master(a.master), buf(a.buf), grad(a.grad), value(a.value), scalars(a.scalars);
  if (real(scalars(kFinite)) == 0) return;
  const int64_t rows = master.rows(), cols = master.cols(), m = std::min(rows, cols), n = std::max(rows, cols);
  const bool transposed = rows > cols;
  std::vector<S> x(static_cast<size_t>(m * n)), next(x.size()), gram(static_cast<size_t>(m * m)), poly(gram.size());
  const auto at = [&](int64_t i, int64_t j) -> S& { return x[static_cast<size_t>(transposed ? j * n + i : i * n + j)]; };
  S squares = 0;
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < cols; ++j) {
      const S g = grad(i, j) * scalars(kGradScale) * scalars(kClip);
      buf(i, j) = a.momentum * buf(i, j) + (1 - a.momentum) * g;
      const S u = (1 - a.momentum) * g + a.momentum * buf(i, j);
      at(i, j) = u;
      squares += u * u;
    }
  const S norm = real(std::sqrt(squares)) > 1e-7 ? std::sqrt(squares) : S(1e-7);
  for (S& v : x) v /= norm;
  // c = p q with q [n_in, n_out], or its transpose.
  const auto multiply = [](std::vector<S>& c, const std::vector<S>& p, const std::vector<S>& q, int64_t n_rows, int64_t n_in, int64_t n_out, bool nt) {
    for (int64_t i = 0; i < n_rows; ++i)
      for (int64_t j = 0; j < n_out; ++j) {
        S sum = 0;
        for (int64_t k = 0; k < n_in; ++k) sum += p[static_cast<size_t>(i * n_in + k)] * q[static_cast<size_t>(nt ? j * n_in + k : k * n_out + j)];
        c[static_cast<size_t>(i * n_out + j)] = sum;
      }
  };
  for (int iteration = 0; iteration < a.iterations; ++iteration) {
    multiply(gram, x, x, m, n, m, true);
    multiply(poly, gram, gram, m, m, m, false);
    for (size_t i = 0; i < poly.size(); ++i) poly[i] = kMuonB * gram[i] + kMuonC * poly[i];
    multiply(next, poly, x, m, m, n, false);
    for (size_t i = 0; i < x.size(); ++i) x[i] = kMuonA * x[i] + next[i];
  }
  const S lr = scalars(kLr) * a.lr_factor;
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < cols; ++j) {
      master(i, j) = master(i, j) * (S(1) - lr * a.weight_decay) - lr * a.size * at(i, j);
      if (value) value(i, j) = master(i, j);
    }
}

DS_REF_INSTANTIATE(sum_squares, SumSquares)
DS_REF_INSTANTIATE(finish_norm, FinishNorm)
DS_REF_INSTANTIATE(adamw, AdamW)
DS_REF_INSTANTIATE(muon, Muon)

}  // namespace dspark::model::ref
