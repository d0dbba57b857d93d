#include "cuda/draw.h"

namespace dspark::cuda {
namespace {

DS_KERNEL void DS_THREADS(kBlock) sample_kernel(int32_t* ids, int32_t* raw_ids, Matrix probs, const double* uniform, const int32_t* map) {
  const int64_t row = block_x();
  const int id = draw(static_cast<const float*>(probs.data) + row * probs.stride, static_cast<int>(probs.cols), load(uniform + row));
  if (thread() != 0) return;
  store(ids + row, map != nullptr ? load(map + id) : id);
  if (raw_ids != nullptr) store(raw_ids + row, id);
}

}  // namespace

void sample_tokens(Stream stream, int32_t* ids, int32_t* raw_ids, Matrix probs, const double* uniform, const int32_t* map) {
  if (probs.rows > 0) launch(stream, {static_cast<unsigned>(probs.rows)}, {kBlock}, kDrawBytes, sample_kernel, ids, raw_ids, probs, uniform, map);
}

}  // namespace dspark::cuda
