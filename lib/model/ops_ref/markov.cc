// sigmoid_gate, rnn_cell and their backward
#include "model/ops_ref/scalar.h"

namespace dspark::model::ref {

template <typename S>
void sigmoid_gate(const SigmoidGate& a) {
  const Matrix<S> y(a.y), pre(a.pre), x(a.x);
  for (int64_t i = 0; i < y.rows(); ++i)
    for (int64_t j = 0; j < y.cols(); ++j) y(i, j) = sigmoid(pre(i, j)) * x(i, j);
}

template <typename S>
void sigmoid_gate_backward(const SigmoidGateBackward& a) {
  const Matrix<S> d_pre(a.d_pre), d_x(a.d_x), dy(a.dy), pre(a.pre), x(a.x);
  for (int64_t i = 0; i < dy.rows(); ++i)
    for (int64_t j = 0; j < dy.cols(); ++j) {
      const S s = sigmoid(pre(i, j));
      d_pre(i, j) = dy(i, j) * x(i, j) * s * (S(1) - s);
      d_x(i, j) = (a.write_dx == Write::add ? d_x(i, j) : S(0)) + dy(i, j) * s;
    }
}

template <typename S>
void rnn_cell(const RnnCell& a) {
  const Matrix<S> state_out(a.state_out), out(a.out), pre(a.pre), state_in(a.state_in);
  const int64_t r = out.cols();
  for (int64_t i = 0; i < out.rows(); ++i)
    for (int64_t j = 0; j < r; ++j) {
      const S g = sigmoid(pre(i, j)), old = state_in ? state_in(i, j) : S(0);
      state_out(i, j) = g * old + (S(1) - g) * std::tanh(pre(i, r + j));
      out(i, j) = std::tanh(pre(i, 2 * r + j));
    }
}

template <typename S>
void rnn_cell_backward(const RnnCellBackward& a) {
  const Matrix<S> d_pre(a.d_pre), d_state_in(a.d_state_in), d_out(a.d_out), d_state_out(a.d_state_out), pre(a.pre), state_in(a.state_in);
  const int64_t r = d_out.cols();
  for (int64_t i = 0; i < d_out.rows(); ++i)
    for (int64_t j = 0; j < r; ++j) {
      const S g = sigmoid(pre(i, j)), c = std::tanh(pre(i, r + j)), o = std::tanh(pre(i, 2 * r + j));
      const S old = state_in ? state_in(i, j) : S(0), d = d_state_out ? d_state_out(i, j) : S(0);
      d_pre(i, j) = d * (old - c) * g * (S(1) - g);
      d_pre(i, r + j) = d * (S(1) - g) * (S(1) - c * c);
      d_pre(i, 2 * r + j) = d_out(i, j) * (S(1) - o * o);
      if (d_state_in) d_state_in(i, j) = d * g;
    }
}

DS_REF_INSTANTIATE(sigmoid_gate, SigmoidGate)
DS_REF_INSTANTIATE(sigmoid_gate_backward, SigmoidGateBackward)
DS_REF_INSTANTIATE(rnn_cell, RnnCell)
DS_REF_INSTANTIATE(rnn_cell_backward, RnnCellBackward)

}  // namespace dspark::model::ref
