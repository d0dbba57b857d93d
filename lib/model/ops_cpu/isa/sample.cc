// Passes over a row of logits.
#include "model/ops_cpu/isa/math.h"

namespace dspark::model::cpu::DS_ISA {

float row_max(In x, int64_t n) {
  float best = -__builtin_inff();
  with(x, [&](auto* v) {
    float lane[kLanes];
    for (int j = 0; j < kLanes; ++j) lane[j] = -__builtin_inff();
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes)
      for (int j = 0; j < kLanes; ++j) lane[j] = load(v[i + j]) > lane[j] ? load(v[i + j]) : lane[j];
    for (; i < n; ++i) lane[0] = load(v[i]) > lane[0] ? load(v[i]) : lane[0];
    for (int j = 0; j < kLanes; ++j) best = lane[j] > best ? lane[j] : best;
  });
  return best;
}

void tempered_exp(float* out, In x, float max, double inv_temperature, int64_t n) {
  with(x, [&](auto* v) {
    const double top = max;
    DS_IVDEP  // out may be x
        for (int64_t i = 0; i < n; ++i) {
      // The argument may be tens, where fp32 would cost digits of the result: reduce in fp64, finish in fp32.
      double t = (static_cast<double>(load(v[i])) - top) * inv_temperature;
      t = t < -104.0 ? -104.0 : t;
      const double magic = 6755399441055744.0;  // 1.5 * 2^52: rounds to an integer in the low bits
      const double shifted = t * 1.44269504088896340736 + magic;
      const int32_t e = static_cast<int32_t>(__builtin_bit_cast(uint64_t, shifted));
      const float r = static_cast<float>(t - (shifted - magic) * 0.69314718055994530942);
      out[i] = exp_reduced(r, e);
    }
  });
}

}  // namespace dspark::model::cpu::DS_ISA
