// cache_attention: a task is 16 query rows of one kv head (row, then head in its group), keys come from the cache.
//
// Keys come in parts of kPart positions. A row's result is its parts joined in their order, wherever each was worked out: many rows
// keep the GPU busy by themselves, and a block goes through all parts of its rows; few rows (decoding) have a block a part, which
// leaves what it found in scratch for a second kernel. Parts lie at multiples of kPart and the joining is the same arithmetic, so
// that a row's bits depend on neither.
#include "cuda/attention.h"

namespace dspark::cuda {
namespace {

constexpr int64_t kPart = 512;
static_assert(kPart % kKeys == 0);

// Warps of a block, as many as shared memory has room for.
template <typename T, int kHd>
constexpr int kTasks = sizeof(T) == 4 && kHd > 128 ? 2 : 4;

// Cache rows that query i sees: [begin, end).
DS_DEVICE int64_t first_seen(const CacheArgs& a, int64_t i) { return a.window > 0 && a.first + i >= a.window ? a.first + i - a.window + 1 : int64_t{0}; }
DS_DEVICE int64_t behind_seen(const CacheArgs& a, int64_t i) { return a.first + i + 1; }

// What two parts of a row weigh when they become one. The product that is not fused is the later part's, in every kernel.
struct Join {
  float top, before, after;
  DS_DEVICE Join(float first, float second) : top(second > first ? second : first), before(expf(first - top)), after(expf(second - top)) {}
  DS_DEVICE float operator()(float x, float y) const { return fmaf(x, before, y * after); }
};

// The block's query rows.
template <typename T, int kHd>
struct CacheRows {
  static constexpr int kRows = 16 * kTasks<T, kHd>;
  const CacheArgs& a;
  int group, kv_head;
  int64_t first, last_query;
  DS_DEVICE CacheRows(const CacheArgs& args, int64_t block)
      : a(args), group(args.heads / args.kv_heads), kv_head(static_cast<int>(block_y())), first(block * kRows), last_query(args.q.rows - 1) {}
  DS_DEVICE int64_t query(int r) const {  // the last one again for rows behind the end, whose results are not stored
    const int64_t i = (first + r) / group;
    return i < last_query ? i : last_query;
  }
  DS_DEVICE int head(int r) const { return kv_head * group + static_cast<int>((first + r) % group); }
  DS_DEVICE Place place(int r) const {
    const int64_t i = (first + r) / group;
    return i > last_query ? Place{-1, 0} : Place{i, int64_t{head(r)} * a.head_dim};
  }
  DS_DEVICE int64_t begin() const { return first_seen(a, query(0)); }
  DS_DEVICE int64_t end() const { return behind_seen(a, query(kRows - 1)); }

  // The tiles in shared memory: q, loaded once, and the keys and values at work.
  DS_DEVICE Shared<T> q() const { return Shared<T>(0, kRows * (kHd + 8)); }
  static constexpr int kTileBytes = (kRows + 2 * kKeys) * (kHd + 8) * static_cast<int>(sizeof(T));
  DS_DEVICE void load_queries() const {
    load_tile<T, kHd>(q(), kRows, a.q, a.head_dim, [&](int r) { return place(r); });
  }

  // Takes in part `part`, as far as the block sees some of it.
  DS_DEVICE void attend(Softmax<T, kHd>& softmax, int64_t part) const {
    constexpr int kPitch = kHd + 8, kBytes = static_cast<int>(sizeof(T));
    const Shared<T> k(kRows * kPitch * kBytes, kKeys * kPitch), v((kRows + kKeys) * kPitch * kBytes, kKeys * kPitch);
    const int lane_row = warp() * 16 + lane() / 4;
    const int64_t mine[2] = {query(lane_row), query(lane_row + 8)};
    const int64_t warp_begin = first_seen(a, query(warp() * 16)), warp_end = behind_seen(a, query(warp() * 16 + 15));
    const int64_t filled = behind_seen(a, last_query), kv_col = int64_t{kv_head} * a.head_dim;
    const int64_t from = begin() > part * kPart ? begin() : part * kPart, to = end() < (part + 1) * kPart ? end() : (part + 1) * kPart;
    for (int64_t t0 = from / kKeys * kKeys; t0 < to; t0 += kKeys) {
      const auto key_place = [&](int r) { return Place{t0 + r < filled ? t0 + r : -1, kv_col}; };
      sync_block();
      load_tile<T, kHd>(k, kKeys, a.k, a.head_dim, key_place);
      load_tile<T, kHd>(v, kKeys, a.v, a.head_dim, key_place);
      sync_block();
      if (t0 >= warp_end || t0 + kKeys <= warp_begin) continue;
      for (int key0 = 0; key0 < kKeys; key0 += 16)
        softmax.attend(q(), warp() * 16, k, v, key0, a.scale, [&](int half, int key) { return t0 + key >= first_seen(a, mine[half]) && t0 + key < behind_seen(a, mine[half]); });
    }
    softmax.finish();
  }
};

// The block's rows: all parts of them; or, with `parts`, one, to parts[part][row][head]: head_dim sums, top, sum. blocks_x is then row
// blocks times n_parts. What is joined so far has no room in registers: it lies in shared memory, each thread's own.
template <typename T, int kHd>
DS_KERNEL void DS_THREADS_ALONE((kTasks<T, kHd> * kWarp)) cache_attention_kernel(CacheArgs a, int64_t first_part, int n_parts, float* parts) {
  constexpr int kThreads = kTasks<T, kHd> * kWarp;
  const CacheRows<T, kHd> rows(a, parts != nullptr ? block_x() / n_parts : block_x());
  const int64_t own = block_x() % n_parts, begin = parts != nullptr ? first_part + own : rows.begin() / kPart, last = parts != nullptr ? begin : (rows.end() - 1) / kPart;
  rows.load_queries();
  const Shared<float> joined(rows.kTileBytes, begin < last ? kHd / 2 * kThreads : 0);
  float top[2] = {-INFINITY, -INFINITY}, sum[2] = {};
  Softmax<T, kHd> softmax;
  for (int64_t part = begin; part <= last; ++part) {
    softmax = {};
    rows.attend(softmax, part);
    if (begin == last) break;
    DS_UNROLL
    for (int half = 0; half < 2; ++half) {
      if (softmax.top[half] == -INFINITY) continue;
      const bool alone = top[half] == -INFINITY;
      const Join join(alone ? softmax.top[half] : top[half], softmax.top[half]);
      top[half] = join.top;
      sum[half] = alone ? softmax.sum[half] : join(sum[half], softmax.sum[half]);
      DS_UNROLL
      for (int c = 0; c < kHd / 8; ++c)
        DS_UNROLL
        for (int e = 0; e < 2; ++e) {
          const int at = (4 * c + 2 * half + e) * kThreads + thread();
          joined.set(at, alone ? softmax.out[c][2 * half + e] : join(joined[at], softmax.out[c][2 * half + e]));
        }
    }
  }
  DS_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int r = warp() * 16 + lane() / 4 + 8 * half;
    const Place p = rows.place(r);
    if (p.row < 0) continue;
    float* to = parts == nullptr ? nullptr : parts + ((own * a.q.rows + p.row) * a.heads + rows.head(r)) * (a.head_dim + 2);
    if (begin < last) softmax.sum[half] = sum[half];
    DS_UNROLL
    for (int c = 0; c < kHd / 8; ++c)
      DS_UNROLL
      for (int e = 0; e < 2; ++e) {
        const int col = 8 * c + 2 * (lane() % 4) + e;
        if (col >= a.head_dim) continue;
        const float x = begin < last ? joined[(4 * c + 2 * half + e) * kThreads + thread()] : softmax.out[c][2 * half + e];
        if (to != nullptr) store(to + col, x);
        else store_element(a.out, p.row, p.col + col, x / softmax.sum[half]);
      }
    if (to == nullptr || lane() % 4 != 0) continue;
    store(to + a.head_dim, softmax.top[half]);
    store(to + a.head_dim + 1, softmax.sum[half]);
  }
}

DS_KERNEL void DS_THREADS(kBlock) cache_join_kernel(CacheArgs a, int n_parts, const float* parts) {
  const int64_t pairs = a.q.rows * a.heads;
  for (int64_t i = block_x() * warps() + warp(); i < pairs; i += blocks_x() * warps())
    for (int col = lane(); col < a.head_dim; col += kWarp) {
      float top = -INFINITY, sum = 0, out = 0;
      for (int part = 0; part < n_parts; ++part) {
        const float* from = parts + (part * pairs + i) * (a.head_dim + 2);
        const float part_top = load(from + a.head_dim), part_sum = load(from + a.head_dim + 1), part_out = load(from + col);
        if (part_top == -INFINITY) continue;
        const bool alone = top == -INFINITY;
        const Join join(alone ? part_top : top, part_top);
        top = join.top;
        sum = alone ? part_sum : join(sum, part_sum);
        out = alone ? part_out : join(out, part_out);
      }
      store_element(a.out, i / a.heads, i % a.heads * a.head_dim + col, out / sum);
    }
}

template <typename T>
void run(Stream stream, const CacheArgs& a, Scratch scratch) {
  const int64_t rows = a.q.rows * (a.heads / a.kv_heads), pairs = a.q.rows * a.heads;
  const int64_t oldest = a.window > 0 && a.first >= a.window ? a.first - a.window + 1 : 0;
  const int64_t first_part = oldest / kPart, n_parts = (a.first + a.q.rows - 1) / kPart - first_part + 1;
  const bool apart = n_parts > 1 && n_parts * pairs * (a.head_dim + 2) * 4 <= scratch.bytes;
  float* parts = apart ? static_cast<float*>(scratch.data) : nullptr;
  by_head_size(a.head_dim, [&](auto size) {
    constexpr int kHd = decltype(size)::value, kThreads = kTasks<T, kHd> * kWarp;
    using Rows = CacheRows<T, kHd>;
    const int64_t blocks = (rows + Rows::kRows - 1) / Rows::kRows;
    const auto kv_heads = static_cast<unsigned>(a.kv_heads);
    launch(stream, {static_cast<unsigned>(apart ? blocks * n_parts : blocks), kv_heads}, {kThreads}, Rows::kTileBytes + (n_parts > 1 && !apart ? kHd / 2 * kThreads * 4 : 0),
           cache_attention_kernel<T, kHd>, a, first_part, static_cast<int>(n_parts), parts);
  });
  if (apart) {
    const int64_t blocks = (pairs + kBlock / kWarp - 1) / (kBlock / kWarp);
    launch(stream, {static_cast<unsigned>(blocks < 4096 ? blocks : 4096)}, {kBlock}, 0, cache_join_kernel, a, static_cast<int>(n_parts), parts);
  }
}

}  // namespace

void cache_attention(Stream stream, const CacheArgs& a, Scratch scratch) {
  if (a.q.rows == 0) return;
  if (a.in_bf16) run<bf16>(stream, a, scratch);
  else run<float>(stream, a, scratch);
}

}  // namespace dspark::cuda
