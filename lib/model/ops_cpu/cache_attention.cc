// cache_attention on CPUs: contract in model/ops.h.
//
// One item of work is a kv head and a run of query rows with all query heads of that kv head. Tiles of keys start at fixed
// positions (multiples of kTileKeys), so a row's sums have the same order whatever rows are computed with it. Always on
// floats.
#include "model/ops_cpu/attention_common.h"

namespace dspark::model::cpu {
namespace {

// Rows per call of the tile kernel: few enough that tiles before or behind their keys are skipped.
constexpr int64_t kStepRows = 48;

class CacheForward {
 public:
  CacheForward(const CacheAttention& a, const Kernels& k, void* memory)
      : a_(a), k_(k), hd_(a.head_dim), padded_(padded_head(hd_)), group_(a.q.cols / a.k_cache.cols) {
    Pieces pieces(memory);
    const int64_t rows = max_query_rows(padded_);
    raw_ = pieces.take(kTileKeys * padded_);
    keys_t_ = pieces.take(kTileKeys * padded_);
    values_ = pieces.take(kTileKeys * padded_);
    q_ = pieces.take(rows * padded_);
    sum_ = pieces.take(rows * padded_);
    top_ = pieces.take(rows);
    norm_ = pieces.take(rows);
    score_ = pieces.take(std::min(rows, kStepRows) * kTileKeys);
    low_ = pieces.take<int32_t>(rows);
    high_ = pieces.take<int32_t>(rows);
  }

  // Query rows [first, last), query heads [head, head + heads) of one kv head. Scratch row = query row, then head.
  void run(int64_t first, int64_t last, int64_t head, int64_t heads) {
    const int64_t rows = (last - first) * heads, kv = head / group_;
    for (int64_t i = first; i < last; ++i)
      k_.attention_load(q_ + (i - first) * heads * padded_, head_in(a_.q, i, head, hd_), hd_, heads, hd_, padded_, false);
    std::fill_n(sum_, rows * padded_, 0.0f);
    std::fill_n(top_, rows, -1e30f);  // below any score; finite, so that differences are
    std::fill_n(norm_, rows, 0.0f);
    for (int64_t tile = tile_at(0, seen(first).low), end = seen(last - 1).high; tile < end; tile += kTileKeys) {
      const int64_t keys = std::min<int64_t>(kTileKeys, end - tile);
      k_.attention_load(raw_, head_in(a_.k_cache, tile, kv, hd_), a_.k_cache.stride, keys, hd_, padded_, false);
      k_.attention_transpose(keys_t_, raw_, keys, padded_);
      k_.attention_load(values_, head_in(a_.v_cache, tile, kv, hd_), a_.v_cache.stride, keys, hd_, padded_, false);
      for (int64_t r = 0; r < rows; ++r) set_limits(seen(first + r / heads), tile, low_ + r, high_ + r);
      for (int64_t r = 0; r < rows; r += kStepRows) step(r, std::min(kStepRows, rows - r));
    }
    for (int64_t r = 0; r < rows; ++r)
      k_.attention_finish(head_out(a_.out, first + r / heads, head + r % heads, hd_), sum_ + r * padded_, top_[r], norm_[r],
                          hd_);
  }

 private:
  Range seen(int64_t i) const {
    const int64_t at = a_.first + i;
    return {a_.window == 0 ? 0 : std::max<int64_t>(0, at - a_.window + 1), at + 1};
  }

  void step(int64_t r, int64_t rows) {
    const Range keys = union_of(low_ + r, high_ + r, rows);
    if (keys.low >= keys.high) return;
    k_.attention_update({.pairs = false, .rows = rows, .padded = padded_, .begin = keys.low, .end = keys.high,
                         .scale = static_cast<float>(a_.scale), .q = q_ + r * padded_,
                         .keys_t = keys_t_, .values = values_, .low = low_ + r, .high = high_ + r,
                         .sum = sum_ + r * padded_, .top = top_ + r, .norm = norm_ + r, .score = score_});
  }

  const CacheAttention& a_;
  const Kernels& k_;
  const int64_t hd_, padded_, group_;
  float *raw_, *keys_t_, *values_, *q_, *sum_, *top_, *norm_, *score_;
  int32_t *low_, *high_;
};

}  // namespace

void CpuOps::cache_attention(Context&, const CacheAttention& a) {
  const int64_t n = a.q.rows, kv_heads = a.k_cache.cols / a.head_dim, group = a.q.cols / a.k_cache.cols;
  const int64_t max_rows = max_query_rows(padded_head(a.head_dim));
  const int64_t heads = std::min(group, max_rows);
  const int64_t width = max_rows / heads;  // query rows of one item
  const int64_t chunks = (n + width - 1) / width;
  m_.pool().parallel_for(kv_heads * chunks, 1, [&](int64_t begin, int64_t end, int thread) {
    CacheForward forward(a, m_.kernels(), m_.scratch<>(thread));
    for (int64_t item = begin; item < end; ++item) {
      const int64_t kv = item / chunks, chunk = balanced(item % chunks, chunks);
      for (int64_t h = 0; h < group; h += heads)
        forward.run(chunk * width, std::min(n, (chunk + 1) * width), kv * group + h, std::min(heads, group - h));
    }
  });
}

}  // namespace dspark::model::cpu
