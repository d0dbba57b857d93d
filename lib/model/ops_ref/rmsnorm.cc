// add_rmsnorm, rmsnorm_backward
#include "model/ops_ref/scalar.h"

namespace dspark::model::ref {

template <typename S>
void add_rmsnorm(const AddRmsNorm& a) {
  const Matrix<S> y(a.y), x(a.x), weight(a.weight);
  for (int64_t i = 0; i < x.rows(); ++i) {
    S squares = 0;
    const auto value = [&](int64_t j) { return a.x_out ? Matrix<S>(a.x_out)(i, j) : x(i, j); };
    for (int64_t j = 0; j < x.cols(); ++j) {
      if (a.x_out) Matrix<S>(a.x_out)(i, j) = a.delta ? x(i, j) + Matrix<S>(a.delta)(i, j) : x(i, j);
      squares += mul(value(j), value(j));
    }
    const S inv = S(1) / std::sqrt(squares / static_cast<double>(x.cols()) + a.eps);
    if (a.inv_rms) Matrix<S>(a.inv_rms)(i) = inv;
    for (int64_t j = 0; j < x.cols(); ++j) y(i, j) = value(j) * inv * (a.unit_offset ? S(1) + weight(j) : weight(j));
  }
}

// With n = x inv, g = dy w: d_w += dy n, d_x = inv (g - n mean(g n)).
template <typename S>
void rmsnorm_backward(const RmsNormBackward& a) {
  const Matrix<S> d_x(a.d_x), d_weight(a.d_weight), dy(a.dy), x(a.x), weight(a.weight), inv_rms(a.inv_rms);
  if (d_weight && a.write_dw == Write::overwrite) fill_zero(d_weight);
  for (int64_t i = 0; i < x.rows(); ++i) {
    const auto w = [&](int64_t j) { return a.unit_offset ? S(1) + weight(j) : weight(j); };
    const S inv = inv_rms(i);
    S mean = 0;
    for (int64_t j = 0; j < x.cols(); ++j) mean += dy(i, j) * w(j) * x(i, j) * inv;
    mean /= static_cast<double>(x.cols());
    for (int64_t j = 0; j < x.cols(); ++j) {
      const S normalised = x(i, j) * inv;
      if (d_weight) d_weight(j) += dy(i, j) * normalised;
      const S gradient = inv * (dy(i, j) * w(j) - normalised * mean);
      d_x(i, j) = a.write_dx == Write::add ? d_x(i, j) + gradient : gradient;
    }
  }
}

DS_REF_INSTANTIATE(add_rmsnorm, AddRmsNorm)
DS_REF_INSTANTIATE(rmsnorm_backward, RmsNormBackward)

}  // namespace dspark::model::ref
