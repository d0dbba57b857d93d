// anchor_attention on CPUs: contract in model/ops.h.
//
// One item of work is a kv head and a few neighbouring anchors. The rows of all their slots and of all query heads of that
// kv head go through the context tile by tile together, so that a tile is converted and transposed once for about 190 rows.
// Tiles start at the document's first row, the block's own slots come last: the order of a row's sums depends on its
// document and its position alone.
#include <cstring>

#include "model/ops_cpu/attention_common.h"

namespace dspark::model::cpu {
namespace {

// Anchors [first, last) of one document, with query heads [head, head + heads).
struct Group {
  int64_t first, last, head, heads;
};

class Forward {
 public:
  Forward(const AnchorAttention& a, const Kernels& k, void* memory)
      : a_(a), k_(k), hd_(a.head_dim), padded_(padded_head(hd_)), block_(a.rule.block),
        pairs_(takes_pairs(k, {&a.q, &a.k_ctx, &a.v_ctx, &a.k_block, &a.v_block})), units_(pairs_ ? padded_ / 2 : padded_) {
    Pieces pieces(memory);
    const int64_t rows = max_query_rows(padded_);
    raw_ = pieces.take(kTileKeys * padded_);
    keys_t_ = pieces.take(kTileKeys * padded_);
    values_ = pieces.take(kTileKeys * padded_);
    q_ = pieces.take(rows * padded_);
    sum_ = pieces.take(rows * padded_);
    top_ = pieces.take(rows);
    norm_ = pieces.take(rows);
    score_ = pieces.take(rows * kTileKeys);
    low_ = pieces.take<int32_t>(rows);
    high_ = pieces.take<int32_t>(rows);
  }

  void run(const Group& g) {
    const int64_t kv = g.head / (a_.q.cols / a_.k_ctx.cols);
    const int64_t rows = (g.last - g.first) * rows_of_anchor(g);
    start(g, rows);
    const int64_t doc = doc_start(g.first);
    int64_t low = anchor_row(g.last - 1), high = doc;
    for (int64_t a = g.first; a < g.last; ++a) {
      low = std::min(low, seen_context(a_.rule, anchor_row(a), doc, 0).low);
      high = std::max(high, anchor_row(a));
    }
    for (int64_t tile = tile_at(doc, low); tile < high; tile += kTileKeys) {
      load_tile(a_.k_ctx, a_.v_ctx, tile, std::min<int64_t>(kTileKeys, high - tile), kv);
      for (int64_t a = g.first; a < g.last; ++a)
        step(g, a, tile, [&](int64_t slot) { return seen_context(a_.rule, anchor_row(a), doc, slot); });
    }
    for (int64_t a = g.first; a < g.last; ++a)
      for (int64_t tile = 0; tile < block_; tile += kTileKeys) {
        load_tile(a_.k_block, a_.v_block, a * block_ + tile, std::min<int64_t>(kTileKeys, block_ - tile), kv);
        step(g, a, tile, [&](int64_t slot) { return seen_slots(a_.rule, slot); });
      }
    finish(g);
  }

 private:
  int64_t anchor_row(int64_t a) const { return pointer<int32_t>(a_.anchor_row)[a]; }
  int64_t doc_start(int64_t a) const { return pointer<int32_t>(a_.doc_start)[a]; }
  int64_t rows_of_anchor(const Group& g) const { return g.heads * block_; }
  int64_t first_row(const Group& g, int64_t anchor) const { return (anchor - g.first) * rows_of_anchor(g); }

  void start(const Group& g, int64_t rows) {
    for (int64_t a = g.first; a < g.last; ++a)
      for (int64_t h = 0; h < g.heads; ++h)
        k_.attention_load(q_ + (first_row(g, a) + h * block_) * units_, head_in(a_.q, a * block_, g.head + h, hd_),
                          a_.q.stride, block_, hd_, padded_, pairs_);
    std::fill_n(sum_, rows * padded_, 0.0f);
    std::fill_n(top_, rows, -1e30f);  // below any score; finite, so that differences are
    std::fill_n(norm_, rows, 0.0f);
  }

  void load_tile(const Tensor& k, const Tensor& v, int64_t row, int64_t keys, int64_t kv) {
    k_.attention_load(raw_, head_in(k, row, kv, hd_), k.stride, keys, hd_, padded_, pairs_);
    k_.attention_transpose(keys_t_, raw_, keys, units_);
    k_.attention_stack(values_, head_in(v, row, kv, hd_), v.stride, keys, hd_, padded_, pairs_);
  }

  template <typename Seen>
  void step(const Group& g, int64_t anchor, int64_t tile, Seen seen) {
    for (int64_t slot = 0; slot < block_; ++slot) set_limits(seen(slot), tile, low_ + slot, high_ + slot);
    const Range keys = union_of(low_, high_, block_);
    if (keys.low >= keys.high) return;
    for (int64_t h = 1; h < g.heads; ++h) {
      std::copy_n(low_, block_, low_ + h * block_);
      std::copy_n(high_, block_, high_ + h * block_);
    }
    const int64_t row = first_row(g, anchor);
    k_.attention_update({.pairs = pairs_, .rows = rows_of_anchor(g), .padded = padded_, .begin = keys.low, .end = keys.high,
                         .scale = static_cast<float>(a_.scale), .q = q_ + row * units_, .keys_t = keys_t_, .values = values_, .low = low_, .high = high_,
                         .sum = sum_ + row * padded_, .top = top_ + row, .norm = norm_ + row, .score = score_});
  }

  void finish(const Group& g) {
    for (int64_t a = g.first; a < g.last; ++a)
      for (int64_t h = 0; h < g.heads; ++h)
        for (int64_t slot = 0; slot < block_; ++slot) {
          const int64_t r = first_row(g, a) + h * block_ + slot, out = a * block_ + slot;
          row<float>(a_.lse, out)[g.head + h] =
              k_.attention_finish(head_out(a_.out, out, g.head + h, hd_), sum_ + r * padded_, top_[r], norm_[r], hd_);
        }
  }

  const AnchorAttention& a_;
  const Kernels& k_;
  const int64_t hd_, padded_, block_;
  const bool pairs_;
  const int64_t units_;  // of 32 bits in a row of q or keys
  float *raw_, *keys_t_, *values_, *q_, *sum_, *top_, *norm_, *score_;
  int32_t *low_, *high_;
};

void clear_padding(const AnchorAttention& a, int64_t anchor) {
  for (int64_t r = anchor * a.rule.block; r < (anchor + 1) * a.rule.block; ++r) {
    std::memset(out_row(a.out, r).p, 0, static_cast<size_t>(a.out.cols * dtype_bytes(a.out.dtype)));
    std::fill_n(row<float>(a.lse, r), a.lse.cols, 0.0f);
  }
}

}  // namespace

void CpuOps::anchor_attention(Context&, const AnchorAttention& a) {
  const int64_t anchors = a.anchor_row.cols, kv_heads = a.k_ctx.cols / a.head_dim;
  const int64_t group = a.q.cols / a.k_ctx.cols, max_rows = max_query_rows(padded_head(a.head_dim));
  DS_ASSERT(a.rule.block <= max_rows, "blocks of {} slots with heads of {}: at most {} slots", a.rule.block, a.head_dim,
            max_rows);
  const int64_t heads = std::min(group, max_rows / a.rule.block);               // of one item
  const int64_t width = std::max<int64_t>(1, max_rows / (group * a.rule.block));  // anchors of one item
  const int64_t chunks = (anchors + width - 1) / width;
  const int32_t* rows = pointer<int32_t>(a.anchor_row);
  const int32_t* docs = pointer<int32_t>(a.doc_start);
  for (int64_t anchor = 0; anchor < anchors; ++anchor)
    if (rows[anchor] < 0) clear_padding(a, anchor);
  m_.pool().parallel_for(kv_heads * chunks, 1, [&](int64_t begin, int64_t end, int thread) {
    Forward forward(a, m_.kernels(), m_.scratch<>(thread));
    for (int64_t item = begin; item < end; ++item) {
      const int64_t kv = item / chunks, chunk = balanced(item % chunks, chunks);
      const int64_t last = std::min(anchors, (chunk + 1) * width);
      for (int64_t first = chunk * width; first < last;) {
        int64_t next = first + 1;
        if (rows[first] >= 0) {
          while (next < last && rows[next] >= 0 && docs[next] == docs[first]) ++next;
          for (int64_t h = 0; h < group; h += heads)
            forward.run({.first = first, .last = next, .head = kv * group + h, .heads = std::min(heads, group - h)});
        }
        first = next;
      }
    }
  });
}

}  // namespace dspark::model::cpu
