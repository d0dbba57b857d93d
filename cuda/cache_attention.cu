// cache_attention: a task is 16 query rows of one kv head (row, then head in its group), keys come from the cache.
#include "cuda/attention.h"

namespace dspark::cuda {
namespace {

constexpr int kTasks = 4;  // warps of a block
constexpr int kRows = 16 * kTasks;

template <typename T, int kHd>
DS_KERNEL void DS_THREADS_ALONE(kTasks* kWarp) cache_attention_kernel(CacheArgs a) {
  constexpr int kPitch = kHd + 8, kBytes = static_cast<int>(sizeof(T));
  const Shared<T> q(0, kRows * kPitch), k(kRows * kPitch * kBytes, kKeys * kPitch), v((kRows + kKeys) * kPitch * kBytes, kKeys * kPitch);
  const int group = a.heads / a.kv_heads, kv_head = static_cast<int>(block_y());
  const int64_t first_row = block_x() * kRows, last_query = a.q.rows - 1;
  const auto query_of = [&](int r) {  // the last one again for rows behind the end, whose results are not stored
    const int64_t i = (first_row + r) / group;
    return i < last_query ? i : last_query;
  };
  const auto place = [&](int r) {
    const int64_t i = (first_row + r) / group;
    return i > last_query ? Place{-1, 0} : Place{i, (int64_t{kv_head} * group + (first_row + r) % group) * a.head_dim};
  };
  // Cache rows that queries [i, j] see some of: [begin_of(i), end_of(j)).
  const auto begin_of = [&](int64_t i) { return a.window > 0 && a.first + i >= a.window ? a.first + i - a.window + 1 : int64_t{0}; };
  const auto end_of = [&](int64_t i) { return a.first + i + 1; };
  load_tile<T, kHd>(q, kRows, a.q, a.head_dim, place);

  Softmax<T, kHd> softmax;
  const int first_lane_row = warp() * 16 + lane() / 4;
  const int64_t mine[2] = {query_of(first_lane_row), query_of(first_lane_row + 8)};
  const int64_t warp_begin = begin_of(query_of(warp() * 16)), warp_end = end_of(query_of(warp() * 16 + 15));
  const int64_t filled = end_of(last_query), end = end_of(query_of(kRows - 1)), kv_col = int64_t{kv_head} * a.head_dim;
  for (int64_t t0 = begin_of(query_of(0)) / kKeys * kKeys; t0 < end; t0 += kKeys) {
    const auto key_place = [&](int r) { return Place{t0 + r < filled ? t0 + r : -1, kv_col}; };
    sync_block();
    load_tile<T, kHd>(k, kKeys, a.k, a.head_dim, key_place);
    load_tile<T, kHd>(v, kKeys, a.v, a.head_dim, key_place);
    sync_block();
    if (t0 >= warp_end || t0 + kKeys <= warp_begin) continue;
    for (int key0 = 0; key0 < kKeys; key0 += 16)
      softmax.attend(q, warp() * 16, k, v, key0, a.scale, [&](int half, int key) { return t0 + key >= begin_of(mine[half]) && t0 + key < end_of(mine[half]); });
  }
  softmax.finish();
  DS_UNROLL
  for (int half = 0; half < 2; ++half)
    if (const Place p = place(first_lane_row + 8 * half); p.row >= 0) softmax.store_row(a.out, p, a.head_dim, half);
}

template <typename T>
void run(Stream stream, const CacheArgs& a) {
  const int64_t rows = a.q.rows * (a.heads / a.kv_heads);
  by_head_size(a.head_dim, [&](auto size) {
    constexpr int kHd = decltype(size)::value;
    launch(stream, {static_cast<unsigned>((rows + kRows - 1) / kRows), static_cast<unsigned>(a.kv_heads)}, {kTasks * kWarp}, (kRows + 2 * kKeys) * (kHd + 8) * static_cast<int>(sizeof(T)),
           cache_attention_kernel<T, kHd>, a);
  });
}

}  // namespace

void cache_attention(Stream stream, const CacheArgs& a) {
  if (a.q.rows == 0) return;
  if (a.in_bf16) run<bf16>(stream, a);
  else run<float>(stream, a);
}

}  // namespace dspark::cuda
