// What the kernels of anchor attention, forward and backward, share: who sees what, and how rows come into shared memory.
//
// A task is 16 query rows of one anchor and one kv head (rows: head in the group, then slot) and is one warp's. A block takes
// neighbouring tasks, so that neighbouring anchors share the context tiles they load; a warp leaves out tiles its anchor does not
// see, and tiles begin at multiples of kKeys rows of the context, so that a row's bits depend on nothing but the row.
#pragma once

#include "cuda/matrix.h"
#include "cuda/tile.h"

namespace dspark::cuda {

constexpr int kKeys = 32;  // context rows of one tile

// One anchor's view. Rows of the context it may see: [begin, end).
struct AnchorView {
  int row, doc, begin, end;
};

DS_DEVICE AnchorView anchor_view(const AnchorArgs& a, int anchor) {
  AnchorView v{-1, 0, 0, 0};
  if (anchor >= a.anchors) return v;
  v.row = load(a.anchor_row + anchor);
  if (v.row < 0) return v;
  v.doc = load(a.doc_start + anchor);
  const int first = a.window == 0 ? v.doc : a.by_anchor ? v.row - a.window : v.row - a.window + 1;  // slot 0 sees farthest back
  v.begin = first > v.doc ? first : v.doc;
  v.end = v.row;
  return v;
}
DS_DEVICE bool sees_tile(const AnchorView& v, int first, int keys) { return v.row >= 0 && first < v.end && first + keys > v.begin; }
DS_DEVICE bool sees_context(const AnchorArgs& a, const AnchorView& v, int slot, int t) {
  return t >= v.begin && t < v.end && (a.window == 0 || a.by_anchor || t > v.row + slot - a.window);
}
DS_DEVICE bool sees_block(const AnchorArgs& a, int slot, int j) { return j < a.block && (!a.causal || (j <= slot && (a.window == 0 || slot - j < a.window))); }

// Where a row of a tile comes from; row -1: zeros.
struct Place {
  int64_t row, col;
};
// Query row r of an anchor (head in the group * block + slot).
DS_DEVICE Place query_place(const AnchorArgs& a, int anchor, int kv_head, int r) {
  const int group = a.heads / a.kv_heads;
  if (r >= group * a.block || anchor >= a.anchors) return {-1, 0};
  return {int64_t{anchor} * a.block + r % a.block, int64_t{kv_head * group + r / a.block} * a.head_dim};
}

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
// out [kHd / 8][4] += p (16 x 16, as rows_times_rows leaves it, rounded to T) times b's rows [key, +16).
template <typename T, int kHd>
DS_DEVICE void weights_times_rows(float (&out)[kHd / 8][4], const float (&p)[2][4], Shared<T> b, int key) {
  typename Mma<T>::A fa;
  Mma<T>::from_c(fa, p[0], p[1]);
  DS_UNROLL
  for (int c = 0; c < kHd; c += 16) {
    typename Mma<T>::B fb[2];
    Mma<T>::load_b_transposed(fb, b, key, c, kHd + 8);
    Mma<T>::mma(out[c / 8], fa, fb[0]);
    Mma<T>::mma(out[c / 8 + 1], fa, fb[1]);
  }
}

// Calls f with the padded head size as a constant.
template <int kValue>
struct HeadSize {
  static constexpr int value = kValue;
};
template <typename F>
void by_head_size(int head_dim, const F& f) {
  if (head_dim <= 16) f(HeadSize<16>{});
  else if (head_dim <= 64) f(HeadSize<64>{});
  else f(HeadSize<128>{});
}

}  // namespace dspark::cuda
