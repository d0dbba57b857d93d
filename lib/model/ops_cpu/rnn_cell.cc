#include <cmath>

#include "model/ops_cpu/backend.h"

namespace dspark::model::cpu {
void CpuOps::rnn_cell(Context&, const RnnCell& a) {
  const int64_t rank = a.out.cols;
  for_pieces(m_, a.out.rows, rank, [&](int64_t r, int64_t c, int64_t n) {
    float* state = row<float>(a.state_out, r);
    for (int64_t j = c; j < c + n; ++j) {
      const float g = sigmoid(load(a.pre, r, j)), old = a.state_in ? row<float>(a.state_in, r)[j] : 0.0f;
      state[j] = g * old + (1 - g) * std::tanh(load(a.pre, r, rank + j));
      store(a.out, r, j, std::tanh(load(a.pre, r, 2 * rank + j)));
    }
  });
}

void CpuOps::rnn_cell_backward(Context&, const RnnCellBackward& a) {
  const int64_t rank = a.d_out.cols;
  for_pieces(m_, a.d_out.rows, rank, [&](int64_t r, int64_t c, int64_t n) {
    for (int64_t j = c; j < c + n; ++j) {
      const float g = sigmoid(load(a.pre, r, j)), t = std::tanh(load(a.pre, r, rank + j)), o = std::tanh(load(a.pre, r, 2 * rank + j));
      const float old = a.state_in ? row<float>(a.state_in, r)[j] : 0.0f, d = a.d_state_out ? row<float>(a.d_state_out, r)[j] : 0.0f;
      store(a.d_pre, r, j, d * (old - t) * g * (1 - g));
      store(a.d_pre, r, rank + j, d * (1 - g) * (1 - t * t));
      store(a.d_pre, r, 2 * rank + j, load(a.d_out, r, j) * (1 - o * o));
      if (a.d_state_in) row<float>(a.d_state_in, r)[j] = d * g;
    }
  });
}

}  // namespace dspark::model::cpu
