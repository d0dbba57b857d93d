#include "model/ops_plan/counts.h"

#include <algorithm>
#include <initializer_list>

namespace dspark::model::plan {
namespace {

double bytes(const Tensor& t) { return t ? static_cast<double>(t.size() * dtype_bytes(t.dtype)) : 0.0; }

double bytes(std::initializer_list<Tensor> tensors) {
  double sum = 0;
  for (const Tensor& t : tensors) sum += bytes(t);
  return sum;
}

PlanCounts counted(double flops, std::initializer_list<Tensor> read, std::initializer_list<Tensor> written) {
  return {flops, bytes(read), bytes(written), 1};
}

// Results that are added to are read as well.
PlanCounts written(PlanCounts c, Write write, std::initializer_list<Tensor> results) {
  c.bytes_written += bytes(results);
  if (write == Write::add) c.bytes_read += bytes(results);
  return c;
}

double product(int64_t m, int64_t n, int64_t k) {
  return 2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k);
}
double size(const Tensor& t) { return static_cast<double>(t.size()); }

// Keys that the slots of all anchors see together: see the header.
double anchor_keys(const AnchorRule& rule, int64_t anchors, int64_t context_rows) {
  double context = static_cast<double>(context_rows) / 2, block = static_cast<double>(rule.block);
  if (rule.window > 0) context = std::min(context, static_cast<double>(rule.window));
  if (rule.causal_in_block) block = (block + 1) / 2;
  return static_cast<double>(anchors * rule.block) * (context + block);
}

}  // namespace

PlanCounts cost(const Copy& a) { return counted(0, {a.src}, {a.dst}); }
PlanCounts cost(const Fill& a) { return counted(0, {}, {a.dst}); }
PlanCounts cost(const GatherRows& a) { return counted(0, {a.dst, a.index}, {a.dst}); }
PlanCounts cost(const ScatterRows& a) { return counted(0, {a.src, a.index}, {a.src}); }

PlanCounts cost(const ScatterAddRows& a) {
  const double row = static_cast<double>(a.d_table.cols * dtype_bytes(a.d_table.dtype));
  const double touched = static_cast<double>(std::min(a.row_of.cols, a.d_table.rows)) * row;
  PlanCounts c =
      counted(static_cast<double>(a.source.cols * a.d_table.cols), {a.d_rows, a.row_of, a.begin, a.source}, {});
  c.bytes_read += a.write == Write::add ? touched : 0;
  c.bytes_written += a.write == Write::add ? touched : bytes(a.d_table);
  return c;
}

PlanCounts cost(const Linear& a) {
  return written(counted(product(a.x.rows, a.w->out(), a.w->in()), {a.x, a.w->value}, {}), a.write, {a.y});
}
PlanCounts cost(const LinearDx& a) {
  return written(counted(product(a.dy.rows, a.w->out(), a.w->in()), {a.dy, a.w->value}, {}), a.write, {a.dx});
}
PlanCounts cost(const LinearDw& a) {
  return written(counted(product(a.dy.rows, a.dy.cols, a.x.cols), {a.dy, a.x}, {}), a.write, {a.dw});
}

// One packing for the forward product, one more for the input gradient.
PlanCounts cost(const Refresh& a) {
  PlanCounts c = counted(0, {a.w->value}, {a.w->value});
  if (a.w->needs_input_gradient) c.bytes_written += bytes(a.w->value);
  return c;
}

PlanCounts cost(const AddBias& a) { return counted(size(a.y), {a.y, a.bias}, {a.y}); }
PlanCounts cost(const BiasGrad& a) { return written(counted(size(a.dy), {a.dy}, {}), a.write, {a.d_bias}); }

PlanCounts cost(const AddRmsNorm& a) {
  return counted((a.delta ? 5 : 4) * size(a.x), {a.x, a.delta, a.weight}, {a.y, a.x_out, a.inv_rms});
}
PlanCounts cost(const RmsNormBackward& a) {
  const PlanCounts c = counted(10 * size(a.x), {a.dy, a.x, a.weight, a.inv_rms}, {});
  return written(written(c, a.write_dx, {a.d_x}), a.write_dw, {a.d_weight});
}

PlanCounts cost(const QkNormRope& a) {
  const double turns = static_cast<double>(a.x.rows * a.rope.rot / 2) * 3;  // angle, sine, cosine once a row
  return counted((a.weight ? 7 : 3) * size(a.x) + turns, {a.x, a.weight, a.position}, {a.y, a.inv_rms});
}
PlanCounts cost(const QkNormRopeBackward& a) {
  const double turns = static_cast<double>(a.x.rows * a.rope.rot / 2) * 3;
  const PlanCounts c =
      counted((a.weight ? 13 : 3) * size(a.x) + turns, {a.dy, a.x, a.weight, a.position, a.inv_rms}, {a.d_x});
  return written(c, a.write_dw, {a.d_weight});
}

PlanCounts cost(const SwiGlu& a) { return counted(5 * size(a.y), {a.gate_up}, {a.y}); }
PlanCounts cost(const SwiGluBackward& a) { return counted(11 * size(a.dy), {a.dy, a.gate_up}, {a.d_gate_up}); }

PlanCounts cost(const SigmoidGate& a) { return counted(5 * size(a.y), {a.pre, a.x}, {a.y}); }
PlanCounts cost(const SigmoidGateBackward& a) { return written(counted(9 * size(a.dy), {a.dy, a.pre, a.x}, {a.d_pre}), a.write_dx, {a.d_x}); }
PlanCounts cost(const RnnCell& a) { return counted(20 * size(a.out), {a.pre, a.state_in}, {a.state_out, a.out}); }
PlanCounts cost(const RnnCellBackward& a) {
  return counted(32 * size(a.d_out), {a.d_out, a.d_state_out, a.pre, a.state_in}, {a.d_pre, a.d_state_in});
}

// A key costs a query head HD multiply-adds for its score and HD for its value; the backward five such products.
PlanCounts cost(const AnchorAttention& a) {
  const double keys = anchor_keys(a.rule, a.anchor_row.cols, a.k_ctx.rows);
  return counted(keys * (4 * static_cast<double>(a.q.cols) + 4 * static_cast<double>(a.lse.cols)),
                 {a.q, a.k_ctx, a.v_ctx, a.k_block, a.v_block}, {a.out, a.lse});
}
PlanCounts cost(const AnchorAttentionBackward& a) {
  const double keys = anchor_keys(a.rule, a.anchor_row.cols, a.k_ctx.rows);
  return counted(keys * (10 * static_cast<double>(a.q.cols) + 6 * static_cast<double>(a.lse.cols)) + 2 * size(a.q),
                 {a.d_out, a.out, a.lse, a.q, a.k_ctx, a.v_ctx, a.k_block, a.v_block},
                 {a.d_q, a.d_k_ctx, a.d_v_ctx, a.d_k_block, a.d_v_block});
}

PlanCounts cost(const CacheAttention& a) {
  double keys = 0;
  for (int64_t i = 0; i < a.q.rows; ++i)
    keys += static_cast<double>(a.window > 0 ? std::min(a.window, a.first + i + 1) : a.first + i + 1);
  PlanCounts c = counted(keys * (4 * static_cast<double>(a.q.cols) + 4 * static_cast<double>(a.q.cols / a.head_dim)),
                         {a.q}, {a.out});
  if (a.q.rows > 0) {
    const int64_t oldest = a.window > 0 ? std::max<int64_t>(0, a.first - a.window + 1) : 0;
    const Tensor rows = a.k_cache.row_range(oldest, a.first + a.q.rows - oldest);
    c.bytes_read += 2 * bytes(rows);
  }
  return c;
}

PlanCounts cost(const VocabLoss& a) {
  const int64_t vocab = a.head->out(), cols = a.joint.cols;
  PlanCounts c;
  c.calls = 1;
  double slots = 0, rows = 0;
  for (const LossChunk& k : a.chunks) {
    c.flops += product(k.slots, vocab, cols) + product(k.rows, vocab, a.target_head->in());
    c.bytes_read += bytes(a.head->value) + bytes(a.target_head->value);
    if (a.backward) {
      c.flops += product(k.slots, vocab, cols) + (a.d_head ? product(k.slots, vocab, a.d_head.cols) : 0);
      c.bytes_read += bytes(a.head->value) + bytes(a.d_head);
      c.bytes_written += bytes(a.d_head);
    }
    slots += static_cast<double>(k.slots);
    rows += static_cast<double>(k.rows);
  }
  // Sweeps: normalisers (exp, add, max) of both sides, then about ten a logit for tv, acceptance and ce, six more for
  // each further term, ten for the gradient.
  double sweep = 3 + 10 + (a.backward ? 10 : 0);
  for (const Term t : {kKl, kRkl, kJsd, kNla, kLk}) sweep += a.coef[t] != 0 ? 6 : 0;
  c.flops += static_cast<double>(vocab) * (slots * sweep + rows * 3);
  c.bytes_read += bytes({a.joint, a.target_state, a.target_row, a.label, a.weight, a.conf_weight, a.conf_w, a.conf_e});
  c.bytes_written += bytes(a.slot_out) + (a.backward ? bytes({a.d_joint, a.d_conf_e, a.d_conf_w, a.d_conf_b}) : 0);
  return c;
}

PlanCounts cost(const SumSquares& a) { return counted(2 * size(a.grad), {a.grad}, {a.sum}); }
PlanCounts cost(const FinishNorm& a) { return counted(size(a.sums), {a.sums, a.scalars}, {a.scalars}); }
PlanCounts cost(const AdamW& a) {
  return counted(15 * size(a.master), {a.master, a.m, a.v, a.grad, a.scalars}, {a.master, a.m, a.v, a.value});
}

PlanCounts cost(const Muon& a) {
  const int64_t m = std::min(a.master.rows, a.master.cols), n = std::max(a.master.rows, a.master.cols);
  // Gram matrices are symmetric: half of the products X X^T and G G^T.
  const double iteration = product(m, m, n) / 2 + product(m, m, m) / 2 + product(m, n, m);
  return counted(a.iterations * iteration + 15 * size(a.master), {a.master, a.buf, a.grad, a.scalars}, {a.master, a.buf, a.value});
}

PlanCounts cost(const TokenProbs& a) { return counted(5 * size(a.logits), {a.logits}, {a.probs}); }
PlanCounts cost(const SampleTokens& a) {
  return counted(2 * size(a.probs), {a.probs, a.uniform, a.map}, {a.ids, a.raw_ids});
}
PlanCounts cost(const VerifyBlock& a) {
  return counted(4 * size(a.work), {a.draft_ids, a.draft_probs, a.map, a.target_probs, a.uniform}, {a.result, a.work});
}

}  // namespace dspark::model::plan
