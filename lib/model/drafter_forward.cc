// Forward of the drafter (DESIGN 3). Names in comments: c context rows, x residual stream of block rows.
#include <cmath>

#include "model/drafter.h"

namespace dspark::model {

AnchorRule Drafter::rule(const DrafterLayer& layer) const {
  AnchorRule r{config_.block, 0, false, config_.window_by_anchor};
  if (layer.type == LayerType::sliding) {
    r.window = config_.window;
    r.causal_in_block = config_.sliding_causal;
  }
  return r;
}

void Drafter::context_rows(Arena& arena, const Tensor& taps, Tensor context, Tensor fc_out, Tensor inv) {
  const Labelled label(ctx_, {Part::context});
  const int64_t mark = arena.mark();
  if (!fc_out) fc_out = arena.matrix(ctx_.acc_dtype(), taps.rows, config_.hidden);
  linear(ctx_, {fc_out, taps, &fc_});
  add_rmsnorm(ctx_, {.y = context, .x = fc_out, .weight = hidden_norm_, .inv_rms = inv, .eps = config_.eps});
  arena.release(mark);
}

void Drafter::context_kv(int64_t index, const Tensor& context, const Tensor& kv_raw) {
  const Labelled label(ctx_, {Part::context});
  DrafterLayer& l = layers_[static_cast<size_t>(index)];
  linear(ctx_, {kv_raw, context, &l.kv});
  if (l.kv_bias) add_bias(ctx_, {kv_raw, l.kv_bias});
}

void Drafter::context_keys(int64_t index, const Tensor& kv_raw, const Tensor& position, const Tensor& k, const Tensor& inv,
                           const Tensor& inv_freq) {
  const DrafterLayer& l = layers_[static_cast<size_t>(index)];
  qk_norm_rope(ctx_, {k, kv_raw.col_range(0, config_.kv_cols()), l.k_norm, position, inv, rope(inv_freq), config_.head_dim, config_.eps});
}

// q, k (rope applied) and raw values of the block rows, from s.h.
void Drafter::attention_rows(Arena& arena, DrafterLayer& l, LayerSaved& s, const DeviceBatch& batch) {
  const auto& c = config_;
  const int64_t n = s.h.rows;
  const DType act = ctx_.act_dtype(), acc = ctx_.acc_dtype();
  s.q_raw = arena.matrix(act, n, c.q_cols());
  s.kv_raw = arena.matrix(act, n, 2 * c.kv_cols());
  s.q = arena.matrix(act, n, c.q_cols());
  s.k = arena.matrix(act, n, c.kv_cols());
  s.inv_q = arena.matrix(acc, n, c.heads);
  s.inv_k = arena.matrix(acc, n, c.kv_heads);
  linear(ctx_, {s.q_raw, s.h, &l.q});
  linear(ctx_, {s.kv_raw, s.h, &l.kv});
  if (l.q_bias) add_bias(ctx_, {s.q_raw, l.q_bias});
  if (l.kv_bias) add_bias(ctx_, {s.kv_raw, l.kv_bias});
  const Rope turn = rope(batch.inv_freq);
  qk_norm_rope(ctx_, {s.q, s.q_raw, l.q_norm, batch.block_position, s.inv_q, turn, c.head_dim, c.eps});
  qk_norm_rope(ctx_, {s.k, s.kv_raw.col_range(0, c.kv_cols()), l.k_norm, batch.block_position, s.inv_k, turn, c.head_dim, c.eps});
}

namespace {
double attention_scale(const DrafterConfig& c) { return 1.0 / std::sqrt(static_cast<double>(c.head_dim)); }
}  // namespace

void Drafter::forward(Arena& arena, const Tensor& taps, const DeviceBatch& batch, ForwardState& state) {
  const Labelled label(ctx_, {Part::trunk});
  const auto& c = config_;
  const int64_t t = taps.rows, n = batch.n_anchors * c.block, kv = c.kv_cols();
  const DType act = ctx_.act_dtype(), acc = ctx_.acc_dtype();
  state.fc_out = arena.matrix(acc, t, c.hidden);
  state.inv_context = arena.vector(acc, t);
  state.context = arena.matrix(act, t, c.hidden);
  context_rows(arena, taps, state.context, state.fc_out, state.inv_context);

  const Tensor delta = arena.matrix(acc, n, c.hidden);
  Tensor x = arena.matrix(acc, n, c.hidden);
  gather_rows(ctx_, {x, embed, batch.block_token});
  state.layers.assign(layers_.size(), {});
  for (size_t i = 0; i < layers_.size(); ++i) {
    DrafterLayer& l = layers_[i];
    LayerSaved& s = state.layers[i];
    s.h = arena.matrix(act, n, c.hidden);
    s.inv_in = arena.vector(acc, n);
    s.x_in = i == 0 ? x : arena.matrix(acc, n, c.hidden);
    add_rmsnorm(ctx_, {.y = s.h, .x_out = i == 0 ? Tensor{} : s.x_in, .x = x, .delta = i == 0 ? Tensor{} : delta,
                       .weight = l.input_norm, .inv_rms = s.inv_in, .eps = c.eps});
    s.kv_ctx_raw = arena.matrix(act, t, 2 * kv);
    s.k_ctx = arena.matrix(act, t, kv);
    s.inv_k_ctx = arena.matrix(acc, t, c.kv_heads);
    context_kv(static_cast<int64_t>(i), state.context, s.kv_ctx_raw);
    context_keys(static_cast<int64_t>(i), s.kv_ctx_raw, batch.context_position, s.k_ctx, s.inv_k_ctx, batch.inv_freq);
    attention_rows(arena, l, s, batch);
    s.att = arena.matrix(act, n, c.q_cols());
    s.lse = arena.matrix(acc, n, c.heads);
    anchor_attention(ctx_, {s.att, s.lse, s.q, s.k_ctx, s.kv_ctx_raw.col_range(kv, kv), s.k, s.kv_raw.col_range(kv, kv),
                            batch.anchor_row, batch.doc_start, rule(l), c.head_dim, attention_scale(c)});
    linear(ctx_, {delta, s.att, &l.o});
    if (l.o_bias) add_bias(ctx_, {delta, l.o_bias});
    s.x_mid = arena.matrix(acc, n, c.hidden);
    s.inv_mid = arena.vector(acc, n);
    s.u = arena.matrix(act, n, c.hidden);
    add_rmsnorm(ctx_, {.y = s.u, .x_out = s.x_mid, .x = s.x_in, .delta = delta, .weight = l.post_norm, .inv_rms = s.inv_mid,
                       .eps = c.eps});
    s.gate_up = arena.matrix(act, n, 2 * c.ffn);
    linear(ctx_, {s.gate_up, s.u, &l.gate_up});
    s.swiglu = arena.matrix(act, n, c.ffn);
    swiglu(ctx_, {s.swiglu, s.gate_up});
    linear(ctx_, {delta, s.swiglu, &l.down});
    x = s.x_mid;
  }
  state.x_last = arena.matrix(acc, n, c.hidden);
  state.inv_last = arena.vector(acc, n);
  state.hidden = arena.matrix(act, n, c.hidden);
  add_rmsnorm(ctx_, {.y = state.hidden, .x_out = state.x_last, .x = x, .delta = delta, .weight = norm_, .inv_rms = state.inv_last,
                     .eps = c.eps});
}

Tensor Drafter::block_forward(Arena& arena, const std::vector<Tensor>& k_ctx, const std::vector<Tensor>& v_ctx,
                              const DeviceBatch& batch) {
  const Labelled label(ctx_, {Part::trunk});
  const auto& c = config_;
  const int64_t n = batch.n_anchors * c.block, kv = c.kv_cols();
  const DType act = ctx_.act_dtype(), acc = ctx_.acc_dtype();
  const Tensor hidden = arena.matrix(act, n, c.hidden);
  const int64_t mark = arena.mark();
  const Tensor delta = arena.matrix(acc, n, c.hidden), x = arena.matrix(acc, n, c.hidden);
  gather_rows(ctx_, {x, embed, batch.block_token});
  for (size_t i = 0; i < layers_.size(); ++i) {
    DrafterLayer& l = layers_[i];
    const int64_t layer_mark = arena.mark();
    LayerSaved s;
    s.h = arena.matrix(act, n, c.hidden);
    add_rmsnorm(ctx_, {.y = s.h, .x_out = i == 0 ? Tensor{} : x, .x = x, .delta = i == 0 ? Tensor{} : delta,
                       .weight = l.input_norm, .eps = c.eps});
    attention_rows(arena, l, s, batch);
    s.att = arena.matrix(act, n, c.q_cols());
    s.lse = arena.matrix(acc, n, c.heads);
    anchor_attention(ctx_, {s.att, s.lse, s.q, k_ctx[i], v_ctx[i], s.k, s.kv_raw.col_range(kv, kv), batch.anchor_row,
                            batch.doc_start, rule(l), c.head_dim, attention_scale(c)});
    linear(ctx_, {delta, s.att, &l.o});
    if (l.o_bias) add_bias(ctx_, {delta, l.o_bias});
    add_rmsnorm(ctx_, {.y = s.h, .x_out = x, .x = x, .delta = delta, .weight = l.post_norm, .eps = c.eps});
    s.gate_up = arena.matrix(act, n, 2 * c.ffn);
    linear(ctx_, {s.gate_up, s.h, &l.gate_up});
    s.swiglu = arena.matrix(act, n, c.ffn);
    swiglu(ctx_, {s.swiglu, s.gate_up});
    linear(ctx_, {delta, s.swiglu, &l.down});
    arena.release(layer_mark);
  }
  add_rmsnorm(ctx_, {.y = hidden, .x_out = x, .x = x, .delta = delta, .weight = norm_, .eps = c.eps});
  arena.release(mark);
  return hidden;
}

}  // namespace dspark::model
