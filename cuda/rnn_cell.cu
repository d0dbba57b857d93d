#include "cuda/matrix.h"

namespace dspark::cuda {
namespace {

DS_KERNEL void DS_THREADS(kBlock) rnn_cell_kernel(Matrix state_out, Matrix out, RnnGates pre, Matrix state_in) {
  for_chunks(out.rows, out.cols, [&](int64_t row, int64_t col) {
    float g[kChunk], c[kChunk], o[kChunk], old[kChunk] = {};
    load_chunk(g, pre.g, row, col);
    load_chunk(c, pre.c, row, col);
    load_chunk(o, pre.o, row, col);
    if (state_in) load_chunk(old, state_in, row, col);
    DS_UNROLL
    for (int i = 0; i < kChunk; ++i) {
      const float s = sigmoid(g[i]);
      old[i] = s * old[i] + (1.0f - s) * tanhf(c[i]);
      o[i] = tanhf(o[i]);
    }
    store_chunk(old, state_out, row, col);
    store_chunk(o, out, row, col);
  });
}

DS_KERNEL void DS_THREADS(kBlock) rnn_cell_backward_kernel(RnnGates d_pre, Matrix d_state_in, Matrix d_out, Matrix d_state_out, RnnGates pre, Matrix state_in) {
  for_chunks(d_out.rows, d_out.cols, [&](int64_t row, int64_t col) {
    float g[kChunk], c[kChunk], o[kChunk], d_o[kChunk], old[kChunk] = {}, d[kChunk] = {};
    load_chunk(g, pre.g, row, col);
    load_chunk(c, pre.c, row, col);
    load_chunk(o, pre.o, row, col);
    load_chunk(d_o, d_out, row, col);
    if (state_in) load_chunk(old, state_in, row, col);
    if (d_state_out) load_chunk(d, d_state_out, row, col);
    DS_UNROLL
    for (int i = 0; i < kChunk; ++i) {
      const float s = sigmoid(g[i]), t = tanhf(c[i]), u = tanhf(o[i]);
      g[i] = d[i] * (old[i] - t) * s * (1.0f - s);
      c[i] = d[i] * (1.0f - s) * (1.0f - t * t);
      o[i] = d_o[i] * (1.0f - u * u);
      d[i] *= s;
    }
    store_chunk(g, d_pre.g, row, col);
    store_chunk(c, d_pre.c, row, col);
    store_chunk(o, d_pre.o, row, col);
    if (d_state_in) store_chunk(d, d_state_in, row, col);
  });
}

}  // namespace

void rnn_cell(Stream stream, Matrix state_out, Matrix out, RnnGates pre, Matrix state_in) {
  if (out.rows * out.cols > 0) launch(stream, chunk_grid(out.rows, out.cols), {kBlock}, 0, rnn_cell_kernel, state_out, out, pre, state_in);
}

void rnn_cell_backward(Stream stream, RnnGates d_pre, Matrix d_state_in, Matrix d_out, Matrix d_state_out, RnnGates pre, Matrix state_in) {
  if (d_out.rows * d_out.cols == 0) return;
  launch(stream, chunk_grid(d_out.rows, d_out.cols), {kBlock}, 0, rnn_cell_backward_kernel, d_pre, d_state_in, d_out, d_state_out, pre, state_in);
}

}  // namespace dspark::cuda
