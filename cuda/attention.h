// What the attention kernels share: how rows come into shared memory, products of tiles, and the online softmax.
//
// A task is 16 query rows that meet the same keys and is one warp's; a block takes neighbouring tasks, so that they share the keys
// it loads. Tiles of kKeys keys begin at multiples of kKeys, and a warp leaves out tiles that none of its rows sees: a row's bits
// depend on nothing but the row.
#pragma once

#include "cuda/matrix.h"
#include "cuda/tile.h"

namespace dspark::cuda {

constexpr int kKeys = 32;

// Where a row of a tile comes from; row -1: zeros.
struct Place {
  int64_t row, col;
};

// Rows [0, rows) of a tile [rows, kHd], kHd / 8 chunks a row, zeros behind the head's columns; all threads of the block.
template <typename T, int kHd, typename PlaceOf>
DS_DEVICE void load_tile(Shared<T> to, int rows, const Matrix& m, int head_dim, const PlaceOf& place_of) {
  constexpr int kPitch = kHd + 8, kChunks = kHd / kChunk;
  for (int k = thread(); k < rows * kChunks; k += threads()) {
    const int r = k / kChunks, c = k % kChunks * kChunk;
    const Place p = place_of(r);
    float v[kChunk] = {};
    if (p.row >= 0 && c < head_dim) {
      Matrix head = m;
      head.cols = p.col + head_dim;
      load_chunk(v, head, p.row, p.col + c);
    }
    Vector<T, kChunk> whole;
    DS_UNROLL
    for (int i = 0; i < kChunk; ++i) whole.v[i] = from_float<T>(v[i]);
    to.template set_vector<Vector<T, kChunk>>(r * kPitch + c, whole);
  }
}

DS_DEVICE void store_element(const Matrix& m, int64_t row, int64_t col, float v) {
  if (m.half) store(static_cast<bf16*>(m.data) + row * m.stride + col, narrow(v));
  else store(static_cast<float*>(m.data) + row * m.stride + col, v);
}

// s [2][4] += a tile's rows [row, +16) times b's rows [key, +16) along the head: element i of s[j] is (row + g + 8 (i / 2),
// key + 8 j + 2 t + i % 2).
template <typename T, int kHd>
DS_DEVICE void rows_times_rows(float (&s)[2][4], Shared<T> a, int row, Shared<T> b, int key) {
  DS_UNROLL
  for (int c = 0; c < kHd; c += 16) {
    typename Mma<T>::A fa;
    typename Mma<T>::B fb[2];
    Mma<T>::load_a(fa, a, row, c, kHd + 8);
    Mma<T>::load_b(fb, b, key, c, kHd + 8);
    Mma<T>::mma(s[0], fa, fb[0]);
    Mma<T>::mma(s[1], fa, fb[1]);
  }
}
// out [kCols / 8][4] += p (16 x 16, as rows_times_rows leaves it, rounded to T) times b's rows [key, +16), columns [col0, +kCols).
template <typename T, int kHd, int kCols = kHd>
DS_DEVICE void weights_times_rows(float (&out)[kCols / 8][4], const float (&p)[2][4], Shared<T> b, int key, int col0 = 0) {
  typename Mma<T>::A fa;
  Mma<T>::from_c(fa, p[0], p[1]);
  DS_UNROLL
  for (int c = 0; c < kCols; c += 16) {
    typename Mma<T>::B fb[2];
    Mma<T>::load_b_transposed(fb, b, key, col0 + c, kHd + 8);
    Mma<T>::mma(out[c / 8], fa, fb[0]);
    Mma<T>::mma(out[c / 8 + 1], fa, fb[1]);
  }
}

// softmax(scale q k^T) v of a task's 16 rows, a tile's part at a time. A lane has two rows, g and g + 8: its "halves".
template <typename T, int kHd>
struct Softmax {
  float out[kHd / 8][4] = {}, top[2] = {-INFINITY, -INFINITY}, sum[2] = {};

  // Takes in keys [key0, +16) of the tile; sees(half, key in the tile).
  template <typename Sees>
  DS_DEVICE void attend(Shared<T> q, int row, Shared<T> k, Shared<T> v, int key0, float scale, const Sees& sees) {
    float s[2][4] = {};
    rows_times_rows<T, kHd>(s, q, row, k, key0);
    DS_UNROLL
    for (int half = 0; half < 2; ++half) {
      float best = top[half];
      DS_UNROLL
      for (int j = 0; j < 2; ++j)
        DS_UNROLL
        for (int e = 0; e < 2; ++e) {
          float& x = s[j][2 * half + e];
          x = sees(half, key0 + 8 * j + 2 * (lane() % 4) + e) ? x * scale : -INFINITY;
          best = x > best ? x : best;
        }
      DS_UNROLL
      for (int step = 1; step < 4; step *= 2) {
        const float other = shuffle_xor(best, step);
        best = other > best ? other : best;
      }
      // Nothing seen so far: all weights are zero, and exp(-inf - -inf) must not be taken.
      const bool nothing = best == -INFINITY;
      const float shrink = nothing ? 1.0f : expf(top[half] - best);
      top[half] = best;
      sum[half] *= shrink;
      DS_UNROLL
      for (int c = 0; c < kHd / 8; ++c) out[c][2 * half] *= shrink, out[c][2 * half + 1] *= shrink;
      DS_UNROLL
      for (int j = 0; j < 2; ++j)
        DS_UNROLL
        for (int e = 0; e < 2; ++e) {
          float& x = s[j][2 * half + e];
          x = nothing ? 0.0f : expf(x - best);
          sum[half] += x;
        }
    }
    weights_times_rows<T, kHd>(out, s, v, key0);
  }

  // Once, by all lanes together, before rows are stored.
  DS_DEVICE void finish() {
    DS_UNROLL
    for (int half = 0; half < 2; ++half)
      DS_UNROLL
      for (int step = 1; step < 4; step *= 2) sum[half] += shuffle_xor(sum[half], step);
  }
  DS_DEVICE void store_row(const Matrix& to, Place p, int head_dim, int half, bool zeros = false) const {
    DS_UNROLL
    for (int c = 0; c < kHd / 8; ++c)
      DS_UNROLL
      for (int e = 0; e < 2; ++e) {
        const int col = 8 * c + 2 * (lane() % 4) + e;
        if (col < head_dim) store_element(to, p.row, p.col + col, zeros ? 0.0f : out[c][2 * half + e] / sum[half]);
      }
  }
};

// Calls f with the padded head size as a constant.
template <int kValue>
struct HeadSize {
  static constexpr int value = kValue;
};
template <typename F>
void by_head_size(int head_dim, const F& f) {
  if (head_dim <= 16) f(HeadSize<16>{});
  else if (head_dim <= 64) f(HeadSize<64>{});
  else if (head_dim <= 128) f(HeadSize<128>{});
  else f(HeadSize<256>{});
  static_assert(kMaxHeadDim == 256);
}

}  // namespace dspark::cuda
