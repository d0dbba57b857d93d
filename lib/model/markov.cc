// The Markov head: what the token before a slot adds to its logits (DESIGN 3). The loss head multiplies [hidden | features] with
// [lm_head | W2]; this file makes the features and takes their gradient back.
//   vanilla  features = e = W1[previous token]
//   gated    features = sigmoid(G [hidden; e] + b) * e
//   rnn      a cell runs over the slots of a block: [g; c; o] = J [state; e; hidden] + b, features = tanh(o)
#include "model/drafter.h"

namespace dspark::model {

void Drafter::markov_forward(Arena& arena, const Tensor& hidden, const DeviceBatch& batch, Tensor features, MarkovSaved& saved) {
  const Labelled label(ctx_, {Part::markov});
  const auto& c = config_;
  saved = {};
  if (c.markov == Markov::rnn) return rnn_forward(arena, hidden, batch, features, saved);
  if (c.markov == Markov::vanilla) {
    gather_rows(ctx_, {features, markov_w1, batch.previous_token});
    saved.e = features;
    return;
  }
  const int64_t n = features.rows;
  saved.x = arena.matrix(ctx_.act_dtype(), n, c.hidden + c.rank);
  saved.pre = arena.matrix(ctx_.acc_dtype(), n, c.rank);
  saved.e = saved.x.col_range(c.hidden, c.rank);
  gather_rows(ctx_, {saved.x.col_range(0, c.hidden), hidden, batch.slot_row});
  gather_rows(ctx_, {saved.e, markov_w1, batch.previous_token});
  linear(ctx_, {saved.pre, saved.x, &markov_mix});
  add_bias(ctx_, {saved.pre, markov_bias});
  sigmoid_gate(ctx_, {features, saved.pre, saved.e});
}

void Drafter::rnn_forward(Arena& arena, const Tensor& hidden, const DeviceBatch& batch, Tensor features, MarkovSaved& saved) {
  const auto& c = config_;
  const int64_t n = hidden.rows, r = c.rank;
  saved.x = arena.matrix(ctx_.act_dtype(), n, 2 * r + c.hidden);
  saved.pre = arena.matrix(ctx_.acc_dtype(), n, 3 * r);
  saved.state = arena.matrix(ctx_.acc_dtype(), n, r);
  saved.out = arena.matrix(ctx_.act_dtype(), n, r);
  saved.e = arena.matrix(ctx_.act_dtype(), features.rows, r);
  fill(ctx_, {saved.x.col_range(0, r), 0});
  gather_rows(ctx_, {saved.x.col_range(r, r), markov_w1, batch.block_previous});
  copy(ctx_, {saved.x.col_range(2 * r, c.hidden), hidden});
  for (int64_t k = 0; k < c.block; ++k) {
    const auto slot = [&](const Tensor& t) { return t.every(c.block, k); };
    const Tensor before = k == 0 ? Tensor{} : saved.state.every(c.block, k - 1);
    if (k > 0) copy(ctx_, {slot(saved.x).col_range(0, r), before});
    linear(ctx_, {slot(saved.pre), slot(saved.x), &markov_mix});
    add_bias(ctx_, {slot(saved.pre), markov_bias});
    rnn_cell(ctx_, {slot(saved.state), slot(saved.out), slot(saved.pre), before});
  }
  gather_rows(ctx_, {features, saved.out, batch.slot_row});
  gather_rows(ctx_, {saved.e, markov_w1, batch.previous_token});
}

void Drafter::markov_backward(Arena& arena, const DeviceBatch& batch, const MarkovSaved& saved, const Tensor& d_joint, const Tensor& d_e,
                              const Tensor& d_hidden, Write write) {
  const Labelled label(ctx_, {Part::markov, true});
  const auto& c = config_;
  const int64_t r = c.rank, d = c.hidden, mark = arena.mark();
  const Tensor d_features = d_joint.col_range(d, r);
  fill(ctx_, {d_hidden, 0});
  if (r == 0 || c.markov == Markov::vanilla) {
    scatter_rows(ctx_, {d_hidden, d_joint.col_range(0, d), batch.slot_row});
    if (r > 0) scatter_add_rows(ctx_, {d_markov_w1, d_features, batch.markov.row_of, batch.markov.begin, batch.markov.source, write});
    return;
  }
  // d_x collects what reaches the head's input from all sides, then from its own product.
  const bool rnn = c.markov == Markov::rnn;
  const Tensor d_x = arena.matrix(ctx_.acc_dtype(), saved.x.rows, saved.x.cols);
  const Tensor d_x_hidden = d_x.col_range(rnn ? 2 * r : 0, d), d_x_e = d_x.col_range(rnn ? r : d, r);
  const Tensor d_pre = arena.matrix(ctx_.act_dtype(), saved.pre.rows, saved.pre.cols);
  fill(ctx_, {d_x, 0});
  if (rnn) {
    scatter_rows(ctx_, {d_x_hidden, d_joint.col_range(0, d), batch.slot_row});
    if (d_e) scatter_rows(ctx_, {d_x_e, d_e, batch.slot_row});
    rnn_backward(arena, batch, saved, d_features, d_x, d_pre);
    copy(ctx_, {d_hidden, d_x_hidden});
  } else {
    copy(ctx_, {d_x_hidden, d_joint.col_range(0, d)});
    if (d_e) copy(ctx_, {d_x_e, d_e});
    sigmoid_gate_backward(ctx_, {d_pre, d_x_e, d_features, saved.pre, saved.e, Write::add});
    linear_dx(ctx_, {d_x, d_pre, &markov_mix, Write::add});
    scatter_rows(ctx_, {d_hidden, d_x_hidden, batch.slot_row});
  }
  linear_dw(ctx_, {d_markov_mix, d_pre, saved.x, write});
  bias_grad(ctx_, {d_markov_bias, d_pre, write});
  scatter_add_rows(ctx_, {d_markov_w1, d_x_e, batch.markov.row_of, batch.markov.begin, batch.markov.source, write});
  arena.release(mark);
}

// Back through the slots of all blocks at once. The gradient of a slot's incoming state is in the first R columns of its d_x.
void Drafter::rnn_backward(Arena& arena, const DeviceBatch& batch, const MarkovSaved& saved, const Tensor& d_features, const Tensor& d_x,
                           const Tensor& d_pre) {
  const int64_t r = config_.rank, block = config_.block;
  const Tensor d_out = arena.matrix(ctx_.acc_dtype(), saved.out.rows, r);
  fill(ctx_, {d_out, 0});
  scatter_rows(ctx_, {d_out, d_features, batch.slot_row});
  for (int64_t k = block; k-- > 0;) {
    const auto slot = [&](const Tensor& t) { return t.every(block, k); };
    const Tensor d_state_out = k + 1 == block ? Tensor{} : d_x.every(block, k + 1).col_range(0, r);
    const Tensor before = k == 0 ? Tensor{} : saved.state.every(block, k - 1);
    rnn_cell_backward(ctx_, {slot(d_pre), k == 0 ? Tensor{} : slot(d_x).col_range(0, r), slot(d_out), d_state_out, slot(saved.pre), before});
    linear_dx(ctx_, {slot(d_x), slot(d_pre), &markov_mix, Write::add});
  }
}

void Drafter::markov_step(Arena& arena, const Tensor& hidden, const Tensor& previous, Tensor state, bool first, Tensor features) {
  const Labelled label(ctx_, {Part::markov});
  const auto& c = config_;
  const int64_t r = c.rank, mark = arena.mark();
  if (c.markov == Markov::vanilla) {
    gather_rows(ctx_, {features, markov_w1, previous});
    return;
  }
  const bool rnn = c.markov == Markov::rnn;
  const Tensor x = arena.matrix(ctx_.act_dtype(), 1, markov_mix.in()), pre = arena.matrix(ctx_.acc_dtype(), 1, markov_mix.out());
  const Tensor e = x.col_range(rnn ? r : c.hidden, r);
  gather_rows(ctx_, {e, markov_w1, previous});
  copy(ctx_, {x.col_range(rnn ? 2 * r : 0, c.hidden), hidden});
  if (rnn && first) fill(ctx_, {x.col_range(0, r), 0});
  else if (rnn) copy(ctx_, {x.col_range(0, r), state});
  linear(ctx_, {pre, x, &markov_mix});
  add_bias(ctx_, {pre, markov_bias});
  if (rnn) {
    const Tensor next = arena.matrix(ctx_.acc_dtype(), 1, r);
    rnn_cell(ctx_, {next, features, pre, first ? Tensor{} : state});
    copy(ctx_, {state, next});
  } else {
    sigmoid_gate(ctx_, {features, pre, e});
  }
  arena.release(mark);
}

}  // namespace dspark::model
