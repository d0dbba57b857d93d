#include "cuda/matrix.h"

namespace dspark::cuda {
namespace {

DS_KERNEL void DS_THREADS(kBlock) sigmoid_gate_kernel(Matrix y, Matrix pre, Matrix x) {
  for_chunks(y.rows, y.cols, [&](int64_t row, int64_t col) {
    float p[kChunk], v[kChunk];
    load_chunk(p, pre, row, col);
    load_chunk(v, x, row, col);
    DS_UNROLL
    for (int i = 0; i < kChunk; ++i) v[i] *= sigmoid(p[i]);
    store_chunk(v, y, row, col);
  });
}

DS_KERNEL void DS_THREADS(kBlock) sigmoid_gate_backward_kernel(Matrix d_pre, Matrix d_x, Matrix dy, Matrix pre, Matrix x, bool add) {
  for_chunks(dy.rows, dy.cols, [&](int64_t row, int64_t col) {
    float d[kChunk], p[kChunk], v[kChunk], old[kChunk] = {};
    load_chunk(d, dy, row, col);
    load_chunk(p, pre, row, col);
    load_chunk(v, x, row, col);
    if (add) load_chunk(old, d_x, row, col);
    DS_UNROLL
    for (int i = 0; i < kChunk; ++i) {
      const float s = sigmoid(p[i]);
      p[i] = d[i] * v[i] * s * (1.0f - s);
      old[i] += d[i] * s;
    }
    store_chunk(p, d_pre, row, col);
    store_chunk(old, d_x, row, col);
  });
}

}  // namespace

void sigmoid_gate(Stream stream, Matrix y, Matrix pre, Matrix x) {
  if (y.rows * y.cols > 0) launch(stream, chunk_grid(y.rows, y.cols), {kBlock}, 0, sigmoid_gate_kernel, y, pre, x);
}

void sigmoid_gate_backward(Stream stream, Matrix d_pre, Matrix d_x, Matrix dy, Matrix pre, Matrix x, bool add) {
  if (dy.rows * dy.cols > 0) launch(stream, chunk_grid(dy.rows, dy.cols), {kBlock}, 0, sigmoid_gate_backward_kernel, d_pre, d_x, dy, pre, x, add);
}

}  // namespace dspark::cuda
