// Backward of the drafter, the forward read from its end. d_x is the gradient of the residual stream, in acc; gradients that
// feed products are cast to act first (d_act). Every weight gradient follows `write`.
#include <cmath>

#include "model/drafter.h"

namespace dspark::model {

void Drafter::backward(Arena& arena, const Tensor& taps, const DeviceBatch& batch, const ForwardState& state, const Tensor& d_hidden,
                       Write write, const GradientsReady& ready) {
  DS_ASSERT(options_.trainable, "backward of a drafter without gradients");
  const Labelled label(ctx_, {Part::trunk, true});
  const auto& c = config_;
  const int64_t t = taps.rows, n = d_hidden.rows, kv = c.kv_cols();
  const DType act = ctx_.act_dtype(), acc = ctx_.acc_dtype();
  const double scale = 1.0 / std::sqrt(static_cast<double>(c.head_dim));
  const int64_t mark = arena.mark();

  const Tensor d_x = arena.matrix(acc, n, c.hidden);
  const Tensor d_act = arena.matrix(act, n, c.hidden);   // d_x for products
  const Tensor d_norm_in = arena.matrix(acc, n, c.hidden);  // d_u, then d_h
  const Tensor d_swiglu = arena.matrix(act, n, c.ffn), d_gate_up = arena.matrix(act, n, 2 * c.ffn);
  const Tensor d_att = arena.matrix(act, n, c.q_cols()), d_q = arena.matrix(act, n, c.q_cols());
  const Tensor d_kv = arena.matrix(act, n, 2 * kv), d_kv_ctx = arena.matrix(act, t, 2 * kv);
  const Tensor d_context = arena.matrix(acc, t, c.hidden);
  const Tensor work = arena.vector(acc, anchor_attention_work(n, c.heads));

  rmsnorm_backward(ctx_, {.d_x = d_x, .d_weight = d_norm_, .dy = d_hidden, .x = state.x_last, .weight = norm_,
                          .inv_rms = state.inv_last, .write_dw = write});
  for (size_t i = layers_.size(); i-- > 0;) {
    DrafterLayer& l = layers_[i];
    const LayerSaved& s = state.layers[i];
    // x_out = x_mid + down(swiglu(gate_up(u)))
    copy(ctx_, {d_act, d_x});
    linear_dw(ctx_, {l.d_down, d_act, s.swiglu, write});
    linear_dx(ctx_, {d_swiglu, d_act, &l.down});
    swiglu_backward(ctx_, {d_gate_up, d_swiglu, s.gate_up});
    linear_dw(ctx_, {l.d_gate_up, d_gate_up, s.u, write});
    linear_dx(ctx_, {d_norm_in, d_gate_up, &l.gate_up});
    rmsnorm_backward(ctx_, {.d_x = d_x, .d_weight = l.d_post_norm, .dy = d_norm_in, .x = s.x_mid, .weight = l.post_norm,
                            .inv_rms = s.inv_mid, .write_dx = Write::add, .write_dw = write});
    // x_mid = x_in + o(attention)
    copy(ctx_, {d_act, d_x});
    linear_dw(ctx_, {l.d_o, d_act, s.att, write});
    if (l.o_bias) bias_grad(ctx_, {l.d_o_bias, d_x, write});
    linear_dx(ctx_, {d_att, d_act, &l.o});
    AnchorAttentionBackward att{.d_q = d_q, .d_k_ctx = d_kv_ctx.col_range(0, kv), .d_v_ctx = d_kv_ctx.col_range(kv, kv),
                                .d_k_block = d_kv.col_range(0, kv), .d_v_block = d_kv.col_range(kv, kv), .d_out = d_att,
                                .out = s.att, .lse = s.lse, .q = s.q, .k_ctx = s.k_ctx, .v_ctx = s.kv_ctx_raw.col_range(kv, kv),
                                .k_block = s.k, .v_block = s.kv_raw.col_range(kv, kv), .anchor_row = batch.anchor_row,
                                .doc_start = batch.doc_start, .work = work, .rule = rule(l), .head_dim = c.head_dim,
                                .scale = scale};
    anchor_attention_backward(ctx_, att);
    auto un_rope = [&](Tensor d, const Tensor& raw, const Tensor& weight, Tensor d_weight, const Tensor& position,
                       const Tensor& inv, Write w) {
      qk_norm_rope_backward(ctx_, {.d_x = d, .d_weight = d_weight, .dy = d, .x = raw, .weight = weight, .position = position,
                                   .inv_rms = inv, .rope = rope(batch.inv_freq), .head_dim = c.head_dim, .write_dw = w});
    };
    un_rope(d_q, s.q_raw, l.q_norm, l.d_q_norm, batch.block_position, s.inv_q, write);
    un_rope(d_kv.col_range(0, kv), s.kv_raw.col_range(0, kv), l.k_norm, l.d_k_norm, batch.block_position, s.inv_k, write);
    linear_dw(ctx_, {l.d_q, d_q, s.h, write});
    linear_dw(ctx_, {l.d_kv, d_kv, s.h, write});
    if (l.q_bias) bias_grad(ctx_, {l.d_q_bias, d_q, write});
    if (l.kv_bias) bias_grad(ctx_, {l.d_kv_bias, d_kv, write});
    linear_dx(ctx_, {d_norm_in, d_q, &l.q});
    linear_dx(ctx_, {d_norm_in, d_kv, &l.kv, Write::add});
    {
      const Labelled context(ctx_, {Part::context, true});
      un_rope(d_kv_ctx.col_range(0, kv), s.kv_ctx_raw.col_range(0, kv), l.k_norm, l.d_k_norm, batch.context_position, s.inv_k_ctx,
              Write::add);
      linear_dw(ctx_, {l.d_kv, d_kv_ctx, state.context, Write::add});
      if (l.kv_bias) bias_grad(ctx_, {l.d_kv_bias, d_kv_ctx, Write::add});
      linear_dx(ctx_, {d_context, d_kv_ctx, &l.kv, i + 1 == layers_.size() ? Write::overwrite : Write::add});
    }
    rmsnorm_backward(ctx_, {.d_x = d_x, .d_weight = l.d_input_norm, .dy = d_norm_in, .x = s.x_in, .weight = l.input_norm,
                            .inv_rms = s.inv_in, .write_dx = Write::add, .write_dw = write});
    if (ready) ready(layer_bucket(i));
  }
  // d_x ends in the embeddings; the context's gradient goes on into fc.
  if (d_embed) scatter_add_rows(ctx_, {d_embed, d_x, batch.embed.row_of, batch.embed.begin, batch.embed.source, write});
  const Labelled context(ctx_, {Part::context, true});
  const Tensor d_fc_out = arena.matrix(acc, t, c.hidden), d_fc_act = arena.matrix(act, t, c.hidden);
  rmsnorm_backward(ctx_, {.d_x = d_fc_out, .d_weight = d_hidden_norm_, .dy = d_context, .x = state.fc_out, .weight = hidden_norm_,
                          .inv_rms = state.inv_context, .write_dw = write});
  copy(ctx_, {d_fc_act, d_fc_out});
  linear_dw(ctx_, {d_fc_, d_fc_act, taps, write});
  if (ready) ready(buckets() - 1);
  arena.release(mark);
}

}  // namespace dspark::model
