// The kernels' launchers: what cuda/ops.cc (the operator table) calls and the .cu files define. Nothing here needs CUDA's or the
// rest of the project's headers, so that nvcc sees as little as possible.
//
// Each only enqueues on `stream`. Shapes are checked by the operator table before; an empty matrix (data null) is an optional
// argument that is not given; nothing is launched for zero rows. What each computes: lib/model/ops.h, the operator of that name.
#pragma once

#include <cstdint>

namespace dspark::cuda {

using Stream = void*;  // CUstream

struct Matrix {
  void* data = nullptr;
  int64_t rows = 0, cols = 0;
  int64_t stride = 0;   // elements
  bool half = false;    // bf16, else fp32 (or any 4-byte type that is only moved)
  bool vector = false;  // every row starts at a multiple of 16 bytes

  constexpr explicit operator bool() const { return data != nullptr; }  // constexpr: kernels may call it too
};

// Device memory for partial sums, reused by every kernel of a stream in turn.
struct Scratch {
  void* data = nullptr;
  int64_t bytes = 0;
};
constexpr int64_t kScratchBytes = 4 << 20;

// copy.cu, fill.cu
void copy(Stream stream, Matrix dst, Matrix src);
// Every element of element_bytes (1, 2, 4, 8) becomes the low bytes of `pattern`.
void fill(Stream stream, void* data, int64_t rows, int64_t cols, int64_t stride, int element_bytes, uint64_t pattern);

// add_noise.cu: x[r, c] += amount (2 u - 1) with u = Rng(seed, stream, substream).uniform(r * cols + c) (core/rng.h): to the bit what the
// host adds to taps.
struct NoiseSeed {
  uint64_t seed = 0;
  uint32_t stream = 0;
  uint64_t substream = 0;
};
void add_noise(Stream stream, Matrix x, double amount, const NoiseSeed& seed);

// gather_rows.cu, scatter_rows.cu, scatter_add_rows.cu
void gather_rows(Stream stream, Matrix dst, Matrix table, const int32_t* index);
void scatter_rows(Stream stream, Matrix dst, Matrix src, const int32_t* index);
// Adds; the table is zeroed by `fill` before where that is asked for.
void scatter_add_rows(Stream stream, Matrix d_table, Matrix d_rows, const int32_t* row_of, const int32_t* begin, const int32_t* source, int64_t n);

// bias.cu
void add_bias(Stream stream, Matrix y, Matrix bias);
// sum[c] (+)= sum over r of a[r, c], times b[r, c] where b is given and scale[r] where scale is. fp32, in an order that depends on the rows only.
void column_sum(Stream stream, Matrix sum, Matrix a, Matrix b, const float* scale, bool add);

// add_rmsnorm.cu
struct RmsNorm {
  Matrix y, x_out, x, delta, weight;
  float* inv_rms = nullptr;
  float eps = 0, offset = 0;  // y = x inv_rms (offset + weight)
};
void add_rmsnorm(Stream stream, const RmsNorm& a);
struct RmsNormGradient {
  Matrix d_x, dy, x, weight;
  const float* inv_rms = nullptr;
  float offset = 0;
  bool add = false;
};
void rmsnorm_dx(Stream stream, const RmsNormGradient& a);

// qk_norm_rope.cu
struct HeadNormRope {
  Matrix y, x, weight, inv_rms;  // inv_rms [n, heads]
  const int32_t* position = nullptr;
  const float* inv_freq = nullptr;
  int head_dim = 0, rot = 0;
  float scale = 1, eps = 0;
};
void qk_norm_rope(Stream stream, const HeadNormRope& a);
struct HeadNormRopeGradient {
  Matrix d_x, dy, x, weight, inv_rms, d_weight;
  const int32_t* position = nullptr;
  const float* inv_freq = nullptr;
  int head_dim = 0, rot = 0;
  float scale = 1;
  bool add = false;  // to d_weight
};
void qk_norm_rope_backward(Stream stream, const HeadNormRopeGradient& a, Scratch scratch);

// swiglu.cu
void swiglu(Stream stream, Matrix y, Matrix gate, Matrix up);
void swiglu_backward(Stream stream, Matrix d_gate, Matrix d_up, Matrix dy, Matrix gate, Matrix up);

// sigmoid_gate.cu, rnn_cell.cu
void sigmoid_gate(Stream stream, Matrix y, Matrix pre, Matrix x);
void sigmoid_gate_backward(Stream stream, Matrix d_pre, Matrix d_x, Matrix dy, Matrix pre, Matrix x, bool add);
struct RnnGates {
  Matrix g, c, o;  // the thirds of one matrix
};
void rnn_cell(Stream stream, Matrix state_out, Matrix out, RnnGates pre, Matrix state_in);
void rnn_cell_backward(Stream stream, RnnGates d_pre, Matrix d_state_in, Matrix d_out, Matrix d_state_out, RnnGates pre, Matrix state_in);

// grad_norm.cu. Indices of StepScalars: model::StepScalar (cuda/ops.cc asserts that they are the same).
enum StepIndex : int { kStepLr, kStepGradScale, kStepMaxNorm, kStepSteps, kStepBias1, kStepBias2, kStepGradNorm, kStepClip, kStepFinite };
void sum_squares(Stream stream, float* sum, Matrix grad, Scratch scratch);
void finish_norm(Stream stream, float* scalars, const float* sums, int64_t n, double beta1, double beta2);

// adamw.cu
struct AdamWStep {
  Matrix master, m, v, grad, value;
  const float* scalars = nullptr;
  double lr_factor = 1, weight_decay = 0;
  float beta1 = 0, one_minus_beta1 = 0, beta2 = 0, one_minus_beta2 = 0, eps = 0;
};
void adamw(Stream stream, const AdamWStep& a);

// muon.cu: the parts of a step, in the order of cuda/muon.cc. x is [m, n], m the smaller side; the others have the weight's shape.
struct MuonStep {
  Matrix master, buf, grad, value, x;
  const float* scalars = nullptr;
  double lr_factor = 1, weight_decay = 0, size = 1;
  float keep = 0, fresh = 0;  // momentum, 1 - momentum
};
void muon_momentum(Stream stream, const MuonStep& a);
void muon_round(Stream stream, Matrix rounded, Matrix x, const float* squares);
void muon_split(Stream stream, Matrix poly, Matrix gram, float* diagonal);
void muon_poly(Stream stream, Matrix poly, Matrix gram, Matrix square, const float* diagonal, float* factor, float a, float b, float c);
void scale_rows(Stream stream, Matrix x, const float* factor);
void muon_apply(Stream stream, const MuonStep& a);

// vocab_loss.cu: the parts of a chunk, in the order of cuda/vocab_loss.cc. Columns of slot_out: model::Term and model::SlotOut.
enum LossColumn : int {
  kLossCe, kLossTv, kLossKl, kLossRkl, kLossJsd, kLossNla, kLossLk, kLossConf,
  kLossAccept, kLossConfLogit, kLossDraftTop, kLossTargetTop, kLossWeight, kLossConfWeight
};
// What is known of a row of logits; the last three of a slot's only.
struct LogitRow {
  double log_norm;     // log sum exp
  float top, inverse;  // 1 / sum exp(logit - top)
  int32_t arg, label;
  float label_logit, weight;
};
// One chunk; arrays begin at its first slot.
struct LossChunkArgs {
  Matrix draft, target;  // logits [slots, V], [rows, V]
  LogitRow *draft_rows = nullptr, *target_rows = nullptr;
  const int32_t *target_row = nullptr, *label = nullptr, *block_of = nullptr;
  const float *weight = nullptr, *conf_weight = nullptr, *scale = nullptr;
  int64_t row0 = 0;
  float* slot_out = nullptr;
  int64_t slot_stride = 0;
  Matrix conf_w, conf_w_e, joint_hidden, conf_e;  // conf_w_e, conf_e empty without Markov columns
  const float* conf_b = nullptr;
  double coef[8] = {}, dpace_alpha = 0;
  bool label_from_target = false, backward = false, half_gradient = false;
};
void loss_stats(Stream stream, Matrix logits, LogitRow* out);
void loss_labels(Stream stream, const LossChunkArgs& a);
void loss_dpace(Stream stream, const LossChunkArgs& a, bool confidence);
void loss_slots(Stream stream, const LossChunkArgs& a);
void loss_conf_logits(Stream stream, float* d_logit, const float* slot_out, int64_t slot_stride, int64_t slots, const float* scale, double coef);
// y[s] += d[s] w.
void add_outer(Stream stream, Matrix y, const float* d, Matrix w);

// anchor_attention.cu, anchor_attention_backward.cu. Matrices: heads of head_dim (at most kMaxHeadDim) columns side by side.
constexpr int kMaxHeadDim = 256;
struct AnchorArgs {
  Matrix out, lse, q, k_ctx, v_ctx, k_block, v_block;
  Matrix d_out, d_q, d_k_ctx, d_v_ctx, d_k_block, d_v_block;  // of the backward
  float* delta = nullptr;                                     // [query rows, heads]: sums of d_out * out
  const int32_t *anchor_row = nullptr, *doc_start = nullptr;
  int anchors = 0, block = 0, heads = 0, kv_heads = 0, head_dim = 0, window = 0;
  bool causal = false, by_anchor = false;
  bool in_bf16 = false;  // tensor cores in bf16; else fp32 products
  float scale = 1;
};
void anchor_attention(Stream stream, const AnchorArgs& a);
void anchor_attention_backward(Stream stream, const AnchorArgs& a);

// cache_attention.cu
struct CacheArgs {
  Matrix out, q, k, v;
  int64_t first = 0;
  int window = 0, heads = 0, kv_heads = 0, head_dim = 0;
  bool in_bf16 = false;
  float scale = 1;
};
// Partial results go to scratch where they fit and pay; what it holds changes no bit.
void cache_attention(Stream stream, const CacheArgs& a, Scratch scratch);

// token_probs.cu, sample_tokens.cu, verify_block.cu
struct ProbsArgs {
  Matrix probs, logits;
  double temperature = 1, top_p = 1, min_p = 0;
  int64_t top_k = 0;
};
void token_probs(Stream stream, const ProbsArgs& a);
void sample_tokens(Stream stream, int32_t* ids, int32_t* raw_ids, Matrix probs, const double* uniform, const int32_t* map);
struct VerifyArgs {
  int32_t* result = nullptr;
  const int32_t *draft_ids = nullptr, *map = nullptr;
  int drafted = 0;
  Matrix draft, target;
  const double* uniform = nullptr;
  float* residual = nullptr;
};
void verify_block(Stream stream, const VerifyArgs& a);

}  // namespace dspark::cuda
