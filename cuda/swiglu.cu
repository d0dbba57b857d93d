#include "cuda/matrix.h"

namespace dspark::cuda {
namespace {

DS_KERNEL void DS_THREADS(kBlock) swiglu_kernel(Matrix y, Matrix gate, Matrix up) {
  for_chunks(y.rows, y.cols, [&](int64_t row, int64_t col) {
    float g[kChunk], u[kChunk];
    load_chunk(g, gate, row, col);
    load_chunk(u, up, row, col);
    DS_UNROLL
    for (int i = 0; i < kChunk; ++i) g[i] = g[i] * sigmoid(g[i]) * u[i];
    store_chunk(g, y, row, col);
  });
}

DS_KERNEL void DS_THREADS(kBlock) swiglu_backward_kernel(Matrix d_gate, Matrix d_up, Matrix dy, Matrix gate, Matrix up) {
  for_chunks(dy.rows, dy.cols, [&](int64_t row, int64_t col) {
    float d[kChunk], g[kChunk], u[kChunk];
    load_chunk(d, dy, row, col);
    load_chunk(g, gate, row, col);
    load_chunk(u, up, row, col);
    DS_UNROLL
    for (int i = 0; i < kChunk; ++i) {
      const float s = sigmoid(g[i]), silu = g[i] * s;
      g[i] = d[i] * u[i] * (s + silu * (1.0f - s));
      u[i] = d[i] * silu;
    }
    store_chunk(g, d_gate, row, col);
    store_chunk(u, d_up, row, col);
  });
}

}  // namespace

void swiglu(Stream stream, Matrix y, Matrix gate, Matrix up) {
  if (y.rows * y.cols > 0) launch(stream, chunk_grid(y.rows, y.cols), {kBlock}, 0, swiglu_kernel, y, gate, up);
}

void swiglu_backward(Stream stream, Matrix d_gate, Matrix d_up, Matrix dy, Matrix gate, Matrix up) {
  if (dy.rows * dy.cols > 0) launch(stream, chunk_grid(dy.rows, dy.cols), {kBlock}, 0, swiglu_backward_kernel, d_gate, d_up, dy, gate, up);
}

}  // namespace dspark::cuda
