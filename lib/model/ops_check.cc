// The argument checks of every operator: shapes, dtypes, strides, aliasing. One place for all backends, so that a
// kernel may rely on them. A violation is a bug of ours: it aborts and prints the operator, the tensor and both values.
// Here: moving, products, norms, activations, the Markov heads.
#include "model/ops_check.h"

namespace dspark::model {

// ---- moving
// ----------------------------------------------------------------------------------------------------------------

void check(const Context& ctx, const Copy& a) {
  const Checker c(ctx, "copy");
  c.shape("src", a.src, a.src.rows, a.src.cols);
  c.shape("dst", a.dst, a.src.rows, a.src.cols);
  const bool ints = a.src.dtype == DType::i32 && a.dst.dtype == DType::i32;
  DS_ASSERT(ints || (is_float(a.src.dtype) && is_float(a.dst.dtype)), "copy: {} to {}", dtype_name(a.src.dtype),
            dtype_name(a.dst.dtype));
  c.distinct({{"dst", a.dst}}, {{"src", a.src}});
}

void check(const Context& ctx, const Fill& a) {
  const Checker c(ctx, "fill");
  c.shape("dst", a.dst, a.dst.rows, a.dst.cols);
  DS_ASSERT(is_float(a.dst.dtype) || a.dst.dtype == DType::i32, "fill: dst is {}", dtype_name(a.dst.dtype));
}

void check(const Context& ctx, const GatherRows& a) {
  const Checker c(ctx, "gather_rows");
  c.i32("index", a.index, a.index.cols);
  c.any_float("table", a.table, a.table.rows, a.table.cols);
  c.any_float("dst", a.dst, a.index.cols, a.table.cols);
  c.distinct({{"dst", a.dst}}, {{"table", a.table}, {"index", a.index}});
}

void check(const Context& ctx, const ScatterRows& a) {
  const Checker c(ctx, "scatter_rows");
  c.i32("index", a.index, a.index.cols);
  c.any_float("src", a.src, a.index.cols, a.src.cols);
  c.any_float("dst", a.dst, a.dst.rows, a.src.cols);
  c.distinct({{"dst", a.dst}}, {{"src", a.src}, {"index", a.index}});
}

void check(const Context& ctx, const ScatterAddRows& a) {
  const Checker c(ctx, "scatter_add_rows");
  c.acc("d_table", a.d_table, a.d_table.rows, a.d_table.cols);
  c.floating("d_rows", a.d_rows, a.d_rows.rows, a.d_table.cols);
  c.i32("row_of", a.row_of, a.row_of.cols);
  c.i32("begin", a.begin, a.row_of.cols + 1);
  c.i32("source", a.source, a.source.cols);
  c.distinct({{"d_table", a.d_table}},
             {{"d_rows", a.d_rows}, {"row_of", a.row_of}, {"begin", a.begin}, {"source", a.source}});
}

// ---- products
// --------------------------------------------------------------------------------------------------------------

void check(const Context& ctx, const Linear& a) {
  const Checker c(ctx, "linear");
  c.weight(a.w);
  c.act("x", a.x, a.x.rows, a.w->in());
  c.product("y", a.y, a.x.rows, a.w->out(), a.write);
  c.distinct({{"y", a.y}}, {{"x", a.x}, {"w", a.w->value}});
}

void check(const Context& ctx, const LinearDx& a) {
  const Checker c(ctx, "linear_dx");
  c.weight(a.w);
  DS_ASSERT(a.w->needs_input_gradient, "linear_dx: the weight was not packed for its input gradient");
  c.act("dy", a.dy, a.dy.rows, a.w->out());
  c.product("dx", a.dx, a.dy.rows, a.w->in(), a.write);
  c.distinct({{"dx", a.dx}}, {{"dy", a.dy}, {"w", a.w->value}});
}

void check(const Context& ctx, const LinearDw& a) {
  const Checker c(ctx, "linear_dw");
  c.act("dy", a.dy, a.dy.rows, a.dy.cols);
  c.act("x", a.x, a.dy.rows, a.x.cols);
  c.acc("dw", a.dw, a.dy.cols, a.x.cols);
  c.distinct({{"dw", a.dw}}, {{"dy", a.dy}, {"x", a.x}});
}

void check(const Context& ctx, const Refresh& a) { Checker(ctx, "refresh").weight(a.w); }

void check(const Context& ctx, const AddBias& a) {
  const Checker c(ctx, "add_bias");
  c.floating("y", a.y, a.y.rows, a.y.cols);
  c.acc("bias", a.bias, 1, a.y.cols);
  c.distinct({{"y", a.y}}, {{"bias", a.bias}});
}

void check(const Context& ctx, const BiasGrad& a) {
  const Checker c(ctx, "bias_grad");
  c.floating("dy", a.dy, a.dy.rows, a.dy.cols);
  c.acc("d_bias", a.d_bias, 1, a.dy.cols);
  c.distinct({{"d_bias", a.d_bias}}, {{"dy", a.dy}});
}

// ---- norms, rope, activation
// -----------------------------------------------------------------------------------------------

void check(const Context& ctx, const AddRmsNorm& a) {
  const Checker c(ctx, "add_rmsnorm");
  c.acc("x", a.x, a.x.rows, a.x.cols);
  if (a.delta) c.floating("delta", a.delta, a.x.rows, a.x.cols);
  DS_ASSERT(!a.delta || a.x_out || a.x.size() == 0, "add_rmsnorm: delta without x_out");
  if (a.x_out) {
    c.acc("x_out", a.x_out, a.x.rows, a.x.cols);
    c.same_or_distinct("x_out", a.x_out, "x", a.x);
  }
  c.floating("y", a.y, a.x.rows, a.x.cols);
  c.acc("weight", a.weight, 1, a.x.cols);
  if (a.inv_rms) c.acc("inv_rms", a.inv_rms, 1, a.x.rows);
  c.distinct({{"y", a.y}, {"inv_rms", a.inv_rms}},
             {{"x", a.x}, {"x_out", a.x_out}, {"delta", a.delta}, {"weight", a.weight}});
  c.distinct({{"x_out", a.x_out}}, {{"delta", a.delta}, {"weight", a.weight}});
}

void check(const Context& ctx, const RmsNormBackward& a) {
  const Checker c(ctx, "rmsnorm_backward");
  c.acc("x", a.x, a.x.rows, a.x.cols);
  c.floating("dy", a.dy, a.x.rows, a.x.cols);
  c.acc("d_x", a.d_x, a.x.rows, a.x.cols);
  c.acc("weight", a.weight, 1, a.x.cols);
  c.acc("inv_rms", a.inv_rms, 1, a.x.rows);
  if (a.d_weight) c.acc("d_weight", a.d_weight, 1, a.x.cols);
  c.distinct({{"d_x", a.d_x}, {"d_weight", a.d_weight}},
             {{"dy", a.dy}, {"x", a.x}, {"weight", a.weight}, {"inv_rms", a.inv_rms}});
}

void check(const Context& ctx, const QkNormRope& a) {
  const Checker c(ctx, "qk_norm_rope");
  const int64_t heads = c.heads("x", a.x, a.head_dim);
  c.floating("x", a.x, a.x.rows, a.x.cols);
  c.floating("y", a.y, a.x.rows, a.x.cols);
  if (a.weight) c.acc("weight", a.weight, 1, a.head_dim);
  c.i32("position", a.position, a.x.rows);
  if (a.inv_rms) c.acc("inv_rms", a.inv_rms, a.x.rows, heads);
  c.rope(a.rope, a.head_dim);
  c.same_or_distinct("y", a.y, "x", a.x);
  c.distinct({{"y", a.y}, {"inv_rms", a.inv_rms}},
             {{"weight", a.weight}, {"position", a.position}, {"inv_freq", a.rope.inv_freq}});
  c.distinct({{"inv_rms", a.inv_rms}}, {{"x", a.x}});
}

void check(const Context& ctx, const QkNormRopeBackward& a) {
  const Checker c(ctx, "qk_norm_rope_backward");
  const int64_t heads = c.heads("x", a.x, a.head_dim);
  c.floating("x", a.x, a.x.rows, a.x.cols);
  c.floating("dy", a.dy, a.x.rows, a.x.cols);
  c.floating("d_x", a.d_x, a.x.rows, a.x.cols);
  c.i32("position", a.position, a.x.rows);
  if (a.weight) {
    c.acc("weight", a.weight, 1, a.head_dim);
    c.acc("inv_rms", a.inv_rms, a.x.rows, heads);
  }
  DS_ASSERT(!a.d_weight || a.weight, "qk_norm_rope_backward: d_weight without weight");
  if (a.d_weight) c.acc("d_weight", a.d_weight, 1, a.head_dim);
  c.rope(a.rope, a.head_dim);
  c.same_or_distinct("d_x", a.d_x, "dy", a.dy);
  c.distinct({{"d_x", a.d_x}, {"d_weight", a.d_weight}}, {{"x", a.x},
                                                          {"weight", a.weight},
                                                          {"position", a.position},
                                                          {"inv_rms", a.inv_rms},
                                                          {"inv_freq", a.rope.inv_freq}});
  c.distinct({{"d_weight", a.d_weight}}, {{"dy", a.dy}});
}

void check(const Context& ctx, const SwiGlu& a) {
  const Checker c(ctx, "swiglu");
  c.floating("y", a.y, a.y.rows, a.y.cols);
  c.floating("gate_up", a.gate_up, a.y.rows, 2 * a.y.cols);
  c.distinct({{"y", a.y}}, {{"gate_up", a.gate_up}});
}

void check(const Context& ctx, const SwiGluBackward& a) {
  const Checker c(ctx, "swiglu_backward");
  c.floating("dy", a.dy, a.dy.rows, a.dy.cols);
  c.floating("gate_up", a.gate_up, a.dy.rows, 2 * a.dy.cols);
  c.floating("d_gate_up", a.d_gate_up, a.dy.rows, 2 * a.dy.cols);
  c.distinct({{"d_gate_up", a.d_gate_up}}, {{"dy", a.dy}, {"gate_up", a.gate_up}});
}

void check(const Context& ctx, const SigmoidGate& a) {
  const Checker c(ctx, "sigmoid_gate");
  c.floating("y", a.y, a.y.rows, a.y.cols);
  c.floating("pre", a.pre, a.y.rows, a.y.cols);
  c.floating("x", a.x, a.y.rows, a.y.cols);
  c.distinct({{"y", a.y}}, {{"pre", a.pre}, {"x", a.x}});
}

void check(const Context& ctx, const SigmoidGateBackward& a) {
  const Checker c(ctx, "sigmoid_gate_backward");
  const int64_t rows = a.dy.rows, cols = a.dy.cols;
  for (const Named& n : {Named{"dy", a.dy}, {"pre", a.pre}, {"x", a.x}, {"d_pre", a.d_pre}}) c.floating(n.name, n.t, rows, cols);
  c.acc("d_x", a.d_x, rows, cols);
  c.distinct({{"d_pre", a.d_pre}, {"d_x", a.d_x}}, {{"dy", a.dy}, {"pre", a.pre}, {"x", a.x}});
}

void check(const Context& ctx, const RnnCell& a) {
  const Checker c(ctx, "rnn_cell");
  const int64_t rows = a.out.rows, cols = a.out.cols;
  c.floating("out", a.out, rows, cols);
  c.floating("pre", a.pre, rows, 3 * cols);
  c.acc("state_out", a.state_out, rows, cols);
  if (a.state_in) c.acc("state_in", a.state_in, rows, cols);
  c.distinct({{"state_out", a.state_out}, {"out", a.out}}, {{"pre", a.pre}, {"state_in", a.state_in}});
}

void check(const Context& ctx, const RnnCellBackward& a) {
  const Checker c(ctx, "rnn_cell_backward");
  const int64_t rows = a.d_out.rows, cols = a.d_out.cols;
  c.floating("d_out", a.d_out, rows, cols);
  c.floating("pre", a.pre, rows, 3 * cols);
  c.floating("d_pre", a.d_pre, rows, 3 * cols);
  DS_ASSERT(static_cast<bool>(a.state_in) == static_cast<bool>(a.d_state_in), "rnn_cell_backward: state_in and d_state_in go together");
  if (a.state_in) {
    c.acc("state_in", a.state_in, rows, cols);
    c.acc("d_state_in", a.d_state_in, rows, cols);
  }
  if (a.d_state_out) c.acc("d_state_out", a.d_state_out, rows, cols);
  c.distinct({{"d_pre", a.d_pre}, {"d_state_in", a.d_state_in}},
             {{"d_out", a.d_out}, {"d_state_out", a.d_state_out}, {"pre", a.pre}, {"state_in", a.state_in}});
}

}  // namespace dspark::model
