// The argument checks of every operator: shapes, dtypes, strides, aliasing. One place for all backends, so that a
// kernel may rely on them. A violation is a bug of ours: it aborts and prints the operator, the tensor and both values.
// Here: attention and the loss head.
#include "model/ops_check.h"

namespace dspark::model {

// ---- attention
// -------------------------------------------------------------------------------------------------------------

namespace {

template <typename A>
int64_t check_anchor_attention(const Checker& c, const char* op, const A& a) {
  const int64_t n_anchors = a.anchor_row.cols, rows = n_anchors * a.rule.block;
  DS_ASSERT(a.rule.block > 0 && a.rule.window >= 0, "{}: block {}, window {}", op, a.rule.block, a.rule.window);
  const int64_t heads = c.heads("q", a.q, a.head_dim), kv_heads = c.heads("k_ctx", a.k_ctx, a.head_dim);
  DS_ASSERT(kv_heads > 0 && heads % kv_heads == 0, "{}: {} query heads over {} kv heads", op, heads, kv_heads);
  c.floating("q", a.q, rows, a.q.cols);
  c.floating("k_ctx", a.k_ctx, a.k_ctx.rows, a.k_ctx.cols);
  c.floating("v_ctx", a.v_ctx, a.k_ctx.rows, a.k_ctx.cols);
  c.floating("k_block", a.k_block, rows, a.k_ctx.cols);
  c.floating("v_block", a.v_block, rows, a.k_ctx.cols);
  c.floating("out", a.out, rows, a.q.cols);
  c.acc("lse", a.lse, rows, heads);
  c.i32("anchor_row", a.anchor_row, n_anchors);
  c.i32("doc_start", a.doc_start, n_anchors);
  return heads;
}

}  // namespace

void check(const Context& ctx, const AnchorAttention& a) {
  const Checker c(ctx, "anchor_attention");
  check_anchor_attention(c, "anchor_attention", a);
  c.distinct({{"out", a.out}, {"lse", a.lse}},
             {{"q", a.q}, {"k_ctx", a.k_ctx}, {"v_ctx", a.v_ctx}, {"k_block", a.k_block}, {"v_block", a.v_block}});
}

void check(const Context& ctx, const AnchorAttentionBackward& a) {
  const Checker c(ctx, "anchor_attention_backward");
  const int64_t heads = check_anchor_attention(c, "anchor_attention_backward", a);
  c.floating("d_out", a.d_out, a.q.rows, a.q.cols);
  c.floating("d_q", a.d_q, a.q.rows, a.q.cols);
  c.floating("d_k_ctx", a.d_k_ctx, a.k_ctx.rows, a.k_ctx.cols);
  c.floating("d_v_ctx", a.d_v_ctx, a.k_ctx.rows, a.k_ctx.cols);
  c.floating("d_k_block", a.d_k_block, a.q.rows, a.k_ctx.cols);
  c.floating("d_v_block", a.d_v_block, a.q.rows, a.k_ctx.cols);
  c.acc("work", a.work, 1, anchor_attention_work(a.q.rows, heads));
  c.distinct({{"d_q", a.d_q},
              {"d_k_ctx", a.d_k_ctx},
              {"d_v_ctx", a.d_v_ctx},
              {"d_k_block", a.d_k_block},
              {"d_v_block", a.d_v_block},
              {"work", a.work}},
             {{"d_out", a.d_out},
              {"out", a.out},
              {"lse", a.lse},
              {"q", a.q},
              {"k_ctx", a.k_ctx},
              {"v_ctx", a.v_ctx},
              {"k_block", a.k_block},
              {"v_block", a.v_block}});
}

void check(const Context& ctx, const CacheAttention& a) {
  const Checker c(ctx, "cache_attention");
  const int64_t heads = c.heads("q", a.q, a.head_dim), kv_heads = c.heads("k_cache", a.k_cache, a.head_dim);
  DS_ASSERT(kv_heads > 0 && heads % kv_heads == 0, "cache_attention: {} query heads over {} kv heads", heads, kv_heads);
  DS_ASSERT(a.first >= 0 && a.window >= 0 && a.first + a.q.rows <= a.k_cache.rows,
            "cache_attention: rows [{}, +{}) of a cache of {}, window {}", a.first, a.q.rows, a.k_cache.rows, a.window);
  c.floating("q", a.q, a.q.rows, a.q.cols);
  c.floating("out", a.out, a.q.rows, a.q.cols);
  c.floating("k_cache", a.k_cache, a.k_cache.rows, a.k_cache.cols);
  c.floating("v_cache", a.v_cache, a.k_cache.rows, a.k_cache.cols);
  c.distinct({{"out", a.out}}, {{"q", a.q}, {"k_cache", a.k_cache}, {"v_cache", a.v_cache}});
}

// ---- the loss head
// ---------------------------------------------------------------------------------------------------------

int64_t vocab_loss_work(const Context& ctx, int64_t chunk_slots, int64_t chunk_rows, int64_t vocab, int64_t) {
  // Logits of both sides in acc (the gradient takes the place of the draft's), 32 statistics a row; every part begins on a
  // cache line.
  const auto part = [&](int64_t elements) { return (elements * dtype_bytes(ctx.acc_dtype()) + 63) / 64 * 64; };
  return part(chunk_slots * vocab) + part(chunk_rows * vocab) + part(chunk_slots * 32) + part(chunk_rows * 32) + 64;
}

void check(const Context& ctx, const VocabLoss& a) {
  const Checker c(ctx, "vocab_loss");
  const int64_t slots = a.joint.rows, cols = a.joint.cols;
  c.weight(a.head);
  c.weight(a.target_head);
  const int64_t vocab = a.head->out();
  DS_ASSERT(vocab > 0 && a.target_head->out() == vocab, "vocab_loss: heads of {} and {} rows", vocab,
            a.target_head->out());
  DS_ASSERT(a.head->in() == cols && a.hidden_cols >= 0 && a.hidden_cols <= cols,
            "vocab_loss: joint has {} columns, the head {}, hidden {}", cols, a.head->in(), a.hidden_cols);
  DS_ASSERT(!a.backward || a.head->needs_input_gradient, "vocab_loss: the head was not packed for its input gradient");
  c.act("joint", a.joint, slots, cols);
  c.act("target_state", a.target_state, a.target_state.rows, a.target_head->in());
  c.i32("target_row", a.target_row, slots);
  c.i32("label", a.label, slots);
  c.acc("weight", a.weight, 1, slots);
  c.acc("conf_weight", a.conf_weight, 1, slots);
  c.acc("scale", a.scale, 1, kNumTerms);
  DS_ASSERT(a.dpace_alpha >= 0 && a.dpace_alpha <= 1, "vocab_loss: dpace_alpha {}", a.dpace_alpha);
  DS_ASSERT(!a.dpace_confidence || a.dpace_alpha > 0, "vocab_loss: dpace_confidence without dpace_alpha");
  if (a.dpace_alpha > 0) c.i32("block_of", a.block_of, slots);
  c.acc("slot_out", a.slot_out, slots, kSlotOutCols);
  if (a.conf_w) {
    const int64_t e_cols = a.conf_w.cols - a.hidden_cols;
    DS_ASSERT(e_cols >= 0, "vocab_loss: conf_w has {} columns, hidden {}", a.conf_w.cols, a.hidden_cols);
    c.acc("conf_w", a.conf_w, 1, a.conf_w.cols);
    c.acc("conf_b", a.conf_b, 1, 1);
    DS_ASSERT((e_cols > 0) == static_cast<bool>(a.conf_e),
              "vocab_loss: conf_w has {} columns beyond hidden, conf_e is {}", e_cols, a.conf_e ? "given" : "empty");
    if (a.conf_e) c.act("conf_e", a.conf_e, slots, e_cols);
  } else {
    DS_ASSERT(a.coef[kConf] == 0, "vocab_loss: a confidence coefficient {} without a confidence head", a.coef[kConf]);
  }
  int64_t next_slot = 0, max_slots = 0, max_rows = 0;
  for (const LossChunk& k : a.chunks) {
    DS_ASSERT(k.slot0 >= next_slot && k.slots >= 0 && k.slot0 + k.slots <= slots,
              "vocab_loss: chunk of slots [{}, +{}) after {} of {}", k.slot0, k.slots, next_slot, slots);
    DS_ASSERT(k.row0 >= 0 && k.rows >= 0 && k.row0 + k.rows <= a.target_state.rows,
              "vocab_loss: chunk of target rows [{}, +{}) of {}", k.row0, k.rows, a.target_state.rows);
    next_slot = k.slot0 + k.slots;
    max_slots = std::max(max_slots, k.slots);
    max_rows = std::max(max_rows, k.rows);
  }
  const int64_t work_bytes = vocab_loss_work(ctx, max_slots, max_rows, vocab, cols);
  DS_ASSERT(a.work.dtype == DType::u8 && a.work.rows == 1 && a.work.cols >= work_bytes,
            "vocab_loss: work is {} [{}, {}], expected u8 [1, >= {}]", dtype_name(a.work.dtype), a.work.rows,
            a.work.cols, work_bytes);
  c.shape("work", a.work, 1, a.work.cols);
  DS_ASSERT(begin_of(a.work) % 64 == 0, "vocab_loss: work is not 64-byte aligned");
  if (!a.backward) return;
  c.acc("d_joint", a.d_joint, slots, cols);
  if (a.d_head) {
    DS_ASSERT(a.d_head.cols <= cols, "vocab_loss: d_head has {} columns, the head {}", a.d_head.cols, cols);
    c.acc("d_head", a.d_head, vocab, a.d_head.cols);
  }
  if (a.d_conf_e) {
    DS_ASSERT(static_cast<bool>(a.conf_e), "vocab_loss: d_conf_e without conf_e");
    c.acc("d_conf_e", a.d_conf_e, slots, a.conf_e.cols);
  }
  if (a.d_conf_w) c.acc("d_conf_w", a.d_conf_w, 1, a.conf_w.cols);
  if (a.d_conf_b) c.acc("d_conf_b", a.d_conf_b, 1, 1);
  DS_ASSERT(a.conf_w || (!a.d_conf_w && !a.d_conf_b), "vocab_loss: confidence gradients without a confidence head");
  c.distinct({{"slot_out", a.slot_out},
              {"d_joint", a.d_joint},
              {"d_head", a.d_head},
              {"d_conf_w", a.d_conf_w},
              {"d_conf_b", a.d_conf_b},
              {"work", a.work}},
             {{"joint", a.joint},
              {"target_state", a.target_state},
              {"weight", a.weight},
              {"conf_weight", a.conf_weight},
              {"conf_e", a.conf_e},
              {"conf_w", a.conf_w},
              {"head", a.head->value},
              {"target_head", a.target_head->value}});
}

}  // namespace dspark::model
