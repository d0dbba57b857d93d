// linear, linear_dx, linear_dw, refresh, add_bias, bias_grad
#include "model/ops_ref/scalar.h"

namespace dspark::model::ref {

template <typename S>
void linear(const Linear& a) {
  const Matrix<S> y(a.y), x(a.x), w(a.w->value);
  for (int64_t i = 0; i < y.rows(); ++i)
    for (int64_t o = 0; o < w.rows(); ++o) {
      S sum = a.write == Write::add ? y(i, o) : S(0);
      for (int64_t k = 0; k < w.cols(); ++k) sum += mul(x(i, k), w(o, k));
      y(i, o) = sum;
    }
}

template <typename S>
void linear_dx(const LinearDx& a) {
  const Matrix<S> dx(a.dx), dy(a.dy), w(a.w->value);
  for (int64_t i = 0; i < dx.rows(); ++i)
    for (int64_t k = 0; k < w.cols(); ++k) {
      S sum = a.write == Write::add ? dx(i, k) : S(0);
      for (int64_t o = 0; o < w.rows(); ++o) sum += mul(dy(i, o), w(o, k));
      dx(i, k) = sum;
    }
}

template <typename S>
void linear_dw(const LinearDw& a) {
  const Matrix<S> dw(a.dw), dy(a.dy), x(a.x);
  for (int64_t o = 0; o < dw.rows(); ++o)
    for (int64_t k = 0; k < dw.cols(); ++k) {
      S sum = a.write == Write::add ? dw(o, k) : S(0);
      for (int64_t i = 0; i < dy.rows(); ++i) sum += mul(dy(i, o), x(i, k));
      dw(o, k) = sum;
    }
}

// The reference multiplies with the canonical matrix: nothing to rebuild.
template <typename S>
void refresh(const Refresh&) {}

template <typename S>
void add_bias(const AddBias& a) {
  const Matrix<S> y(a.y), bias(a.bias);
  for (int64_t i = 0; i < y.rows(); ++i)
    for (int64_t j = 0; j < y.cols(); ++j) y(i, j) += bias(j);
}

template <typename S>
void bias_grad(const BiasGrad& a) {
  const Matrix<S> d_bias(a.d_bias), dy(a.dy);
  if (a.write == Write::overwrite) fill_zero(d_bias);
  for (int64_t i = 0; i < dy.rows(); ++i)
    for (int64_t j = 0; j < dy.cols(); ++j) d_bias(j) += dy(i, j);
}

DS_REF_INSTANTIATE(linear, Linear)
DS_REF_INSTANTIATE(linear_dx, LinearDx)
DS_REF_INSTANTIATE(linear_dw, LinearDw)
DS_REF_INSTANTIATE(refresh, Refresh)
DS_REF_INSTANTIATE(add_bias, AddBias)
DS_REF_INSTANTIATE(bias_grad, BiasGrad)

}  // namespace dspark::model::ref
