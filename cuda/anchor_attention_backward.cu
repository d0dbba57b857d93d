// anchor_attention_backward. With p = exp(s - lse) and delta = sum(d_out out): ds = scale p (d_out v - delta), d_q = ds k,
// d_k = ds^T q, d_v = p^T d_out. Three kernels: delta; d_q, by query rows as the forward; d_k and d_v, by keys, where a block walks
// the anchors that see its keys, and no others, in their order, so that every sum has one owner.
#include "cuda/anchor_attention.h"

namespace dspark::cuda {
namespace {

constexpr int kQueries = 32;  // query rows that the second direction takes at a time

// How a block is made up. Tasks of 16 query rows, or of 16 keys, as many as shared memory has room for. d_k and d_v of a head over 128
// are more than a thread has registers for: there two warps share a task, each has half of the columns.
template <typename T, int kHd>
struct Blocks {
  static constexpr int kTasks = sizeof(T) == 4 && kHd > 128 ? 2 : 4, kOwnKeys = 16 * kTasks, kShares = kHd > 128 ? 2 : 1, kCols = kHd / kShares;
};

DS_KERNEL void DS_THREADS(kBlock) anchor_delta_kernel(AnchorArgs a) {
  const int64_t pairs = a.q.rows * a.heads;
  for (int64_t i = block_x() * warps() + warp(); i < pairs; i += blocks_x() * warps()) {
    const int64_t row = i / a.heads, first = i % a.heads * a.head_dim;
    float dot = 0;
    for (int c = lane() * kChunk; c < a.head_dim; c += kWarp * kChunk) {
      Matrix out = a.out, d_out = a.d_out;
      out.cols = d_out.cols = first + a.head_dim;
      float o[kChunk], d[kChunk];
      load_chunk(o, out, row, first + c);
      load_chunk(d, d_out, row, first + c);
      for (int k = 0; k < kChunk; ++k) dot += o[k] * d[k];
    }
    dot = warp_sum(dot);
    if (lane() == 0) store(a.delta + i, dot);
  }
}

// d_q.
template <typename T, int kHd>
DS_KERNEL void DS_THREADS_ALONE((Blocks<T, kHd>::kTasks * kWarp)) anchor_dq_kernel(AnchorArgs a) {
  constexpr int kTasks = Blocks<T, kHd>::kTasks, kPitch = kHd + 8, kRows = 16 * kTasks, kBytes = static_cast<int>(sizeof(T));
  const Shared<T> q(0, kRows * kPitch), d_out(kRows * kPitch * kBytes, kRows * kPitch), k(2 * kRows * kPitch * kBytes, kKeys * kPitch),
      v((2 * kRows + kKeys) * kPitch * kBytes, kKeys * kPitch);
  const AnchorTasks<kTasks> tasks(a);
  const auto query = [&](int r) { return tasks.query(a, r); };
  load_tile<T, kHd>(q, kRows, a.q, a.head_dim, query);
  load_tile<T, kHd>(d_out, kRows, a.d_out, a.head_dim, query);

  float gradient[kHd / 8][4] = {}, lse[2] = {}, delta[2] = {};
  const int slots[2] = {tasks.row(0) % a.block, tasks.row(1) % a.block};
  DS_UNROLL
  for (int half = 0; half < 2; ++half) {
    const Place p = tasks.place(a, half);
    if (p.row < 0) continue;
    lse[half] = load(static_cast<const float*>(a.lse.data) + p.row * a.lse.stride + tasks.head(a, half));
    delta[half] = load(a.delta + p.row * a.heads + tasks.head(a, half));
  }
  tasks.template for_keys<T, kHd>(a, k, v, [&](int key0, const auto& sees) {
    float s[2][4] = {}, d[2][4] = {};
    rows_times_rows<T, kHd>(s, q, warp() * 16, k, key0);
    rows_times_rows<T, kHd>(d, d_out, warp() * 16, v, key0);
    DS_UNROLL
    for (int j = 0; j < 2; ++j)
      DS_UNROLL
      for (int i = 0; i < 4; ++i) {
        const bool seen = sees(slots[i / 2], key0 + 8 * j + 2 * (lane() % 4) + i % 2);
        s[j][i] = seen ? a.scale * expf(s[j][i] * a.scale - lse[i / 2]) * (d[j][i] - delta[i / 2]) : 0.0f;
      }
    weights_times_rows<T, kHd>(gradient, s, k, key0);
  });
  DS_UNROLL
  for (int i = 0; i < 4; ++i) {
    const Place p = tasks.place(a, i / 2);
    if (p.row < 0) continue;
    DS_UNROLL
    for (int c = 0; c < kHd / 8; ++c) {
      const int col = 8 * c + 2 * (lane() % 4) + i % 2;
      if (col < a.head_dim) store_element(a.d_q, p.row, p.col + col, gradient[c][i]);
    }
  }
}

// d_k and d_v of kOwnKeys keys, 16 a warp: context rows (blocks [0, context_blocks) of the grid), or the keys of one anchor's block.
template <typename T, int kHd>
DS_KERNEL void DS_THREADS_ALONE((Blocks<T, kHd>::kTasks * Blocks<T, kHd>::kShares * kWarp)) anchor_dkv_kernel(AnchorArgs a, int context_blocks) {
  using B = Blocks<T, kHd>;
  constexpr int kOwnKeys = B::kOwnKeys, kPitch = kHd + 8, kBytes = static_cast<int>(sizeof(T));
  const Shared<T> k(0, kOwnKeys * kPitch), v(kOwnKeys * kPitch * kBytes, kOwnKeys * kPitch), q(2 * kOwnKeys * kPitch * kBytes, kQueries * kPitch),
      d_out((2 * kOwnKeys + kQueries) * kPitch * kBytes, kQueries * kPitch);
  const Shared<float> lse((2 * kOwnKeys + 2 * kQueries) * kPitch * kBytes, kQueries), delta((2 * kOwnKeys + 2 * kQueries) * kPitch * kBytes + kQueries * 4, kQueries);
  const int group = a.heads / a.kv_heads, rows = group * a.block, kv_head = static_cast<int>(block_y());
  const int64_t kv_col = int64_t{kv_head} * a.head_dim;
  const int per_block = (a.block + kOwnKeys - 1) / kOwnKeys, index = static_cast<int>(block_x()) - context_blocks;
  const bool context = index < 0;
  const int own_anchor = context ? -1 : index / per_block;
  const int first = context ? static_cast<int>(block_x()) * kOwnKeys : index % per_block * kOwnKeys;  // of the context, or in the block
  const int64_t end = context ? a.k_ctx.rows : a.block, base = context ? 0 : int64_t{own_anchor} * a.block;
  const auto place = [&](int r) { return Place{first + r < end ? base + first + r : -1, kv_col}; };
  load_tile<T, kHd>(k, kOwnKeys, context ? a.k_ctx : a.k_block, a.head_dim, place);
  load_tile<T, kHd>(v, kOwnKeys, context ? a.v_ctx : a.v_block, a.head_dim, place);

  const int own = warp() % B::kTasks * 16, col0 = warp() / B::kTasks * B::kCols;  // this warp's keys and columns
  float d_k[B::kCols / 8][4] = {}, d_v[B::kCols / 8][4] = {};
  const int begin = context ? bisect_anchors(a, [&](const AnchorView& v) { return v.end > first; }) : own_anchor;
  const int stop = context ? bisect_anchors(a, [&](const AnchorView& v) { return v.begin >= first + kOwnKeys; }) : own_anchor + 1;
  for (int n = begin; n < stop; ++n) {
    const AnchorView view = anchor_view(a, n);
    if (view.row < 0) continue;  // the block of an anchor that is padding
    for (int r0 = 0; r0 < rows; r0 += kQueries) {
      sync_block();
      const auto query = [&](int r) { return query_place(a, n, kv_head, r0 + r); };
      load_tile<T, kHd>(q, kQueries, a.q, a.head_dim, query);
      load_tile<T, kHd>(d_out, kQueries, a.d_out, a.head_dim, query);
      for (int r = thread(); r < kQueries; r += threads()) {
        const Place p = query(r);
        const int head = kv_head * group + (r0 + r) / a.block;
        lse.set(r, p.row < 0 ? 0.0f : load(static_cast<const float*>(a.lse.data) + p.row * a.lse.stride + head));
        delta.set(r, p.row < 0 ? 0.0f : load(a.delta + p.row * a.heads + head));
      }
      sync_block();
      for (int row0 = 0; row0 < kQueries && r0 + row0 < rows; row0 += 16) {
        float s[2][4] = {}, d[2][4] = {};  // [16 keys, 16 query rows]
        rows_times_rows<T, kHd>(s, k, own, q, row0);
        rows_times_rows<T, kHd>(d, v, own, d_out, row0);
        DS_UNROLL
        for (int j = 0; j < 2; ++j)
          DS_UNROLL
          for (int i = 0; i < 4; ++i) {
            const int r = row0 + 8 * j + 2 * (lane() % 4) + i % 2, slot = (r0 + r) % a.block, key = first + own + lane() / 4 + 8 * (i / 2);
            const bool seen = r0 + r < rows && (context ? sees_context(a, view, slot, key) : sees_block(a, slot, key));
            s[j][i] = seen ? expf(s[j][i] * a.scale - lse[r]) : 0.0f;
            d[j][i] = a.scale * s[j][i] * (d[j][i] - delta[r]);
          }
        weights_times_rows<T, kHd, B::kCols>(d_v, s, d_out, row0, col0);
        weights_times_rows<T, kHd, B::kCols>(d_k, d, q, row0, col0);
      }
    }
  }
  const Matrix &to_k = context ? a.d_k_ctx : a.d_k_block, &to_v = context ? a.d_v_ctx : a.d_v_block;
  DS_UNROLL
  for (int i = 0; i < 4; ++i) {
    const Place p = place(own + lane() / 4 + 8 * (i / 2));
    if (p.row < 0) continue;
    DS_UNROLL
    for (int c = 0; c < B::kCols / 8; ++c) {
      const int col = col0 + 8 * c + 2 * (lane() % 4) + i % 2;
      if (col >= a.head_dim) continue;
      store_element(to_k, p.row, p.col + col, d_k[c][i]);
      store_element(to_v, p.row, p.col + col, d_v[c][i]);
    }
  }
}

template <typename T>
void run(Stream stream, const AnchorArgs& a) {
  const auto kv_heads = static_cast<unsigned>(a.kv_heads);
  by_head_size(a.head_dim, [&](auto size) {
    constexpr int kHd = decltype(size)::value, kRowBytes = (kHd + 8) * static_cast<int>(sizeof(T));
    using B = Blocks<T, kHd>;
    const auto context_blocks = static_cast<int>((a.k_ctx.rows + B::kOwnKeys - 1) / B::kOwnKeys);
    const auto key_blocks = static_cast<unsigned>(context_blocks + a.anchors * ((a.block + B::kOwnKeys - 1) / B::kOwnKeys));
    if (a.anchors > 0) launch(stream, {task_blocks(a, B::kTasks), kv_heads}, {B::kTasks * kWarp}, (2 * 16 * B::kTasks + 2 * kKeys) * kRowBytes, anchor_dq_kernel<T, kHd>, a);
    if (key_blocks > 0)
      launch(stream, {key_blocks, kv_heads}, {B::kTasks * B::kShares * kWarp}, (2 * B::kOwnKeys + 2 * kQueries) * kRowBytes + 2 * kQueries * 4, anchor_dkv_kernel<T, kHd>, a,
             context_blocks);
  });
}

}  // namespace

void anchor_attention_backward(Stream stream, const AnchorArgs& a) {
  if (const int64_t pairs = a.q.rows * a.heads; pairs > 0) {
    const int64_t blocks = (pairs + kBlock / kWarp - 1) / (kBlock / kWarp);
    launch(stream, {static_cast<unsigned>(blocks < 4096 ? blocks : 4096)}, {kBlock}, 0, anchor_delta_kernel, a);
  }
  if (a.in_bf16) run<bf16>(stream, a);
  else run<float>(stream, a);
}

}  // namespace dspark::cuda
