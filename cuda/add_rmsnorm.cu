// add_rmsnorm and the gradient of its input: one block a row.
#include "cuda/matrix.h"

namespace dspark::cuda {
namespace {

constexpr int kScratchFloats = kBlock / kWarp;

DS_KERNEL void DS_THREADS(kBlock) add_rmsnorm_kernel(RmsNorm a) {
  const Shared<float> scratch(0, kScratchFloats);
  const int64_t row = block_x();
  float squares = 0;
  for_row_chunks(a.x.cols, [&](int64_t col) {
    float x[kChunk];
    load_chunk(x, a.x, row, col);
    if (a.delta) {
      float d[kChunk];
      load_chunk(d, a.delta, row, col);
      DS_UNROLL
      for (int i = 0; i < kChunk; ++i) x[i] += d[i];
    }
    if (a.x_out) store_chunk(x, a.x_out, row, col);
    DS_UNROLL
    for (int i = 0; i < kChunk; ++i) squares += x[i] * x[i];
  });
  const float inv = 1.0f / sqrtf(block_sum(squares, scratch) / static_cast<float>(a.x.cols) + a.eps);
  if (a.inv_rms != nullptr && thread() == 0) store(a.inv_rms + row, inv);
  // Each thread reads again what it has just seen, or written itself.
  const Matrix& normed = a.x_out ? a.x_out : a.x;
  for_row_chunks(a.x.cols, [&](int64_t col) {
    float x[kChunk], w[kChunk];
    load_chunk(x, normed, row, col);
    load_chunk(w, a.weight, 0, col);
    DS_UNROLL
    for (int i = 0; i < kChunk; ++i) x[i] = x[i] * inv * (a.offset + w[i]);
    store_chunk(x, a.y, row, col);
  });
}

DS_KERNEL void DS_THREADS(kBlock) rmsnorm_dx_kernel(RmsNormGradient a) {
  const Shared<float> scratch(0, kScratchFloats);
  const int64_t row = block_x();
  float dot = 0;
  for_row_chunks(a.x.cols, [&](int64_t col) {
    float x[kChunk], g[kChunk], w[kChunk];
    load_chunk(x, a.x, row, col);
    load_chunk(g, a.dy, row, col);
    load_chunk(w, a.weight, 0, col);
    DS_UNROLL
    for (int i = 0; i < kChunk; ++i) dot += g[i] * (a.offset + w[i]) * x[i];
  });
  const float inv = load(a.inv_rms + row);
  const float k = block_sum(dot, scratch) * inv * inv / static_cast<float>(a.x.cols);
  for_row_chunks(a.x.cols, [&](int64_t col) {
    float x[kChunk], g[kChunk], w[kChunk], old[kChunk] = {};
    load_chunk(x, a.x, row, col);
    load_chunk(g, a.dy, row, col);
    load_chunk(w, a.weight, 0, col);
    if (a.add) load_chunk(old, a.d_x, row, col);
    DS_UNROLL
    for (int i = 0; i < kChunk; ++i) old[i] += inv * (g[i] * (a.offset + w[i]) - x[i] * k);
    store_chunk(old, a.d_x, row, col);
  });
}

}  // namespace

void add_rmsnorm(Stream stream, const RmsNorm& a) {
  if (a.x.rows > 0) launch(stream, {static_cast<unsigned>(a.x.rows)}, {kBlock}, kScratchFloats * 4, add_rmsnorm_kernel, a);
}

void rmsnorm_dx(Stream stream, const RmsNormGradient& a) {
  if (a.x.rows > 0) launch(stream, {static_cast<unsigned>(a.x.rows)}, {kBlock}, kScratchFloats * 4, rmsnorm_dx_kernel, a);
}

}  // namespace dspark::cuda
