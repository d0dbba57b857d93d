// RMS norm of a row and its gradient.
#include "model/ops_cpu/isa/math.h"

namespace dspark::model::cpu::DS_ISA {

float rmsnorm(Out y, float* x_out, const float* x, In delta, const float* weight, float offset, int64_t n, float eps) {
  if (delta.p != nullptr) {
    with(delta, [&](auto* d) {
      DS_IVDEP
      for (int64_t i = 0; i < n; ++i) x_out[i] = x[i] + load(d[i]);
    });
    x = x_out;
  } else if (x_out != nullptr && x_out != x) {
    for (int64_t i = 0; i < n; ++i) x_out[i] = x[i];
  }
  const float squares = lane_sum(n, [&](int64_t i) { return x[i] * x[i]; });
  const float inv = 1.0f / __builtin_sqrtf(squares / static_cast<float>(n) + eps);
  with(y, [&](auto* __restrict out) {
    const float* __restrict in = x;
    const float* __restrict w = weight;
    for (int64_t i = 0; i < n; ++i) store(out + i, in[i] * inv * (offset + w[i]));
  });
  return inv;
}

void rmsnorm_dx(float* d_x, In dy, const float* x, const float* weight, float offset, float inv_rms, int64_t n,
                int add) {
  with(dy, [&](auto* __restrict g) {
    float* __restrict out = d_x;
    const float* __restrict in = x;
    const float* __restrict w = weight;
    const float dot = lane_sum(n, [&](int64_t i) { return load(g[i]) * (offset + w[i]) * in[i]; });
    const float k = dot * inv_rms * inv_rms / static_cast<float>(n);
    if (add)
      for (int64_t i = 0; i < n; ++i) out[i] += inv_rms * (load(g[i]) * (offset + w[i]) - in[i] * k);
    else
      for (int64_t i = 0; i < n; ++i) out[i] = inv_rms * (load(g[i]) * (offset + w[i]) - in[i] * k);
  });
}

}  // namespace dspark::model::cpu::DS_ISA
