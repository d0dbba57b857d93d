// One pass over a tensor's optimizer state, limited by memory: gradient scale, clip, moments, decay, update and cast at once.
#include "cuda/matrix.h"

namespace dspark::cuda {
namespace {

DS_KERNEL void DS_THREADS(kBlock) adamw_kernel(AdamWStep a) {
  if (load(a.scalars + kStepFinite) == 0.0f) return;
  const float grad_scale = load(a.scalars + kStepGradScale) * load(a.scalars + kStepClip);
  const float bias1 = load(a.scalars + kStepBias1), bias2 = load(a.scalars + kStepBias2);
  const double rate = static_cast<double>(load(a.scalars + kStepLr)) * a.lr_factor;
  const auto lr = static_cast<float>(rate), decay = static_cast<float>(rate * a.weight_decay);
  for_chunks(a.master.rows, a.master.cols, [&](int64_t row, int64_t col) {
    float p[kChunk], m[kChunk], v[kChunk], g[kChunk];
    load_chunk(p, a.master, row, col);
    load_chunk(m, a.m, row, col);
    load_chunk(v, a.v, row, col);
    load_chunk(g, a.grad, row, col);
    DS_UNROLL
    for (int i = 0; i < kChunk; ++i) {
      const float gradient = g[i] * grad_scale;
      m[i] = a.beta1 * m[i] + a.one_minus_beta1 * gradient;
      v[i] = a.beta2 * v[i] + a.one_minus_beta2 * (gradient * gradient);
      const float update = lr * (m[i] / bias1) / (sqrtf(v[i] / bias2) + a.eps);
      p[i] = p[i] - (decay * p[i] + update);  // rounded once at the weight's size
    }
    store_chunk(m, a.m, row, col);
    store_chunk(v, a.v, row, col);
    store_chunk(p, a.master, row, col);
    if (a.value) store_chunk(p, a.value, row, col);
  });
}

}  // namespace

void adamw(Stream stream, const AdamWStep& a) {
  if (a.master.rows * a.master.cols > 0) launch(stream, chunk_grid(a.master.rows, a.master.cols), {kBlock}, 0, adamw_kernel, a);
}

}  // namespace dspark::cuda
