// scatter_add_rows: rows of the table are distinct, so each sum is one thread's, in the order of the CSR.
#include "cuda/matrix.h"

namespace dspark::cuda {
namespace {

DS_KERNEL void DS_THREADS(kBlock) scatter_add_kernel(Matrix d_table, Matrix d_rows, const int32_t* row_of, const int32_t* begin, const int32_t* source, int64_t n) {
  for_chunks(n, d_table.cols, [&](int64_t j, int64_t col) {
    const int32_t row = load(row_of + j), first = load(begin + j), last = load(begin + j + 1);
    float sum[kChunk];
    load_chunk(sum, d_table, row, col);
    for (int32_t i = first; i < last; ++i) {
      float v[kChunk];
      load_chunk(v, d_rows, load(source + i), col);
      DS_UNROLL
      for (int k = 0; k < kChunk; ++k) sum[k] += v[k];
    }
    store_chunk(sum, d_table, row, col);
  });
}

}  // namespace

void scatter_add_rows(Stream stream, Matrix d_table, Matrix d_rows, const int32_t* row_of, const int32_t* begin, const int32_t* source, int64_t n) {
  if (n * d_table.cols > 0) launch(stream, chunk_grid(n, d_table.cols), {kBlock}, 0, scatter_add_kernel, d_table, d_rows, row_of, begin, source, n);
}

}  // namespace dspark::cuda
