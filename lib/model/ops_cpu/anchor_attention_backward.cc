// anchor_attention_backward on CPUs: contract in model/ops.h.
//
// The scores are recomputed from lse. Four passes, each parallel over what it writes, so that nothing is summed across
// threads: delta (rows), d_q (kv head x anchors), d_k_ctx and d_v_ctx (kv head x context tile, over the anchors that see the
// tile in their order), d_k_block and d_v_block (kv head x anchor).
#include <cstring>

#include "model/ops_cpu/attention_common.h"

namespace dspark::model::cpu {
namespace {

class Backward {
 public:
  Backward(const AnchorAttentionBackward& a, const Kernels& k, void* memory)
      : a_(a),
        k_(k),
        hd_(a.head_dim),
        padded_(padded_head(hd_)),
        block_(a.rule.block),
        anchors_(a.anchor_row.cols),
        group_(a.q.cols / a.k_ctx.cols),
        heads_(std::min(group_, max_query_rows(padded_) / block_)),
        step_rows_(heads_ * block_),
        pairs_(takes_pairs(k, {&a.q, &a.d_out, &a.k_ctx, &a.v_ctx, &a.k_block, &a.v_block})),
        units_(pairs_ ? padded_ / 2 : padded_) {
    Pieces pieces(memory);
    const int64_t rows = max_query_rows(padded_);
    const auto tile = [&] { return pieces.take(kTileKeys * padded_); };
    raw_ = tile(), keys_ = tile(), keys_t_ = tile(), values_t_ = tile();
    // Pass 2 has gradients of keys where pass 1 has those of rows.
    q_ = pieces.take(rows * padded_);
    d_out_ = pieces.take(rows * padded_);
    q_stacked_ = pairs_ ? pieces.take((step_rows_ + 1) / 2 * padded_) : q_;
    d_out_stacked_ = pairs_ ? pieces.take((step_rows_ + 1) / 2 * padded_) : d_out_;
    d_q_ = pieces.take(std::max(rows, int64_t{2} * kTileKeys) * padded_);
    d_keys_ = d_q_;
    d_values_ = d_q_ + kTileKeys * padded_;
    lse_ = pieces.take(rows);
    delta_ = pieces.take(rows);
    low_ = pieces.take<int32_t>(rows);
    high_ = pieces.take<int32_t>(rows);
    prob_ = pieces.take(step_rows_ * kTileKeys);
    d_score_ = pieces.take(step_rows_ * kTileKeys);
  }

  // d_q of anchors [first, last), all of one document.
  void queries(int64_t first, int64_t last, int64_t kv) {
    const int64_t doc = pointer<int32_t>(a_.doc_start)[first];
    int64_t low = anchor_row(last - 1), high = doc;
    for (int64_t a = first; a < last; ++a) {
      low = std::min(low, seen_context(a_.rule, anchor_row(a), doc, 0).low);
      high = std::max(high, anchor_row(a));
    }
    for (int64_t h = 0; h < group_; h += heads_) {
      const int64_t head = kv * group_ + h, heads = std::min(heads_, group_ - h), rows = heads * block_;
      for (int64_t a = first; a < last; ++a) load_rows(a, head, heads, (a - first) * rows);
      std::fill_n(d_q_, (last - first) * rows * padded_, 0.0f);
      for (int64_t tile = tile_at(doc, low); tile < high; tile += kTileKeys) {
        load_tile(a_.k_ctx, a_.v_ctx, tile, std::min<int64_t>(kTileKeys, high - tile), kv);
        load_keys(a_.k_ctx, tile, std::min<int64_t>(kTileKeys, high - tile), kv);
        for (int64_t a = first; a < last; ++a) step_context(a, tile, heads, (a - first) * rows, true);
      }
      for (int64_t a = first; a < last; ++a)
        for (int64_t tile = 0; tile < block_; tile += kTileKeys) {
          load_tile(a_.k_block, a_.v_block, a * block_ + tile, std::min<int64_t>(kTileKeys, block_ - tile), kv);
          load_keys(a_.k_block, a * block_ + tile, std::min<int64_t>(kTileKeys, block_ - tile), kv);
          step_block(tile, heads, (a - first) * rows, true);
        }
      for (int64_t a = first; a < last; ++a)
        for (int64_t j = 0; j < heads; ++j)
          k_.attention_store(head_out(a_.d_q, a * block_, head + j, hd_), a_.d_q.stride,
                             d_q_ + ((a - first) * rows + j * block_) * padded_, block_, hd_, padded_,
                             static_cast<float>(a_.scale));
    }
  }

  // d_k_ctx and d_v_ctx of context rows [tile, tile + keys).
  void context(int64_t tile, int64_t keys, int64_t kv) {
    std::fill_n(d_keys_, 2 * kTileKeys * padded_, 0.0f);
    load_tile(a_.k_ctx, a_.v_ctx, tile, keys, kv);
    for (int64_t a = 0; a < anchors_; ++a) {
      if (anchor_row(a) < 0) continue;
      const Range seen = seen_context(a_.rule, anchor_row(a), pointer<int32_t>(a_.doc_start)[a], 0);
      if (seen.low >= tile + keys || seen.high <= tile) continue;
      if (a + 1 < anchors_)
        for (const Tensor* t : {&a_.q, &a_.d_out})
          prefetch_heads(*t, (a + 1) * block_, block_, kv * group_, group_, hd_);
      each_heads(kv, [&](int64_t head, int64_t heads) {
        load_rows(a, head, heads, 0);
        stack_rows(heads);
        step_context(a, tile, heads, 0, false);
      });
    }
    store_keys(a_.d_k_ctx, a_.d_v_ctx, tile, keys, kv);
  }

  void block_keys(int64_t anchor, int64_t kv) {
    for (int64_t tile = 0; tile < block_; tile += kTileKeys) {
      const int64_t keys = std::min<int64_t>(kTileKeys, block_ - tile);
      std::fill_n(d_keys_, 2 * kTileKeys * padded_, 0.0f);
      load_tile(a_.k_block, a_.v_block, anchor * block_ + tile, keys, kv);
      each_heads(kv, [&](int64_t head, int64_t heads) {
        load_rows(anchor, head, heads, 0);
        stack_rows(heads);
        step_block(tile, heads, 0, false);
      });
      store_keys(a_.d_k_block, a_.d_v_block, anchor * block_ + tile, keys, kv);
    }
  }

 private:
  int64_t anchor_row(int64_t a) const { return pointer<int32_t>(a_.anchor_row)[a]; }

  template <typename F>
  void each_heads(int64_t kv, F f) const {
    for (int64_t h = 0; h < group_; h += heads_) f(kv * group_ + h, std::min(heads_, group_ - h));
  }

  // Scratch rows from `at` on: head by head, slot by slot.
  void load_rows(int64_t anchor, int64_t head, int64_t heads, int64_t at) {
    for (int64_t j = 0; j < heads; ++j) {
      const int64_t r = at + j * block_;
      k_.attention_load(q_ + r * units_, head_in(a_.q, anchor * block_, head + j, hd_), a_.q.stride, block_, hd_, padded_, pairs_);
      k_.attention_load(d_out_ + r * units_, head_in(a_.d_out, anchor * block_, head + j, hd_), a_.d_out.stride, block_, hd_, padded_,
                        pairs_);
      for (int64_t slot = 0; slot < block_; ++slot) {
        lse_[r + slot] = row<float>(a_.lse, anchor * block_ + slot)[head + j];
        delta_[r + slot] = pointer<float>(a_.work)[(anchor * block_ + slot) * a_.lse.cols + head + j];
      }
    }
  }

  // The scratch rows 0.. of an anchor's heads, stacked.
  void stack_rows(int64_t heads) {
    if (!pairs_) return;  // the same memory
    const int64_t rows = heads * block_;
    k_.attention_stack(q_stacked_, {q_, true}, padded_, rows, padded_, padded_, true);
    k_.attention_stack(d_out_stacked_, {d_out_, true}, padded_, rows, padded_, padded_, true);
  }

  void load_tile(const Tensor& k, const Tensor& v, int64_t row, int64_t keys, int64_t kv) {
    k_.attention_load(raw_, head_in(k, row, kv, hd_), k.stride, keys, hd_, padded_, pairs_);
    k_.attention_transpose(keys_t_, raw_, keys, units_);
    k_.attention_load(raw_, head_in(v, row, kv, hd_), v.stride, keys, hd_, padded_, pairs_);
    k_.attention_transpose(values_t_, raw_, keys, units_);
  }
  void load_keys(const Tensor& k, int64_t row, int64_t keys, int64_t kv) {
    k_.attention_stack(keys_, head_in(k, row, kv, hd_), k.stride, keys, hd_, padded_, pairs_);
  }

  void step_context(int64_t anchor, int64_t tile, int64_t heads, int64_t at, bool for_queries) {
    const int64_t doc = pointer<int32_t>(a_.doc_start)[anchor];
    step(tile, heads, at, for_queries,
         [&](int64_t slot) { return seen_context(a_.rule, anchor_row(anchor), doc, slot); });
  }
  void step_block(int64_t tile, int64_t heads, int64_t at, bool for_queries) {
    step(tile, heads, at, for_queries, [&](int64_t slot) { return seen_slots(a_.rule, slot); });
  }

  template <typename Seen>
  void step(int64_t tile, int64_t heads, int64_t at, bool for_queries, Seen seen) {
    for (int64_t slot = 0; slot < block_; ++slot) set_limits(seen(slot), tile, low_ + slot, high_ + slot);
    const Range keys = union_of(low_, high_, block_);
    if (keys.low >= keys.high) return;
    for (int64_t h = 1; h < heads; ++h) {
      std::copy_n(low_, block_, low_ + h * block_);
      std::copy_n(high_, block_, high_ + h * block_);
    }
    k_.attention_gradient({.pairs = pairs_, .rows = heads * block_, .padded = padded_, .begin = keys.low, .end = keys.high,
                           .scale = static_cast<float>(a_.scale), .q = q_ + at * units_, .d_out = d_out_ + at * units_,
                           .q_stacked = q_stacked_, .d_out_stacked = d_out_stacked_, .lse = lse_ + at, .delta = delta_ + at,
                           .keys = keys_, .keys_t = keys_t_, .values_t = values_t_, .low = low_, .high = high_,
                           .d_q = for_queries ? d_q_ + at * padded_ : nullptr, .d_keys = for_queries ? nullptr : d_keys_,
                           .d_values = for_queries ? nullptr : d_values_, .prob = prob_, .d_score = d_score_});
  }

  void store_keys(const Tensor& d_k, const Tensor& d_v, int64_t row, int64_t keys, int64_t kv) {
    k_.attention_store(head_out(d_k, row, kv, hd_), d_k.stride, d_keys_, keys, hd_, padded_, static_cast<float>(a_.scale));
    k_.attention_store(head_out(d_v, row, kv, hd_), d_v.stride, d_values_, keys, hd_, padded_, 1.0f);
  }

  const AnchorAttentionBackward& a_;
  const Kernels& k_;
  const int64_t hd_, padded_, block_, anchors_, group_, heads_, step_rows_;
  const bool pairs_;
  const int64_t units_;  // of 32 bits in a row of q, d_out, keys or values
  float *raw_, *keys_, *keys_t_, *values_t_, *q_, *d_out_, *q_stacked_, *d_out_stacked_, *d_q_, *d_keys_, *d_values_;
  float *lse_, *delta_, *prob_, *d_score_;
  int32_t *low_, *high_;
};

void clear_rows(const Tensor& t, int64_t first, int64_t count) {
  for (int64_t r = first; r < first + count; ++r)
    std::memset(out_row(t, r).p, 0, static_cast<size_t>(t.cols * dtype_bytes(t.dtype)));
}

}  // namespace

void CpuOps::anchor_attention_backward(Context&, const AnchorAttentionBackward& a) {
  const int64_t anchors = a.anchor_row.cols, context_rows = a.k_ctx.rows, block = a.rule.block;
  const int64_t kv_heads = a.k_ctx.cols / a.head_dim, heads = a.q.cols / a.head_dim, group = heads / kv_heads;
  const int64_t max_rows = max_query_rows(padded_head(a.head_dim));
  DS_ASSERT(block <= max_rows, "blocks of {} slots with heads of {}: at most {} slots", block, a.head_dim, max_rows);
  const int32_t* rows = pointer<int32_t>(a.anchor_row);
  const int32_t* docs = pointer<int32_t>(a.doc_start);
  ThreadPool& pool = m_.pool();
  const Kernels& k = m_.kernels();

  float* delta = pointer<float>(a.work);
  pool.parallel_for(anchors * block, row_grain(a.q.cols), [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r)
      for (int64_t h = 0; h < heads; ++h)
        delta[r * heads + h] =
            k.attention_dot(head_in(a.d_out, r, h, a.head_dim), head_in(a.out, r, h, a.head_dim), a.head_dim);
  });

  const int64_t width = std::max<int64_t>(1, max_rows / (group * block));  // anchors of one item
  const int64_t chunks = (anchors + width - 1) / width;
  pool.parallel_for(kv_heads * chunks, 1, [&](int64_t begin, int64_t end, int thread) {
    Backward backward(a, k, m_.scratch<>(thread));
    for (int64_t item = begin; item < end; ++item) {
      const int64_t kv = item / chunks, chunk = balanced(item % chunks, chunks);
      const int64_t last = std::min(anchors, (chunk + 1) * width);
      for (int64_t first = chunk * width; first < last;) {
        int64_t next = first + 1;
        if (rows[first] >= 0) {
          while (next < last && rows[next] >= 0 && docs[next] == docs[first]) ++next;
          backward.queries(first, next, kv);
        }
        first = next;
      }
    }
  });

  const int64_t tiles = (context_rows + kTileKeys - 1) / kTileKeys;
  pool.parallel_for(kv_heads * tiles, 1, [&](int64_t begin, int64_t end, int thread) {
    Backward backward(a, k, m_.scratch<>(thread));
    for (int64_t item = begin; item < end; ++item) {
      const int64_t tile = balanced(item % tiles, tiles) * kTileKeys;
      backward.context(tile, std::min<int64_t>(kTileKeys, context_rows - tile), item / tiles);
    }
  });

  pool.parallel_for(kv_heads * anchors, 1, [&](int64_t begin, int64_t end, int thread) {
    Backward backward(a, k, m_.scratch<>(thread));
    for (int64_t item = begin; item < end; ++item)
      if (rows[item % anchors] >= 0) backward.block_keys(item % anchors, item / anchors);
  });
  for (int64_t anchor = 0; anchor < anchors; ++anchor)
    if (rows[anchor] < 0)
      for (const Tensor* t : {&a.d_q, &a.d_k_block, &a.d_v_block}) clear_rows(*t, anchor * block, block);
}

}  // namespace dspark::model::cpu
