// The operators: everything that is ever computed on a tensor, with its full contract.
//
// Letters: DESIGN section 2 (T context rows, A anchors, B block, S supervised slots, P unique label positions, D drafter width,
// E target width, F FFN width, NH/NKV heads, HD head size, VD draft vocabulary, R Markov rank). `act` and `acc` are the
// device's dtypes (bf16|f32 and f32 on CPUs; f64 or c128 twice on the reference). Unless an operator says otherwise:
//   - a tensor marked "float" may be act or acc;  i32 tensors hold indices;
//   - outputs are overwritten; `Write::add` adds into acc tensors;
//   - outputs may not alias inputs, except where "in place" is said;
//   - sums run in a fixed order that depends on shapes only: a row's bits never depend on how many rows, documents or
//     threads are at work; two calls give the same bits;
//   - zero rows are fine and do nothing.
// Shapes and dtypes are checked at this boundary (ops_check*.cc) for every backend; a violation is a bug and aborts.
// No operator allocates: work tensors are arguments.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include "model/context.h"
#include "model/weight.h"

namespace dspark::model {

enum class Write : uint8_t { overwrite, add };

// ---- moving ----------------------------------------------------------------------------------------------------------------

// dst = src, converted. Any float dtypes; i32 -> i32.
struct Copy { Tensor dst, src; };
// dst = value.
struct Fill { Tensor dst; double value = 0; };
// dst[i] = table[index[i]] for i in [0, n); index -1 gives zeros. index: i32 [1, n].
struct GatherRows { Tensor dst, table, index; };
// dst[index[i]] = src[i]; indices distinct; other rows are untouched. index -1 is skipped.
struct ScatterRows { Tensor dst, src, index; };
// d_table[row_of[j]] (+)= sum over i in [begin[j], begin[j+1]) of d_rows[source[i]]: the gradient of GatherRows, as CSR, so that
// equal rows add up in a fixed order. row_of i32 [1, J] distinct; begin i32 [1, J+1]; source i32 [1, n]. Write::overwrite
// zeroes the whole table first. d_table acc.
struct ScatterAddRows { Tensor d_table, d_rows, row_of, begin, source; Write write = Write::add; };

// ---- products --------------------------------------------------------------------------------------------------------------

// y = x W^T (+= with add).  x [n, in] act, y [n, out] float (acc with add).
struct Linear { Tensor y, x; const Weight* w = nullptr; Write write = Write::overwrite; };
// dx = dy W.  dy [n, out] act, dx [n, in] float (acc with add). w->needs_input_gradient.
struct LinearDx { Tensor dx, dy; const Weight* w = nullptr; Write write = Write::overwrite; };
// dw = dy^T x.  dy [n, out] act, x [n, in] act, dw [out, in] acc. n = 0 with overwrite zeroes dw.
struct LinearDw { Tensor dw, dy, x; Write write = Write::overwrite; };
// Rebuilds the backend's packings after w->value changed.
struct Refresh { Weight* w = nullptr; };
// y += bias per column (y float [n, m], bias acc [1, m]).
struct AddBias { Tensor y, bias; };
// d_bias (+)= column sums of dy.  dy float [n, m], d_bias acc [1, m].
struct BiasGrad { Tensor d_bias, dy; Write write = Write::overwrite; };

// ---- norms, rope, activation -----------------------------------------------------------------------------------------------

// x_out = x (+ delta if given), y = x_out * rsqrt(mean(x_out^2) + eps) * weight (or * (1 + weight) with unit_offset).
// x acc, delta float or empty, x_out acc (may be x itself: in place; may be empty when there is no delta), y float,
// weight acc [1, D], inv_rms acc [1, n] or empty (kept for the backward).
struct AddRmsNorm { Tensor y, x_out, x, delta, weight, inv_rms; double eps = 1e-6; bool unit_offset = false; };
// Gradient of y = rmsnorm(x): d_x (+)= ..., d_weight (+)= ...; x as normalised (x_out above). dy float, d_x acc, d_weight acc
// or empty (a frozen norm).
struct RmsNormBackward { Tensor d_x, d_weight, dy, x, weight, inv_rms; Write write_dx = Write::overwrite, write_dw = Write::overwrite; bool unit_offset = false; };

// Rotary table: inv_freq acc [1, rot/2] in device memory; cos and sin are multiplied by `scale` (yarn's attention factor).
// Halves convention (NeoX): channel i pairs with i + rot/2, i < rot/2; channels >= rot pass through.
struct Rope { Tensor inv_freq; int64_t rot = 0; double scale = 1; };

// Per head of HD columns: y = rope(rmsnorm_head(x; weight), position).  x, y [n, H*HD] float (in place allowed), weight acc
// [1, HD] or empty (no norm), position i32 [1, n], inv_rms acc [n, H] or empty.  angle = position * inv_freq in fp64.
struct QkNormRope { Tensor y, x, weight, position, inv_rms; Rope rope; int64_t head_dim = 0; double eps = 1e-6; };
// dy, x, d_x [n, H*HD] float (d_x may be dy); d_weight acc [1, HD] or empty.
struct QkNormRopeBackward { Tensor d_x, d_weight, dy, x, weight, position, inv_rms; Rope rope; int64_t head_dim = 0; Write write_dw = Write::overwrite; };

// y = silu(g) * u;  gate_up [n, 2F] float = [g | u], y [n, F] float.
struct SwiGlu { Tensor y, gate_up; };
// d_gate_up [n, 2F] float from dy [n, F] float.
struct SwiGluBackward { Tensor d_gate_up, dy, gate_up; };

// The gated Markov head: y = sigmoid(pre) * x.  All float [n, R].
struct SigmoidGate { Tensor y, pre, x; };
// d_pre float [n, R] overwritten, d_x acc [n, R] (+)=.
struct SigmoidGateBackward { Tensor d_pre, d_x, dy, pre, x; Write write_dx = Write::overwrite; };
// A step of the rnn Markov head: pre = [g | c | o] float [n, 3R];
//   state_out = sigmoid(g) * state_in + (1 - sigmoid(g)) * tanh(c),  out = tanh(o).
// state_in, state_out acc [n, R]; an empty state_in is zero. out float [n, R].
struct RnnCell { Tensor state_out, out, pre, state_in; };
// d_pre float [n, 3R], d_state_in acc [n, R] (both overwritten; empty with an empty state_in) from d_out float [n, R] and
// d_state_out acc [n, R] (empty: zero).
struct RnnCellBackward { Tensor d_pre, d_state_in, d_out, d_state_out, pre, state_in; };

// ---- attention -------------------------------------------------------------------------------------------------------------

// What an anchor block may see (DESIGN 3). Row numbers are rows of the packed context.
struct AnchorRule {
  int64_t block = 0;             // B
  int64_t window = 0;            // 0: full layer (all context before the anchor, all slots of the block)
  bool causal_in_block = false;  // sliding layers: slot k sees slots j <= k with k - j < window
  bool window_by_anchor = false; // false (served): context row t of slot k needs t > r + k - window; true: t >= r - window
};

// q [A*B, NH*HD], k_ctx, v_ctx [T, NKV*HD], k_block, v_block [A*B, NKV*HD] float; out [A*B, NH*HD] float; lse acc [A*B, NH].
// anchor_row, doc_start i32 [1, A]: the anchor's row r and its document's first row; context rows visible to anchor a are
// [doc_start, r) cut by the window. An anchor whose row is -1 is padding: its rows of out are zeros, lse 0.
// scale multiplies q k^T. Anchors are sorted by row.
struct AnchorAttention { Tensor out, lse, q, k_ctx, v_ctx, k_block, v_block, anchor_row, doc_start; AnchorRule rule; int64_t head_dim = 0; double scale = 1; };
// d_q, d_k_block, d_v_block float overwritten; d_k_ctx, d_v_ctx float [T, NKV*HD] overwritten (rows nobody saw are zero).
// work: acc [1, anchor_attention_work(...)].
struct AnchorAttentionBackward {
  Tensor d_q, d_k_ctx, d_v_ctx, d_k_block, d_v_block;
  Tensor d_out, out, lse, q, k_ctx, v_ctx, k_block, v_block, anchor_row, doc_start, work;
  AnchorRule rule; int64_t head_dim = 0; double scale = 1;
};
// Elements of `work` above: [A*B, NH] row sums of d_out * out.
inline int64_t anchor_attention_work(int64_t block_rows, int64_t n_heads) { return block_rows * n_heads; }

// Causal attention over a cache: row i of q sits at position first + i and sees cache rows [max(0, first+i-window+1), first+i]
// (window 0: from 0). q, out [n, NH*HD] float; k_cache, v_cache [capacity, NKV*HD] float, rows [0, first+n) filled.
// A row's bits do not depend on n: prefill, verification and single steps agree exactly.
struct CacheAttention { Tensor out, q, k_cache, v_cache; int64_t first = 0, window = 0, head_dim = 0; double scale = 1; };

// ---- the loss head ---------------------------------------------------------------------------------------------------------

// Loss terms (DESIGN 4), in the order of coefficient and output columns.
enum Term : int { kCe, kTv, kKl, kRkl, kJsd, kNla, kLk, kConf, kNumTerms };
// Columns of slot_out after the terms; kWeight is what the terms but conf were weighted with, kConfWeight what conf was.
enum SlotOut : int { kAccept = kNumTerms, kConfLogit, kDraftTop, kTargetTop, kWeight, kConfWeight, kSlotOutCols };

// Chunks of whole anchors in position order: slots [slot0, +slots) need target rows [row0, +rows). Host-known.
struct LossChunk { int64_t slot0 = 0, slots = 0, row0 = 0, rows = 0; };

// Both vocabulary products and every loss term, chunk by chunk (DESIGN 5). For slot s with target row t = target_row[s]:
//   draft_logits = head [hidden|e]^T, target_logits = target_head y_t^T, in acc;
//   slot_out[s] = all terms (computed where their coefficient is not 0; tv, accept and the arg-max always), confidence logit,
//   arg-max of both (draft vocabulary ids);
//   loss = sum_s sum_j coef[j] * scale[j] * weight_j[s] * term_j[s], weight_j = conf_weight for kConf, else weight;
//   d_joint, d_head, d_conf_* = its gradients.
// ce is left out (0) where label is -1; with label_from_target the label is the target's arg-max instead (speculators).
// With dpace_alpha > 0 (D-PACE) weight_j is replaced by one that comes out of the forward, and detached: over the slots of one
// block in order, s = (1 - dpace_alpha) draft_prob[label] + dpace_alpha, P = their running product, weight = sum of P from this
// slot on. conf keeps conf_weight; with dpace_confidence (speculators before 0.9) its weight is D-PACE's of its own
// exp(-conf). conf = BCE(conf_logit, 1 - tv), the target detached.
// Terms that are not computed are 0 in slot_out; rows of slot_out and d_joint outside every chunk are zero.
struct VocabLoss {
  Tensor joint;        // [S, D+R] act, rows in chunk order: [hidden | e]
  const Weight* head = nullptr;         // [VD, D+R] act: [lm_head | markov_w2]
  Tensor target_state; // [P, E] act, after the final norm
  const Weight* target_head = nullptr;  // [VD, E]
  Tensor target_row, label;             // i32 [1, S]
  Tensor weight, conf_weight;           // acc [1, S]
  Tensor scale;        // acc [1, kNumTerms]: inverse denominators
  std::array<double, kNumTerms> coef{};
  bool label_from_target = false, dpace_confidence = false;
  double dpace_alpha = 0;
  Tensor block_of;     // i32 [1, S]: the slot's block, ascending; needed with dpace_alpha
  Tensor conf_w, conf_b;  // acc [1, D] or [1, D+R], [1, 1]; empty: no confidence head
  Tensor conf_e;       // act [S, R] (joint's own columns for the vanilla head) when conf_w has D+R columns; else empty
  int64_t hidden_cols = 0;              // D
  bool detach_confidence = false;       // the confidence loss stops at its own weights
  std::span<const LossChunk> chunks;    // on the host
  bool backward = true;                 // false: validation, only slot_out
  // outputs
  Tensor slot_out;     // acc [S, kSlotOutCols]
  Tensor d_joint;      // acc [S, D+R] overwritten
  Tensor d_conf_e;     // acc [S, R]: added to (d_joint's own columns for the vanilla head); empty like conf_e
  Tensor d_head;       // acc [VD, n] (+)=: the LAST n columns of the head's gradient (R: markov_w2 only; D+R: lm_head too); empty: frozen
  Write write_dw = Write::overwrite;    // for d_head, d_conf_w, d_conf_b
  Tensor d_conf_w, d_conf_b;
  Tensor work;         // u8 [1, vocab_loss_work(...)]
};
// Bytes of `work` for chunks of at most chunk_slots slots and chunk_rows target rows.
int64_t vocab_loss_work(const Context& ctx, int64_t chunk_slots, int64_t chunk_rows, int64_t vocab, int64_t joint_cols);

// ---- optimizer -------------------------------------------------------------------------------------------------------------

// Step values that live on the device, so that no step waits for the host: acc [1, kNumStepScalars].
enum StepScalar : int {
  kLr, kGradScale /* multiplies every gradient: 1/sum(w) under pooled */, kMaxNorm /* 0: no clipping */,
  kNumHostScalars,  // the host writes the ones above before a step, the device the ones below
  kSteps = kNumHostScalars /* t: steps that were applied */, kBias1 /* 1 - beta1^t */, kBias2, kGradNorm /* norm after kGradScale */, kClip,
  kFinite /* 1, or 0 if the norm is not finite */, kNumStepScalars
};

// sums[j] = sum of squares of grad j, fixed order. sums acc [1, J].
struct SumSquares { Tensor sum /* acc [1, 1] */, grad; };
// kGradNorm = kGradScale * sqrt(sum of sums in order); kClip = min(1, kMaxNorm / (kGradNorm + 1e-6)); kFinite; kSteps += kFinite, and
// kBias1 and kBias2 for the new count.
struct FinishNorm { Tensor scalars, sums; double beta1 = 0.9, beta2 = 0.999; };
// One AdamW step with decoupled decay on one tensor, fused with gradient scale, clip and the cast of the new weight:
//   g = grad * kGradScale * kClip; m = b1 m + (1-b1) g; v = b2 v + (1-b2) g^2;
//   p = p (1 - lr wd) - lr (m / kBias1) / (sqrt(v / kBias2) + eps);  value = cast(p).
// Nothing changes when kFinite is 0. master, m, v, grad acc [r, c]; value float [r, c] or empty.
struct AdamW { Tensor master, m, v, grad, value, scalars; double beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0, lr_factor = 1; };

// One Muon step on one matrix (Jordan et al. 2024): momentum, then the update made orthogonal by Newton-Schulz iterations on
// the smaller side, products with act operands and acc sums:
//   g = grad * kGradScale * kClip; buf = momentum buf + (1-momentum) g; u = (1-momentum) g + momentum buf; X = u / max(|u|_F, 1e-7),
//   transposed if r > c; `iterations` times X = a X + (b G + c G^2) X with G = X X^T, (a, b, c) = (3.4445, -4.7750, 2.0315);
//   p = p (1 - lr wd) - lr size X;  value = cast(p),  lr = kLr * lr_factor.
// Nothing changes when kFinite is 0. master, buf, grad acc [r, c]; value float [r, c] or empty; work u8 [1, muon_work(...)].
struct Muon { Tensor master, buf, grad, value, scalars, work; double size = 1, momentum = 0.95, weight_decay = 0, lr_factor = 1; int iterations = 5; };
// The usual `size`: updates as large as AdamW's (Liu et al. 2025, arXiv 2502.16982).
inline double muon_size(int64_t rows, int64_t cols) { return 0.2 * std::sqrt(static_cast<double>(std::max(rows, cols))); }
// Bytes of `work`.
int64_t muon_work(const Context& ctx, int64_t rows, int64_t cols);
inline constexpr double kMuonA = 3.4445, kMuonB = -4.7750, kMuonC = 2.0315;

// ---- decoding --------------------------------------------------------------------------------------------------------------

struct SamplingParams { double temperature = 1.0; int64_t top_k = 0; double top_p = 1.0, min_p = 0.0; };  // temperature < 1e-5: greedy (one-hot arg-max, lowest id on ties)
// probs = distribution of logits after temperature, top-k, top-p, min-p (in that order), acc [n, V] (logits float; in place allowed).
// As transformers does: top-k keeps every logit equal to the k-th; top-p keeps a token while the sum of the larger ones is below
// top_p (the largest always; among equals the lower id first); min-p keeps probabilities >= min_p times the largest.
struct TokenProbs { Tensor probs, logits; SamplingParams params; };
// ids[i] = smallest id with cumulative probs (in id order) > uniform[i] * total. ids i32 [1, n], probs acc [n, V], uniform f64 [1, n].
// With `map` (i32 [1, V], target id of each draft id) ids are mapped; raw_ids (optional) keeps the unmapped ones.
struct SampleTokens { Tensor ids, probs, uniform, map, raw_ids; };
// Token-wise rejection sampling of a proposed block (Leviathan et al. 2023). draft_ids i32 [1, n] target ids; draft_probs acc
// [n, VD] with map i32 [1, VD] or empty; target_probs acc [n+1, V]; uniform f64 [1, n+1]. For k = 0..: accept while
// uniform[k] * draft_prob < target_prob; at the first rejection sample from normalised max(0, target - draft), after n
// acceptances from target_probs[n], with uniform[n]. result i32 [1, 2] = {accepted, next token}.
struct VerifyBlock { Tensor result, draft_ids, draft_probs, map, target_probs, uniform, work /* acc [1, V] */; };

// ---- the table -------------------------------------------------------------------------------------------------------------

#define DS_OPS(X)                                                                                                            \
  X(copy, Copy) X(fill, Fill) X(gather_rows, GatherRows) X(scatter_rows, ScatterRows) X(scatter_add_rows, ScatterAddRows)    \
  X(linear, Linear) X(linear_dx, LinearDx) X(linear_dw, LinearDw) X(refresh, Refresh) X(add_bias, AddBias)                   \
  X(bias_grad, BiasGrad) X(add_rmsnorm, AddRmsNorm) X(rmsnorm_backward, RmsNormBackward) X(qk_norm_rope, QkNormRope)         \
  X(qk_norm_rope_backward, QkNormRopeBackward) X(swiglu, SwiGlu) X(swiglu_backward, SwiGluBackward)                          \
  X(sigmoid_gate, SigmoidGate) X(sigmoid_gate_backward, SigmoidGateBackward) X(rnn_cell, RnnCell) X(rnn_cell_backward, RnnCellBackward)              \
  X(anchor_attention, AnchorAttention) X(anchor_attention_backward, AnchorAttentionBackward)                                 \
  X(cache_attention, CacheAttention) X(vocab_loss, VocabLoss) X(sum_squares, SumSquares) X(finish_norm, FinishNorm)          \
  X(adamw, AdamW) X(muon, Muon) X(token_probs, TokenProbs) X(sample_tokens, SampleTokens) X(verify_block, VerifyBlock)

// A backend implements every operator; use the free functions below, which check the arguments first.
class Ops {
 public:
  virtual ~Ops() = default;
#define DS_DECLARE(name, Args) virtual void name(Context& ctx, const Args& a) = 0;
  DS_OPS(DS_DECLARE)
#undef DS_DECLARE
};

#define DS_DECLARE(name, Args) \
  void check(const Context& ctx, const Args& a); \
  inline void name(Context& ctx, const Args& a) { check(ctx, a); ctx.ops().name(ctx, a); }
DS_OPS(DS_DECLARE)
#undef DS_DECLARE

}  // namespace dspark::model
