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
  const auto rows = static_cast<double>(context_rows), window = static_cast<double>(rule.window);
  double block = static_cast<double>(rule.block);
  // The mean of min(row, window) over the rows.
  const double context = rule.window > 0 && window < rows ? window - window * window / (2 * rows) : rows / 2;
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

// One packing for the forward product, one more for the input gradient, each from the value.
PlanCounts cost(const Refresh& a) {
  const auto packed = static_cast<double>(packed_bytes(*a.w));
  return {0, packed, packed, 1};
}

int64_t packed_bytes(const Weight& w) {
  const int64_t one = w.value.size() * dtype_bytes(w.value.dtype);
  return (w.first_columns_of ? 0 : one) + (w.needs_input_gradient && w.value.size() <= kPackedForGradient ? one : 0);
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

// Chunk by chunk: the target's logits, the draft's, their sweeps, and the gradient's products back. Logits are memory: written by
// their product, read by the sweeps (a row stays in a cache from one sweep to the next; a target's row is read once for its own
// normaliser and once a slot), the gradient written in their place and read by each product back. The products of [hidden | e] are
// booked by columns: hidden's to the vocabulary, e's to the Markov head.
std::vector<PlanEntry> entries(const VocabLoss& a, Label) {
  const int64_t vocab = a.head->out(), cols = a.joint.cols;
  const double v = static_cast<double>(vocab), acc = static_cast<double>(dtype_bytes(a.slot_out.dtype)), act = static_cast<double>(dtype_bytes(a.joint.dtype));
  const double chunks = static_cast<double>(std::count_if(a.chunks.begin(), a.chunks.end(), [](const LossChunk& c) { return c.slots > 0; }));
  int64_t n_slots = 0, n_rows = 0;
  for (const LossChunk& c : a.chunks) n_slots += c.slots, n_rows += c.rows;
  const auto slots = static_cast<double>(n_slots), rows = static_cast<double>(n_rows);
  std::vector<PlanEntry> all;
  // `e_cols` of `of` columns are the Markov head's.
  const auto product_entries = [&](bool backward, Work work, int64_t e_cols, int64_t of, const PlanCounts& c) {
    const double share = of > 0 ? static_cast<double>(e_cols) / static_cast<double>(of) : 0;
    const auto part = [&](Part p, double s, int64_t calls) {
      if (s > 0) all.push_back({{p, backward}, work, {s * c.flops, s * c.bytes_read, s * c.bytes_written, calls}});
    };
    part(Part::draft_vocab, 1 - share, c.calls);
    part(Part::markov, share, 0);
  };
  const int64_t e_cols = cols - a.hidden_cols;
  // Normalisers take exp, add and max a logit; the sums about ten operations for tv, acceptance and ce, six more for each further term;
  // the gradient ten.
  double sums = 10;
  for (const Term t : {kKl, kRkl, kJsd, kNla, kLk}) sums += a.coef[t] != 0 ? 6 : 0;

  all.push_back({{Part::target_vocab, false}, Work::product,
                 {product(n_rows, vocab, a.target_head->in()), bytes(a.target_state) + chunks * bytes(a.target_head->value), rows * v * acc, 1}});
  all.push_back({{Part::target_vocab, false}, Work::logits, {3 * rows * v, rows * v * acc, 0, 0}});
  product_entries(false, Work::product, e_cols, cols, {product(n_slots, vocab, cols), bytes(a.joint) + chunks * bytes(a.head->value), slots * v * acc, 0});
  all.push_back({{Part::draft_vocab, false}, Work::logits,
                 {(3 + sums) * slots * v, 2 * slots * v * acc + bytes({a.target_row, a.label, a.weight, a.conf_weight, a.conf_w, a.conf_e}), bytes(a.slot_out), 0}});
  if (!a.backward) return all;
  const double gradient = slots * v * act;
  all.push_back({{Part::draft_vocab, true}, Work::logits, {10 * slots * v, bytes({a.conf_w, a.conf_e}), gradient + bytes({a.d_conf_e, a.d_conf_w, a.d_conf_b}), 0}});
  product_entries(true, Work::product, e_cols, cols, {product(n_slots, vocab, cols), gradient + chunks * bytes(a.head->value), bytes(a.d_joint), 0});
  if (a.d_head) {
    const double reads = std::max(0.0, chunks - (a.write_dw == Write::overwrite ? 1 : 0));  // chunks that add
    product_entries(true, Work::gradient_product, std::min(e_cols, a.d_head.cols), a.d_head.cols,
                    {product(n_slots, vocab, a.d_head.cols), gradient + slots * static_cast<double>(a.d_head.cols) * act + reads * bytes(a.d_head),
                     std::max(1.0, chunks) * bytes(a.d_head), 0});
  }
  return all;
}

PlanCounts cost(const VocabLoss& a) {
  PlanCounts sum;
  for (const PlanEntry& e : entries(a, {})) sum.add(e.counts);
  return sum;
}

PlanCounts cost(const SumSquares& a) { return counted(2 * size(a.grad), {a.grad}, {a.sum}); }
PlanCounts cost(const FinishNorm& a) { return counted(size(a.sums), {a.sums, a.scalars}, {a.scalars}); }
PlanCounts cost(const AdamW& a) {
  return counted(15 * size(a.master), {a.master, a.m, a.v, a.grad, a.scalars}, {a.master, a.m, a.v, a.value});
}

// Products counted in full, X X^T and G G^T too: a backend that leaves their mirrored half out does about three quarters.
PlanCounts cost(const Muon& a) {
  const int64_t m = std::min(a.master.rows, a.master.cols), n = std::max(a.master.rows, a.master.cols);
  const double iteration = product(m, m, n) + product(m, m, m) + product(m, n, m);
  return counted(a.iterations * iteration + 15 * size(a.master), {a.master, a.buf, a.grad, a.scalars}, {a.master, a.buf, a.value});
}

PlanCounts cost(const TokenProbs& a) { return counted(5 * size(a.logits), {a.logits}, {a.probs}); }
PlanCounts cost(const SampleTokens& a) {
  return counted(2 * size(a.probs), {a.probs, a.uniform, a.map}, {a.ids, a.raw_ids});
}
PlanCounts cost(const VerifyBlock& a) {
  return counted(4 * size(a.work), {a.draft_ids, a.draft_probs, a.map, a.target_probs, a.uniform}, {a.result, a.work});
}

// ---- products ----

std::vector<PlanProduct> products(const Linear& a) { return {{"packed", a.x.rows, a.w->out(), a.w->in(), 1}}; }
std::vector<PlanProduct> products(const LinearDx& a) { return {{"packed", a.dy.rows, a.w->in(), a.w->out(), 1, true}}; }
std::vector<PlanProduct> products(const LinearDw& a) { return {{"tn", a.dw.rows, a.dw.cols, a.x.rows, 1}}; }
std::vector<PlanProduct> products(const VocabLoss& a) {
  std::vector<PlanProduct> all;
  const int64_t vocab = a.head->out(), cols = a.joint.cols;
  for (const LossChunk& c : a.chunks) {
    if (c.slots == 0) continue;
    all.push_back({"packed", c.rows, vocab, a.target_head->in(), 1});
    all.push_back({"packed", c.slots, vocab, cols, 1});
    if (!a.backward) continue;
    all.push_back({"packed", c.slots, cols, vocab, 1, true});
    if (a.d_head) all.push_back({"tn", vocab, a.d_head.cols, c.slots, 1});
  }
  return all;
}

}  // namespace dspark::model::plan
