#include "model/ops_cpu/backend.h"

namespace dspark::model::cpu {
void CpuOps::sigmoid_gate(Context&, const SigmoidGate& a) {
  for_pieces(m_, a.y.rows, a.y.cols, [&](int64_t r, int64_t c, int64_t n) {
    for (int64_t j = c; j < c + n; ++j) store(a.y, r, j, sigmoid(load(a.pre, r, j)) * load(a.x, r, j));
  });
}

void CpuOps::sigmoid_gate_backward(Context&, const SigmoidGateBackward& a) {
  for_pieces(m_, a.dy.rows, a.dy.cols, [&](int64_t r, int64_t c, int64_t n) {
    float* d_x = row<float>(a.d_x, r);
    for (int64_t j = c; j < c + n; ++j) {
      const float s = sigmoid(load(a.pre, r, j)), dy = load(a.dy, r, j);
      store(a.d_pre, r, j, dy * load(a.x, r, j) * s * (1 - s));
      d_x[j] = (a.write_dx == Write::add ? d_x[j] : 0.0f) + dy * s;
    }
  });
}

}  // namespace dspark::model::cpu
