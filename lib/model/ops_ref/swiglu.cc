// swiglu, swiglu_backward
#include "model/ops_ref/scalar.h"

namespace dspark::model::ref {

template <typename S>
void swiglu(const SwiGlu& a) {
  const Matrix<S> y(a.y), gate_up(a.gate_up);
  for (int64_t i = 0; i < y.rows(); ++i)
    for (int64_t j = 0; j < y.cols(); ++j) {
      const S g = gate_up(i, j), u = gate_up(i, y.cols() + j);
      y(i, j) = g * sigmoid(g) * u;
    }
}

template <typename S>
void swiglu_backward(const SwiGluBackward& a) {
  const Matrix<S> d_gate_up(a.d_gate_up), dy(a.dy), gate_up(a.gate_up);
  const int64_t f = dy.cols();
  for (int64_t i = 0; i < dy.rows(); ++i)
    for (int64_t j = 0; j < f; ++j) {
      const S g = gate_up(i, j), u = gate_up(i, f + j), s = sigmoid(g);
      d_gate_up(i, j) = dy(i, j) * u * s * (S(1) + g * (S(1) - s));
      d_gate_up(i, f + j) = dy(i, j) * g * s;
    }
}

DS_REF_INSTANTIATE(swiglu, SwiGlu)
DS_REF_INSTANTIATE(swiglu_backward, SwiGluBackward)

}  // namespace dspark::model::ref
