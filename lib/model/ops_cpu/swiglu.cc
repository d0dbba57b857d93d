#include "model/ops_cpu/backend.h"

namespace dspark::model::cpu {

void CpuOps::swiglu(Context&, const SwiGlu& a) {
  const int64_t f = a.y.cols;
  for_pieces(m_, a.y.rows, f, [&](int64_t r, int64_t c, int64_t n) {
    m_.kernels().swiglu(out_row(a.y, r, c), in_row(a.gate_up, r, c), in_row(a.gate_up, r, f + c), n);
  });
}

void CpuOps::swiglu_backward(Context&, const SwiGluBackward& a) {
  const int64_t f = a.dy.cols;
  for_pieces(m_, a.dy.rows, f, [&](int64_t r, int64_t c, int64_t n) {
    m_.kernels().swiglu_backward(out_row(a.d_gate_up, r, c), out_row(a.d_gate_up, r, f + c), in_row(a.dy, r, c),
                                 in_row(a.gate_up, r, c), in_row(a.gate_up, r, f + c), n);
  });
}

}  // namespace dspark::model::cpu
