// The argument checks of every operator: shapes, dtypes, strides, aliasing. One place for all backends, so that a
// kernel may rely on them. A violation is a bug of ours: it aborts and prints the operator, the tensor and both values.
#include <algorithm>
#include <initializer_list>

#include "model/backend_access.h"
#include "model/ops.h"

namespace dspark::model {
namespace {

struct Named {
  const char* name;
  const Tensor& t;
};

bool is_float(DType t) {
  return t == DType::bf16 || t == DType::f16 || t == DType::f32 || t == DType::f64 || t == DType::c128;
}

uintptr_t begin_of(const Tensor& t) { return reinterpret_cast<uintptr_t>(BackendAccess::raw(t.data)); }

// Whether two views share an element. Views side by side in one wider matrix (q|k|v) interleave without sharing any.
bool overlap(const Tensor& a, const Tensor& b) {
  if (!a || !b || a.size() == 0 || b.size() == 0) return false;
  const int64_t a_bytes = dtype_bytes(a.dtype), b_bytes = dtype_bytes(b.dtype);
  const uintptr_t a0 = begin_of(a), b0 = begin_of(b);
  const uintptr_t a1 = a0 + static_cast<uintptr_t>(((a.rows - 1) * a.stride + a.cols) * a_bytes);
  const uintptr_t b1 = b0 + static_cast<uintptr_t>(((b.rows - 1) * b.stride + b.cols) * b_bytes);
  if (a1 <= b0 || b1 <= a0) return false;
  const int64_t pitch = a.rows > 1 ? a.stride * a_bytes : b.stride * b_bytes;
  if ((a.rows > 1 && b.rows > 1 && a.stride * a_bytes != b.stride * b_bytes) || pitch == 0) return true;
  // Column intervals modulo the common pitch.
  const int64_t gap = static_cast<int64_t>(b0 - a0);
  const int64_t offset = ((gap % pitch) + pitch) % pitch;
  return offset < a.cols * a_bytes || offset + b.cols * b_bytes > pitch;
}

class Checker {
 public:
  Checker(const Context& ctx, const char* op) : ctx_(ctx), op_(op) {}

  void shape(const char* name, const Tensor& t, int64_t rows, int64_t cols) const {
    DS_ASSERT(t.rows == rows && t.cols == cols, "{}: {} is [{}, {}], expected [{}, {}]", op_, name, t.rows, t.cols,
              rows, cols);
    valid(name, t);
  }
  void act(const char* name, const Tensor& t, int64_t rows, int64_t cols) const {
    shape(name, t, rows, cols);
    is(name, t, ctx_.act_dtype());
  }
  void acc(const char* name, const Tensor& t, int64_t rows, int64_t cols) const {
    shape(name, t, rows, cols);
    is(name, t, ctx_.acc_dtype());
  }
  void floating(const char* name, const Tensor& t, int64_t rows, int64_t cols) const {
    shape(name, t, rows, cols);
    DS_ASSERT(t.dtype == ctx_.act_dtype() || t.dtype == ctx_.acc_dtype(), "{}: {} is {}, expected {} or {}", op_, name,
              dtype_name(t.dtype), dtype_name(ctx_.act_dtype()), dtype_name(ctx_.acc_dtype()));
  }
  void any_float(const char* name, const Tensor& t, int64_t rows, int64_t cols) const {
    shape(name, t, rows, cols);
    DS_ASSERT(is_float(t.dtype), "{}: {} is {}, expected a float dtype", op_, name, dtype_name(t.dtype));
  }
  void i32(const char* name, const Tensor& t, int64_t n) const { typed(name, t, DType::i32, n); }
  void typed(const char* name, const Tensor& t, DType dtype, int64_t n) const {
    shape(name, t, 1, n);
    is(name, t, dtype);
  }
  // y of a product: act or acc, acc when it is added to.
  void product(const char* name, const Tensor& t, int64_t rows, int64_t cols, Write write) const {
    if (write == Write::add)
      acc(name, t, rows, cols);
    else
      floating(name, t, rows, cols);
  }
  void distinct(std::initializer_list<Named> outputs, std::initializer_list<Named> inputs) const {
    for (auto o = outputs.begin(); o != outputs.end(); ++o) {
      for (const Named& i : inputs)
        DS_ASSERT(!overlap(o->t, i.t), "{}: output {} shares memory with input {}", op_, o->name, i.name);
      for (auto p = outputs.begin(); p != o; ++p)
        DS_ASSERT(!overlap(o->t, p->t), "{}: outputs {} and {} share memory", op_, o->name, p->name);
    }
  }
  // In place: the same view or separate memory, nothing in between.
  void same_or_distinct(const char* name, const Tensor& out, const char* in_name, const Tensor& in) const {
    const bool same = out.data == in.data && out.stride == in.stride && out.dtype == in.dtype;
    DS_ASSERT(same || !overlap(out, in), "{}: {} and {} overlap without being the same view", op_, name, in_name);
  }
  void weight(const Weight* w) const {
    DS_ASSERT(w != nullptr, "{}: no weight", op_);
    act("w", w->value, w->value.rows, w->value.cols);
  }
  void rope(const Rope& rope, int64_t head_dim) const {
    DS_ASSERT(rope.rot >= 0 && rope.rot <= head_dim && rope.rot % 2 == 0, "{}: rot {} of head size {}", op_, rope.rot,
              head_dim);
    if (rope.rot > 0) acc("inv_freq", rope.inv_freq, 1, rope.rot / 2);
  }
  int64_t heads(const char* name, const Tensor& t, int64_t head_dim) const {
    DS_ASSERT(head_dim > 0 && t.cols % head_dim == 0, "{}: {} has {} columns, head size {}", op_, name, t.cols,
              head_dim);
    return t.cols / head_dim;
  }

 private:
  void is(const char* name, const Tensor& t, DType dtype) const {
    DS_ASSERT(t.dtype == dtype, "{}: {} is {}, expected {}", op_, name, dtype_name(t.dtype), dtype_name(dtype));
  }
  void valid(const char* name, const Tensor& t) const {
    DS_ASSERT(t.rows >= 0 && t.cols >= 0, "{}: {} is [{}, {}]", op_, name, t.rows, t.cols);
    DS_ASSERT(t.rows <= 1 || t.stride >= t.cols, "{}: {} has stride {} below its {} columns", op_, name, t.stride,
              t.cols);
    DS_ASSERT(t.size() == 0 || t, "{}: {} [{}, {}] has no memory", op_, name, t.rows, t.cols);
    const auto bytes = static_cast<uintptr_t>(std::min<int64_t>(dtype_bytes(t.dtype), 8));
    DS_ASSERT(begin_of(t) % bytes == 0, "{}: {} is not aligned to its elements", op_, name);
  }
  const Context& ctx_;
  const char* op_;
};

}  // namespace

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

// ---- optimizer
// -------------------------------------------------------------------------------------------------------------

void check(const Context& ctx, const SumSquares& a) {
  const Checker c(ctx, "sum_squares");
  c.acc("grad", a.grad, a.grad.rows, a.grad.cols);
  c.acc("sum", a.sum, 1, 1);
  c.distinct({{"sum", a.sum}}, {{"grad", a.grad}});
}

void check(const Context& ctx, const FinishNorm& a) {
  const Checker c(ctx, "finish_norm");
  c.acc("scalars", a.scalars, 1, kNumStepScalars);
  c.acc("sums", a.sums, 1, a.sums.cols);
  c.distinct({{"scalars", a.scalars}}, {{"sums", a.sums}});
}

void check(const Context& ctx, const AdamW& a) {
  const Checker c(ctx, "adamw");
  const int64_t rows = a.master.rows, cols = a.master.cols;
  c.acc("master", a.master, rows, cols);
  c.acc("m", a.m, rows, cols);
  c.acc("v", a.v, rows, cols);
  c.acc("grad", a.grad, rows, cols);
  if (a.value) c.floating("value", a.value, rows, cols);
  c.acc("scalars", a.scalars, 1, kNumStepScalars);
  c.distinct({{"master", a.master}, {"m", a.m}, {"v", a.v}, {"value", a.value}},
             {{"grad", a.grad}, {"scalars", a.scalars}});
}

// X and the polynomial in act; X, two Gram matrices and a diagonal in acc; a sum a row in fp64.
int64_t muon_work(const Context& ctx, int64_t rows, int64_t cols) {
  const int64_t m = std::min(rows, cols), n = std::max(rows, cols);
  const auto padded = [](int64_t bytes) { return (bytes + 63) / 64 * 64; };
  const int64_t act = dtype_bytes(ctx.act_dtype()), acc = dtype_bytes(ctx.acc_dtype());
  return padded(m * n * act) + padded(m * n * acc) + padded(m * m * act) + 2 * padded(m * m * acc) + padded(m * acc) + padded(8 * rows) + 64;
}

void check(const Context& ctx, const Muon& a) {
  const Checker c(ctx, "muon");
  const int64_t rows = a.master.rows, cols = a.master.cols;
  c.acc("master", a.master, rows, cols);
  c.acc("buf", a.buf, rows, cols);
  c.acc("grad", a.grad, rows, cols);
  if (a.value) c.floating("value", a.value, rows, cols);
  c.acc("scalars", a.scalars, 1, kNumStepScalars);
  DS_ASSERT(a.work.dtype == DType::u8 && a.work.rows == 1 && a.work.cols >= muon_work(ctx, rows, cols),
            "muon: work is {} [{}, {}], expected u8 [1, >= {}]", dtype_name(a.work.dtype), a.work.rows, a.work.cols, muon_work(ctx, rows, cols));
  c.distinct({{"master", a.master}, {"buf", a.buf}, {"value", a.value}, {"work", a.work}}, {{"grad", a.grad}, {"scalars", a.scalars}});
}

// ---- decoding
// --------------------------------------------------------------------------------------------------------------

void check(const Context& ctx, const TokenProbs& a) {
  const Checker c(ctx, "token_probs");
  c.floating("logits", a.logits, a.logits.rows, a.logits.cols);
  c.acc("probs", a.probs, a.logits.rows, a.logits.cols);
  DS_ASSERT(a.params.temperature >= 0 && a.params.top_k >= 0 && a.params.top_p > 0 && a.params.min_p >= 0 &&
                a.params.min_p <= 1,
            "token_probs: temperature {}, top_k {}, top_p {}, min_p {}", a.params.temperature, a.params.top_k,
            a.params.top_p, a.params.min_p);
  c.same_or_distinct("probs", a.probs, "logits", a.logits);
}

void check(const Context& ctx, const SampleTokens& a) {
  const Checker c(ctx, "sample_tokens");
  const int64_t n = a.probs.rows;
  c.acc("probs", a.probs, n, a.probs.cols);
  DS_ASSERT(n == 0 || a.probs.cols > 0, "sample_tokens: probs of no token");
  c.i32("ids", a.ids, n);
  c.typed("uniform", a.uniform, DType::f64, n);
  if (a.map) c.i32("map", a.map, a.probs.cols);
  if (a.raw_ids) c.i32("raw_ids", a.raw_ids, n);
  c.distinct({{"ids", a.ids}, {"raw_ids", a.raw_ids}}, {{"probs", a.probs}, {"uniform", a.uniform}, {"map", a.map}});
}

void check(const Context& ctx, const VerifyBlock& a) {
  const Checker c(ctx, "verify_block");
  const int64_t n = a.draft_ids.cols, vocab = a.target_probs.cols;
  c.i32("draft_ids", a.draft_ids, n);
  c.acc("draft_probs", a.draft_probs, n, a.draft_probs.cols);
  if (a.map)
    c.i32("map", a.map, a.draft_probs.cols);
  else
    DS_ASSERT(n == 0 || a.draft_probs.cols == vocab, "verify_block: draft of {} tokens, target of {}, no map",
              a.draft_probs.cols, vocab);
  DS_ASSERT(vocab > 0, "verify_block: target_probs of no token");
  c.acc("target_probs", a.target_probs, n + 1, vocab);
  c.typed("uniform", a.uniform, DType::f64, n + 1);
  c.acc("work", a.work, 1, vocab);
  c.i32("result", a.result, 2);
  c.distinct({{"result", a.result}, {"work", a.work}}, {{"draft_ids", a.draft_ids},
                                                        {"draft_probs", a.draft_probs},
                                                        {"map", a.map},
                                                        {"target_probs", a.target_probs},
                                                        {"uniform", a.uniform}});
}

}  // namespace dspark::model
