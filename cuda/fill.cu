#include "cuda/matrix.h"

namespace dspark::cuda {
namespace {

// 16 bytes at a time where a row's start allows it.
template <typename T>
DS_KERNEL void DS_THREADS(kBlock) fill_kernel(T* data, int64_t rows, int64_t cols, int64_t stride, T value, bool vector) {
  constexpr int kWide = 16 / static_cast<int>(sizeof(T));
  Vector<T, kWide> wide;
  for (int i = 0; i < kWide; ++i) wide.v[i] = value;
  const int64_t per_row = (cols + kWide - 1) / kWide;
  for (int64_t i = block_x() * threads() + thread(); i < rows * per_row; i += blocks_x() * threads()) {
    const int64_t row = i / per_row, col = i % per_row * kWide;
    T* p = data + row * stride + col;
    if (vector && col + kWide <= cols) {
      store(reinterpret_cast<Vector<T, kWide>*>(p), wide);
    } else {
      for (int j = 0; j < kWide; ++j)
        if (col + j < cols) store(p + j, value);
    }
  }
}

template <typename T>
void fill_as(Stream stream, void* data, int64_t rows, int64_t cols, int64_t stride, uint64_t pattern) {
  const auto bytes = static_cast<int64_t>(sizeof(T));
  const bool vector = reinterpret_cast<uintptr_t>(data) % 16 == 0 && (rows == 1 || stride * bytes % 16 == 0);
  launch(stream, chunk_grid(rows, cols), {kBlock}, 0, fill_kernel<T>, static_cast<T*>(data), rows, cols, stride, static_cast<T>(pattern), vector);
}

}  // namespace

void fill(Stream stream, void* data, int64_t rows, int64_t cols, int64_t stride, int element_bytes, uint64_t pattern) {
  if (rows * cols == 0) return;
  if (element_bytes == 1) fill_as<uint8_t>(stream, data, rows, cols, stride, pattern);
  else if (element_bytes == 2) fill_as<uint16_t>(stream, data, rows, cols, stride, pattern);
  else if (element_bytes == 4) fill_as<uint32_t>(stream, data, rows, cols, stride, pattern);
  else fill_as<uint64_t>(stream, data, rows, cols, stride, pattern);
}

}  // namespace dspark::cuda
