// copy: also between dtypes. Elements of one type keep their bits: nothing is computed on the way (i32 travels as fp32's bits).
#include "cuda/matrix.h"

namespace dspark::cuda {
namespace {

DS_KERNEL void DS_THREADS(kBlock) copy_kernel(Matrix dst, Matrix src) {
  for_chunks(dst.rows, dst.cols, [&](int64_t row, int64_t col) {
    float v[kChunk];
    load_chunk(v, src, row, col);
    store_chunk(v, dst, row, col);
  });
}

}  // namespace

void copy(Stream stream, Matrix dst, Matrix src) {
  if (dst.rows * dst.cols > 0) launch(stream, chunk_grid(dst.rows, dst.cols), {kBlock}, 0, copy_kernel, dst, src);
}

}  // namespace dspark::cuda
