#include "model/ops_cpu/backend.h"

namespace dspark::model::cpu {

void CpuOps::add_bias(Context&, const AddBias& a) {
  for_pieces(m_, a.y.rows, a.y.cols, [&](int64_t r, int64_t c, int64_t n) {
    m_.kernels().accumulate(out_row(a.y, r, c), in_row(a.bias, 0, c), n);
  });
}

void CpuOps::bias_grad(Context&, const BiasGrad& a) {
  // Threads share columns, never rows: a column's sum is one thread's, in the order of the rows.
  const int64_t cols = a.dy.cols, blocks = (cols + kColumnBlock - 1) / kColumnBlock;
  m_.pool().parallel_for(
      blocks, row_grain(kColumnBlock * std::max<int64_t>(a.dy.rows, 1)), [&](int64_t begin, int64_t end, int) {
        for (int64_t b = begin; b < end; ++b) {
          const int64_t c = b * kColumnBlock;
          m_.kernels().column_sum(pointer<float>(a.d_bias) + c, in_row(a.dy, 0, c), a.dy.stride, nullptr, 0, nullptr,
                                  a.dy.rows, std::min(kColumnBlock, cols - c), a.write == Write::add);
        }
      });
}

}  // namespace dspark::model::cpu
