// add_bias, and the column sums that bias_grad and the norms' weight gradients are.
#include "cuda/matrix.h"

namespace dspark::cuda {
namespace {

DS_KERNEL void DS_THREADS(kBlock) add_bias_kernel(Matrix y, Matrix bias) {
  for_chunks(y.rows, y.cols, [&](int64_t row, int64_t col) {
    float v[kChunk], b[kChunk];
    load_chunk(v, y, row, col);
    load_chunk(b, bias, 0, col);
    DS_UNROLL
    for (int i = 0; i < kChunk; ++i) v[i] += b[i];
    store_chunk(v, y, row, col);
  });
}

// A block has kStrip columns: kStrip / kChunk threads side by side, kGroups of them one below the other. Group g sums rows g,
// g + kGroups, ...; then the groups' sums are added in order.
constexpr int kStrip = 32, kAcross = kStrip / kChunk, kGroups = kBlock / kAcross;

DS_KERNEL void DS_THREADS(kBlock) column_sum_kernel(Matrix sum, Matrix a, Matrix b, const float* scale, bool add) {
  const Shared<float> part(0, kGroups * kStrip);
  const int across = thread() % kAcross, group = thread() / kAcross;
  const int64_t col = block_x() * kStrip + across * kChunk;
  float total[kChunk] = {};
  if (col < a.cols) {
    for (int64_t row = group; row < a.rows; row += kGroups) {
      float v[kChunk];
      load_chunk(v, a, row, col);
      if (b) {
        float w[kChunk];
        load_chunk(w, b, row, col);
        DS_UNROLL
        for (int i = 0; i < kChunk; ++i) v[i] *= w[i];
      }
      if (scale != nullptr) {
        const float s = load(scale + row);
        DS_UNROLL
        for (int i = 0; i < kChunk; ++i) v[i] *= s;
      }
      DS_UNROLL
      for (int i = 0; i < kChunk; ++i) total[i] += v[i];
    }
  }
  for (int i = 0; i < kChunk; ++i) part.set(group * kStrip + across * kChunk + i, total[i]);
  sync_block();
  const int64_t mine = block_x() * kStrip + thread();
  if (thread() >= kStrip || mine >= a.cols) return;
  float* out = static_cast<float*>(sum.data) + mine;
  float column = add ? load(out) : 0.0f;
  for (int g = 0; g < kGroups; ++g) column += part[g * kStrip + thread()];
  store(out, column);
}

}  // namespace

void add_bias(Stream stream, Matrix y, Matrix bias) {
  if (y.rows * y.cols > 0) launch(stream, chunk_grid(y.rows, y.cols), {kBlock}, 0, add_bias_kernel, y, bias);
}

void column_sum(Stream stream, Matrix sum, Matrix a, Matrix b, const float* scale, bool add) {
  if (sum.cols == 0) return;
  const auto strips = static_cast<unsigned>((sum.cols + kStrip - 1) / kStrip);
  launch(stream, {strips}, {kBlock}, kGroups * kStrip * static_cast<int>(sizeof(float)), column_sum_kernel, sum, a, b, scale, add);
}

}  // namespace dspark::cuda
