#include "model/ops_cpu/backend.h"

namespace dspark::model::cpu {

void CpuOps::adamw(Context&, const AdamW& a) {
  const float* scalars = pointer<float>(a.scalars);
  if (scalars[kFinite] == 0.0f) return;
  const double lr = static_cast<double>(scalars[kLr]) * a.lr_factor;
  const AdamWStep step{.grad_scale = scalars[kGradScale] * scalars[kClip],
                       .beta1 = static_cast<float>(a.beta1),
                       .one_minus_beta1 = static_cast<float>(1 - a.beta1),
                       .beta2 = static_cast<float>(a.beta2),
                       .one_minus_beta2 = static_cast<float>(1 - a.beta2),
                       .decay = static_cast<float>(lr * a.weight_decay),
                       .lr = static_cast<float>(lr),
                       .bias1 = scalars[kBias1],
                       .bias2 = scalars[kBias2],
                       .eps = static_cast<float>(a.eps)};
  for_pieces(m_, a.master.rows, a.master.cols, [&](int64_t r, int64_t c, int64_t n) {
    m_.kernels().adamw(row<float>(a.master, r) + c, row<float>(a.m, r) + c, row<float>(a.v, r) + c,
                       row<float>(a.grad, r) + c, a.value ? out_row(a.value, r, c) : Out{nullptr, 0}, n, step);
  });
}

}  // namespace dspark::model::cpu
