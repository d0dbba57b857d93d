// Norm of each head, then the rotary embedding; one row at a time. A head is widened to fp32 in a small buffer first,
// which is also what allows working in place.
#include "model/ops_cpu/isa/math.h"

namespace dspark::model::cpu::DS_ISA {

void rope_angles(float* __restrict cos, float* __restrict sin, const float* __restrict inv_freq, int64_t n,
                 double position, double scale) {
  // angle = quarter * pi/2 + r in fp64, so that positions of millions keep an fp32's accuracy; polynomials of r (Cephes
  // sinf, cosf on [-pi/4, pi/4]) in fp32.
  const double magic = 6755399441055744.0;  // 1.5 * 2^52
  const float s = static_cast<float>(scale);
  for (int64_t i = 0; i < n; ++i) {
    const double angle = position * static_cast<double>(inv_freq[i]);
    const double shifted = angle * 0.63661977236758134308 + magic;
    const uint32_t quarter = static_cast<uint32_t>(__builtin_bit_cast(uint64_t, shifted));
    const double q = shifted - magic;
    const float r = static_cast<float>((angle - q * 1.57079632679489655800) - q * 6.12323399573676603587e-17);
    const float z = r * r;
    float ps = -1.9515295891e-4f;
    ps = ps * z + 8.3321608736e-3f;
    ps = ps * z - 1.6666654611e-1f;
    ps = ps * z * r + r;
    float pc = 2.443315711809948e-5f;
    pc = pc * z - 1.388731625493765e-3f;
    pc = pc * z + 4.166664568298827e-2f;
    pc = pc * z * z - 0.5f * z + 1.0f;
    const float a = (quarter & 1u) != 0 ? ps : pc;  // |cos|
    const float b = (quarter & 1u) != 0 ? pc : ps;  // |sin|
    // cos is negative in quarters 1 and 2, sin in 2 and 3.
    const uint32_t flip_cos = ((quarter + 1u) & 2u) << 30, flip_sin = (quarter & 2u) << 30;
    cos[i] = as_float(as_bits(a) ^ flip_cos) * s;
    sin[i] = as_float(as_bits(b) ^ flip_sin) * s;
  }
}

void head_norm_rope(Out y, In x, const HeadRow& h, float eps, float* inv_rms) {
  const int64_t half = h.rot / 2, hd = h.head_dim;
  with(y, [&](auto* out) {
    with(x, [&](auto* in) {
      for (int64_t head = 0; head < h.heads; ++head, out += hd, in += hd) {
        float t[kMaxHeadDim];
        for (int64_t i = 0; i < hd; ++i) t[i] = load(in[i]);
        if (h.weight != nullptr) {
          const float squares = lane_sum(hd, [&](int64_t i) { return t[i] * t[i]; });
          const float inv = 1.0f / __builtin_sqrtf(squares / static_cast<float>(hd) + eps);
          for (int64_t i = 0; i < hd; ++i) t[i] = t[i] * inv * h.weight[i];
          if (inv_rms != nullptr) inv_rms[head] = inv;
        }
        const float* c = h.cos;
        const float* s = h.sin;
        DS_IVDEP
        for (int64_t i = 0; i < half; ++i) {
          const float a = t[i], b = t[i + half];
          store(out + i, a * c[i] - b * s[i]);
          store(out + i + half, b * c[i] + a * s[i]);
        }
        for (int64_t i = h.rot; i < hd; ++i) store(out + i, t[i]);
      }
    });
  });
}

void head_norm_rope_backward(Out d_x, float* d_weight, In dy, In x, const HeadRow& h, const float* inv_rms) {
  const int64_t half = h.rot / 2, hd = h.head_dim;
  with(d_x, [&](auto* out) {
    with(dy, [&](auto* g) {
      with(x, [&](auto* in) {
        for (int64_t head = 0; head < h.heads; ++head, out += hd, g += hd, in += hd) {
          float t[kMaxHeadDim], n[kMaxHeadDim];
          const float* c = h.cos;
          const float* s = h.sin;
          DS_IVDEP
          for (int64_t i = 0; i < half; ++i) {
            const float a = load(g[i]), b = load(g[i + half]);
            t[i] = a * c[i] + b * s[i];
            t[i + half] = b * c[i] - a * s[i];
          }
          for (int64_t i = h.rot; i < hd; ++i) t[i] = load(g[i]);
          if (h.weight == nullptr) {
            for (int64_t i = 0; i < hd; ++i) store(out + i, t[i]);
            continue;
          }
          const float inv = inv_rms[head];
          for (int64_t i = 0; i < hd; ++i) n[i] = load(in[i]) * inv;
          if (d_weight != nullptr) {
            float* __restrict dw = d_weight;
            for (int64_t i = 0; i < hd; ++i) dw[i] += t[i] * n[i];
          }
          for (int64_t i = 0; i < hd; ++i) t[i] *= h.weight[i];
          const float k = lane_sum(hd, [&](int64_t i) { return t[i] * n[i]; }) / static_cast<float>(hd);
          for (int64_t i = 0; i < hd; ++i) store(out + i, inv * (t[i] - n[i] * k));
        }
      });
    });
  });
}

}  // namespace dspark::model::cpu::DS_ISA
