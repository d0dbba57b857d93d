// sum_squares in two steps (blocks, then their sums in order) and finish_norm.
#include "cuda/matrix.h"

namespace dspark::cuda {
namespace {

// Blocks of the first step, whatever the GPU: the order of the sum depends on it.
constexpr int kParts = 512;

DS_KERNEL void DS_THREADS(kBlock) sum_squares_kernel(double* parts, Matrix grad) {
  const Shared<double> scratch(0, kBlock / kWarp);
  double sum = 0;
  for_chunks(grad.rows, grad.cols, [&](int64_t row, int64_t col) {
    float v[kChunk], squares = 0;
    load_chunk(v, grad, row, col);
    DS_UNROLL
    for (int i = 0; i < kChunk; ++i) squares += v[i] * v[i];
    sum += static_cast<double>(squares);
  });
  sum = block_sum(sum, scratch);
  if (thread() == 0) store(parts + block_x(), sum);
}

DS_KERNEL void DS_THREADS(kParts) sum_parts_kernel(float* sum, const double* parts) {
  const Shared<double> scratch(0, kParts / kWarp);
  const double total = block_sum(load(parts + thread()), scratch);
  if (thread() == 0) store(sum, static_cast<float>(total));
}

DS_KERNEL void finish_norm_kernel(float* scalars, const float* sums, int64_t n, double beta1, double beta2) {
  if (thread() != 0) return;
  double total = 0;
  for (int64_t j = 0; j < n; ++j) total += static_cast<double>(load(sums + j));
  const double norm = static_cast<double>(load(scalars + kStepGradScale)) * sqrt(total), max_norm = static_cast<double>(load(scalars + kStepMaxNorm));
  const double clip = max_norm / (norm + 1e-6);
  const bool finite = norm - norm == 0;
  const float steps = load(scalars + kStepSteps) + (finite ? 1.0f : 0.0f);
  store(scalars + kStepGradNorm, static_cast<float>(norm));
  store(scalars + kStepClip, max_norm > 0 && clip < 1 ? static_cast<float>(clip) : 1.0f);
  store(scalars + kStepFinite, finite ? 1.0f : 0.0f);
  store(scalars + kStepSteps, steps);
  store(scalars + kStepBias1, static_cast<float>(1 - pow(beta1, static_cast<double>(steps))));
  store(scalars + kStepBias2, static_cast<float>(1 - pow(beta2, static_cast<double>(steps))));
}

}  // namespace

void sum_squares(Stream stream, float* sum, Matrix grad, Scratch scratch) {
  auto* parts = static_cast<double*>(scratch.data);
  launch(stream, {kParts}, {kBlock}, kBlock / kWarp * 8, sum_squares_kernel, parts, grad);
  launch(stream, {1}, {kParts}, kParts / kWarp * 8, sum_parts_kernel, sum, parts);
}

void finish_norm(Stream stream, float* scalars, const float* sums, int64_t n, double beta1, double beta2) {
  launch(stream, {1}, {kWarp}, 0, finish_norm_kernel, scalars, sums, n, beta1, beta2);
}

}  // namespace dspark::cuda
