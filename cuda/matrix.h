// Float matrices as kernels see them: bf16 or fp32 in memory, fp32 in registers, moved in chunks of kChunk columns.
//
// A chunk is moved by 16-byte accesses where the matrix allows it and one by one elsewhere (odd strides, the last columns); which
// thread has which columns, and so the order of every sum, never depends on that.
#pragma once

#include "cuda/device.h"
#include "cuda/kernels.h"

namespace dspark::cuda {

constexpr int kChunk = 8;
constexpr int kBlock = 256;  // threads of the kernels here

// Columns [col, col + kChunk) of a row; zeros behind the last column.
DS_DEVICE void load_chunk(float (&v)[kChunk], const Matrix& m, int64_t row, int64_t col) {
  const int64_t at = row * m.stride + col, left = m.cols - col;
  if (m.half) {
    const bf16* p = static_cast<const bf16*>(m.data) + at;
    if (m.vector && left >= kChunk) {
      const auto whole = load(reinterpret_cast<const Vector<bf16, 8>*>(p));
      DS_UNROLL
      for (int i = 0; i < kChunk; ++i) v[i] = widen(whole.v[i]);
    } else {
      DS_UNROLL
      for (int i = 0; i < kChunk; ++i) v[i] = i < left ? widen(load(p + i)) : 0.0f;
    }
  } else {
    const float* p = static_cast<const float*>(m.data) + at;
    if (m.vector && left >= kChunk) {
      const auto low = load(reinterpret_cast<const Vector<float, 4>*>(p)), high = load(reinterpret_cast<const Vector<float, 4>*>(p + 4));
      DS_UNROLL
      for (int i = 0; i < 4; ++i) v[i] = low.v[i], v[4 + i] = high.v[i];
    } else {
      DS_UNROLL
      for (int i = 0; i < kChunk; ++i) v[i] = i < left ? load(p + i) : 0.0f;
    }
  }
}

DS_DEVICE void store_chunk(const float (&v)[kChunk], const Matrix& m, int64_t row, int64_t col) {
  const int64_t at = row * m.stride + col, left = m.cols - col;
  if (m.half) {
    bf16* p = static_cast<bf16*>(m.data) + at;
    if (m.vector && left >= kChunk) {
      Vector<bf16, 8> whole;
      DS_UNROLL
      for (int i = 0; i < kChunk; ++i) whole.v[i] = narrow(v[i]);
      store(reinterpret_cast<Vector<bf16, 8>*>(p), whole);
    } else {
      DS_UNROLL
      for (int i = 0; i < kChunk; ++i)
        if (i < left) store(p + i, narrow(v[i]));
    }
  } else {
    float* p = static_cast<float*>(m.data) + at;
    if (m.vector && left >= kChunk) {
      store(reinterpret_cast<Vector<float, 4>*>(p), Vector<float, 4>{{v[0], v[1], v[2], v[3]}});
      store(reinterpret_cast<Vector<float, 4>*>(p + 4), Vector<float, 4>{{v[4], v[5], v[6], v[7]}});
    } else {
      DS_UNROLL
      for (int i = 0; i < kChunk; ++i)
        if (i < left) store(p + i, v[i]);
    }
  }
}

// body(row, col) for every chunk of a [rows, cols] matrix, shared among all threads of the grid.
template <typename Body>
DS_DEVICE void for_chunks(int64_t rows, int64_t cols, const Body& body) {
  const int64_t per_row = (cols + kChunk - 1) / kChunk, total = rows * per_row, step = blocks_x() * threads();
  const bool small = total < (int64_t{1} << 31);  // 32-bit division is several times faster
  for (int64_t i = block_x() * threads() + thread(); i < total; i += step) {
    const int64_t row = small ? static_cast<int64_t>(static_cast<uint32_t>(i) / static_cast<uint32_t>(per_row)) : i / per_row;
    body(row, (i - row * per_row) * kChunk);
  }
}

// body(col) for every chunk of one row, shared among the threads of a block.
template <typename Body>
DS_DEVICE void for_row_chunks(int64_t cols, const Body& body) {
  for (int64_t col = int64_t{thread()} * kChunk; col < cols; col += int64_t{threads()} * kChunk) body(col);
}

// A grid for for_chunks: enough blocks to fill any GPU several times over.
inline Dim chunk_grid(int64_t rows, int64_t cols) {
  const int64_t blocks = (rows * ((cols + kChunk - 1) / kChunk) + kBlock - 1) / kBlock;
  return {static_cast<unsigned>(blocks < 4096 ? blocks : 4096)};
}

// The logistic function.
DS_DEVICE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

}  // namespace dspark::cuda
