// Muon's passes between its products, a row at a time.
#include "model/ops_cpu/isa/math.h"

namespace dspark::model::cpu::DS_ISA {

namespace {
DS_INLINE float update_of(float grad, float buf, const MuonMomentum& m) { return m.fresh * (grad * m.scale) + m.keep * buf; }
}  // namespace

float muon_momentum(float* __restrict buf, const float* __restrict grad, int64_t n, const MuonMomentum& momentum) {
  const MuonMomentum m = momentum;
  for (int64_t i = 0; i < n; ++i) buf[i] = m.keep * buf[i] + m.fresh * (grad[i] * m.scale);
  return lane_sum(n, [&](int64_t i) {
    const float u = update_of(grad[i], buf[i], m);
    return u * u;
  });
}

void muon_update(float* __restrict x, const float* __restrict grad, const float* __restrict buf, float factor, int64_t n, const MuonMomentum& momentum) {
  const MuonMomentum m = momentum;
  for (int64_t i = 0; i < n; ++i) x[i] = factor * update_of(grad[i], buf[i], m);
}

void muon_polynomial(float* __restrict s, const float* __restrict g, const float* __restrict diagonal, float d, float b, float c, int64_t n) {
  for (int64_t i = 0; i < n; ++i) s[i] = b * g[i] + c * (s[i] + (d + diagonal[i]) * g[i]);
}

void scale(float* y, float a, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] *= a;
}

void decayed_step(float* __restrict y, const float* __restrict x, float decay, float size, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] -= decay * y[i] + size * x[i];
}

}  // namespace dspark::model::cpu::DS_ISA
