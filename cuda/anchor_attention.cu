// anchor_attention: flash-style, one warp a task of 16 query rows, fp32 softmax.
#include "cuda/anchor_attention.h"

namespace dspark::cuda {
namespace {

template <typename T>
constexpr int kTasks = sizeof(T) == 2 ? 8 : 4;  // warps of a block; fp32 tiles are twice as large

template <typename T, int kHd>
DS_KERNEL void DS_THREADS_ALONE(kTasks<T>* kWarp) anchor_attention_kernel(AnchorArgs a) {
  constexpr int kPitch = kHd + 8, kRows = 16 * kTasks<T>;
  const Shared<T> q(0, kRows * kPitch), k(kRows * kPitch * static_cast<int>(sizeof(T)), kKeys * kPitch),
      v((kRows + kKeys) * kPitch * static_cast<int>(sizeof(T)), kKeys * kPitch);
  const int group = a.heads / a.kv_heads, rows = group * a.block, per_anchor = (rows + 15) / 16;
  const int kv_head = static_cast<int>(block_y()), first_task = static_cast<int>(block_x()) * kTasks<T>;
  const int first_anchor = first_task / per_anchor, last_anchor = (first_task + kTasks<T> - 1) / per_anchor;
  const int anchor = (first_task + warp()) / per_anchor, first_row = (first_task + warp()) % per_anchor * 16;
  const AnchorView mine = anchor_view(a, anchor);
  int lo = 0x7fffffff, hi = 0;
  for (int n = first_anchor; n <= last_anchor; ++n) {
    const AnchorView w = anchor_view(a, n);
    if (w.begin >= w.end) continue;
    lo = w.begin < lo ? w.begin : lo;
    hi = w.end > hi ? w.end : hi;
  }
  load_tile<T, kHd>(q, kRows, a.q, a.head_dim, [&](int r) {
    const int task = first_task + r / 16;
    return query_place(a, task / per_anchor, kv_head, task % per_anchor * 16 + r % 16);
  });

  // Lane's two rows: g and g + 8 of the task.
  float out[kHd / 8][4] = {}, top[2] = {-INFINITY, -INFINITY}, sum[2] = {};
  int slot[2];
  DS_UNROLL
  for (int i = 0; i < 2; ++i) slot[i] = (first_row + lane() / 4 + 8 * i) % a.block;
  const int64_t kv_col = int64_t{kv_head} * a.head_dim;

  // The online softmax over 16 keys of the tile; sees(slot, key in the tile).
  const auto attend = [&](int key0, const auto& sees) {
    float s[2][4] = {};
    rows_times_rows<T, kHd>(s, q, warp() * 16, k, key0);
    DS_UNROLL
    for (int half = 0; half < 2; ++half) {
      float best = top[half];
      DS_UNROLL
      for (int j = 0; j < 2; ++j)
        DS_UNROLL
        for (int e = 0; e < 2; ++e) {
          float& x = s[j][2 * half + e];
          x = sees(slot[half], key0 + 8 * j + 2 * (lane() % 4) + e) ? x * a.scale : -INFINITY;
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
  };

  for (int t0 = lo / kKeys * kKeys; t0 < hi; t0 += kKeys) {
    bool wanted = false;
    for (int n = first_anchor; n <= last_anchor; ++n) wanted = wanted || sees_tile(anchor_view(a, n), t0, kKeys);
    if (!wanted) continue;
    sync_block();
    const auto place = [&](int r) { return Place{t0 + r < a.k_ctx.rows ? int64_t{t0} + r : -1, kv_col}; };
    load_tile<T, kHd>(k, kKeys, a.k_ctx, a.head_dim, place);
    load_tile<T, kHd>(v, kKeys, a.v_ctx, a.head_dim, place);
    sync_block();
    if (!sees_tile(mine, t0, kKeys)) continue;
    for (int key0 = 0; key0 < kKeys; key0 += 16) attend(key0, [&](int row_slot, int key) { return sees_context(a, mine, row_slot, t0 + key); });
  }
  for (int n = first_anchor; n <= last_anchor && n < a.anchors; ++n)
    for (int j0 = 0; j0 < a.block; j0 += kKeys) {
      sync_block();
      const auto place = [&](int r) { return Place{j0 + r < a.block ? int64_t{n} * a.block + j0 + r : -1, kv_col}; };
      load_tile<T, kHd>(k, kKeys, a.k_block, a.head_dim, place);
      load_tile<T, kHd>(v, kKeys, a.v_block, a.head_dim, place);
      sync_block();
      if (n != anchor || mine.row < 0) continue;
      for (int key0 = 0; key0 < kKeys && j0 + key0 < a.block; key0 += 16) attend(key0, [&](int row_slot, int key) { return sees_block(a, row_slot, j0 + key); });
    }

  DS_UNROLL
  for (int half = 0; half < 2; ++half) {
    DS_UNROLL
    for (int step = 1; step < 4; step *= 2) sum[half] += shuffle_xor(sum[half], step);
    const int r = first_row + lane() / 4 + 8 * half;
    const Place p = query_place(a, anchor, kv_head, r);
    if (p.row < 0) continue;
    const bool padding = mine.row < 0;
    if (lane() % 4 == 0) store(static_cast<float*>(a.lse.data) + p.row * a.lse.stride + kv_head * group + r / a.block, padding ? 0.0f : top[half] + logf(sum[half]));
    DS_UNROLL
    for (int c = 0; c < kHd / 8; ++c)
      DS_UNROLL
      for (int e = 0; e < 2; ++e) {
        const int col = 8 * c + 2 * (lane() % 4) + e;
        if (col < a.head_dim) store_element(a.out, p.row, p.col + col, padding ? 0.0f : out[c][2 * half + e] / sum[half]);
      }
  }
}

template <typename T>
void run(Stream stream, const AnchorArgs& a) {
  const int rows = a.heads / a.kv_heads * a.block, per_anchor = (rows + 15) / 16;
  const auto blocks = static_cast<unsigned>((int64_t{a.anchors} * per_anchor + kTasks<T> - 1) / kTasks<T>);
  by_head_size(a.head_dim, [&](auto size) {
    constexpr int kHd = decltype(size)::value;
    launch(stream, {blocks, static_cast<unsigned>(a.kv_heads)}, {kTasks<T> * kWarp}, (16 * kTasks<T> + 2 * kKeys) * (kHd + 8) * static_cast<int>(sizeof(T)), anchor_attention_kernel<T, kHd>, a);
  });
}

}  // namespace

void anchor_attention(Stream stream, const AnchorArgs& a) {
  if (a.anchors == 0) return;
  if (a.in_bf16) run<bf16>(stream, a);
  else run<float>(stream, a);
}

}  // namespace dspark::cuda
