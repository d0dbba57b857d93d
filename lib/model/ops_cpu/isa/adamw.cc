// One pass over a run of one tensor's optimizer state; limited by memory, so everything happens while it is in
// registers.
#include "model/ops_cpu/isa/math.h"

namespace dspark::model::cpu::DS_ISA {

namespace {
template <bool kCast, typename T>
void run(float* __restrict p, float* __restrict m, float* __restrict v, const float* __restrict grad,
         T* __restrict value, int64_t n, const AdamWStep& step) {
  const AdamWStep s = step;
  for (int64_t i = 0; i < n; ++i) {
    const float g = grad[i] * s.grad_scale;
    const float mi = s.beta1 * m[i] + s.one_minus_beta1 * g;
    const float vi = s.beta2 * v[i] + s.one_minus_beta2 * (g * g);
    const float update = s.lr * (mi / s.bias1) / (__builtin_sqrtf(vi / s.bias2) + s.eps);
    const float pi = p[i] - (s.decay * p[i] + update);  // rounded once at the weight's size, with or without an FMA
    m[i] = mi;
    v[i] = vi;
    p[i] = pi;
    if constexpr (kCast) store(value + i, pi);
  }
}
}  // namespace

void adamw(float* master, float* m, float* v, const float* grad, Out value, int64_t n, const AdamWStep& s) {
  if (value.p == nullptr) return run<false, float>(master, m, v, grad, nullptr, n, s);
  with(value, [&](auto* out) { run<true>(master, m, v, grad, out, n, s); });
}

float sum_squares(const float* x, int64_t n) {
  return lane_sum(n, [&](int64_t i) { return x[i] * x[i]; });
}

}  // namespace dspark::model::cpu::DS_ISA
