// Uniform noise, by the counter of each element: any part of a matrix gets the same numbers on any device.
#include "cuda/matrix.h"
#include "cuda/philox.h"

namespace dspark::cuda {
namespace {

DS_KERNEL void DS_THREADS(kBlock) add_noise_kernel(Matrix x, double amount, NoiseSeed seed) {
  for_chunks(x.rows, x.cols, [&](int64_t row, int64_t col) {
    float v[kChunk];
    load_chunk(v, x, row, col);
    DS_UNROLL
    for (int i = 0; i < kChunk; ++i) v[i] += static_cast<float>(amount * (2 * random_uniform(seed, static_cast<uint64_t>(row * x.cols + col + i)) - 1));
    store_chunk(v, x, row, col);
  });
}

}  // namespace

void add_noise(Stream stream, Matrix x, double amount, const NoiseSeed& seed) {
  if (x.rows * x.cols > 0) launch(stream, chunk_grid(x.rows, x.cols), {kBlock}, 0, add_noise_kernel, x, amount, seed);
}

}  // namespace dspark::cuda
