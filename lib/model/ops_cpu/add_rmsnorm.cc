#include "model/ops_cpu/backend.h"

namespace dspark::model::cpu {

void CpuOps::add_rmsnorm(Context&, const AddRmsNorm& a) {
  const float* weight = pointer<float>(a.weight);
  const float offset = a.unit_offset ? 1.0f : 0.0f;
  m_.pool().parallel_for(a.x.rows, row_grain(a.x.cols), [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      const In delta = a.delta ? in_row(a.delta, r) : In{nullptr, 0};
      float* x_out = a.x_out ? row<float>(a.x_out, r) : nullptr;
      const float inv = m_.kernels().rmsnorm(out_row(a.y, r), x_out, row<float>(a.x, r), delta, weight, offset,
                                             a.x.cols, static_cast<float>(a.eps));
      if (a.inv_rms) pointer<float>(a.inv_rms)[r] = inv;
    }
  });
}

void CpuOps::rmsnorm_backward(Context&, const RmsNormBackward& a) {
  const float* weight = pointer<float>(a.weight);
  const float* inv_rms = pointer<float>(a.inv_rms);
  const float offset = a.unit_offset ? 1.0f : 0.0f;
  const int64_t cols = a.x.cols;
  // d_weight first: it reads dy.
  if (a.d_weight) {
    const int64_t blocks = (cols + kColumnBlock - 1) / kColumnBlock;
    m_.pool().parallel_for(blocks, row_grain(kColumnBlock * std::max<int64_t>(a.x.rows, 1)),
                           [&](int64_t begin, int64_t end, int) {
                             for (int64_t b = begin; b < end; ++b) {
                               const int64_t c = b * kColumnBlock;
                               m_.kernels().column_sum(pointer<float>(a.d_weight) + c, in_row(a.dy, 0, c), a.dy.stride,
                                                       pointer<float>(a.x) + c, a.x.stride, inv_rms, a.x.rows,
                                                       std::min(kColumnBlock, cols - c), a.write_dw == Write::add);
                             }
                           });
  }
  m_.pool().parallel_for(a.x.rows, row_grain(cols), [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r)
      m_.kernels().rmsnorm_dx(row<float>(a.d_x, r), in_row(a.dy, r), row<float>(a.x, r), weight, offset, inv_rms[r],
                              cols, a.write_dx == Write::add);
  });
}

}  // namespace dspark::model::cpu
