#include "cuda/matrix.h"

namespace dspark::cuda {
namespace {

DS_KERNEL void DS_THREADS(kBlock) gather_kernel(Matrix dst, Matrix table, const int32_t* index) {
  for_chunks(dst.rows, dst.cols, [&](int64_t row, int64_t col) {
    float v[kChunk] = {};
    if (const int32_t from = load(index + row); from >= 0) load_chunk(v, table, from, col);
    store_chunk(v, dst, row, col);
  });
}

}  // namespace

void gather_rows(Stream stream, Matrix dst, Matrix table, const int32_t* index) {
  if (dst.rows * dst.cols > 0) launch(stream, chunk_grid(dst.rows, dst.cols), {kBlock}, 0, gather_kernel, dst, table, index);
}

}  // namespace dspark::cuda
