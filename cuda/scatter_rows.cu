#include "cuda/matrix.h"

namespace dspark::cuda {
namespace {

DS_KERNEL void DS_THREADS(kBlock) scatter_kernel(Matrix dst, Matrix src, const int32_t* index) {
  for_chunks(src.rows, src.cols, [&](int64_t row, int64_t col) {
    const int32_t to = load(index + row);
    if (to < 0) return;
    float v[kChunk];
    load_chunk(v, src, row, col);
    store_chunk(v, dst, to, col);
  });
}

}  // namespace

void scatter_rows(Stream stream, Matrix dst, Matrix src, const int32_t* index) {
  if (src.rows * src.cols > 0) launch(stream, chunk_grid(src.rows, src.cols), {kBlock}, 0, scatter_kernel, dst, src, index);
}

}  // namespace dspark::cuda
