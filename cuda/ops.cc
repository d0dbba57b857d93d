// The operator table: from tensors to the kernels' arguments. Shapes and dtypes were checked above (model/ops_check.h).
#include <bit>

#include "core/error.h"
#include "cuda/backend.h"
#include "cuda/matrices.h"
#include "model/backend_access.h"

namespace dspark::cuda {

using namespace model;

namespace {

constexpr bool same(int a, int b) { return a == b; }
static_assert(same(kStepLr, kLr) && same(kStepGradScale, kGradScale) && same(kStepMaxNorm, kMaxNorm) && same(kStepSteps, kSteps) && same(kStepBias1, kBias1) &&
              same(kStepBias2, kBias2) && same(kStepGradNorm, kGradNorm) && same(kStepClip, kClip) && same(kStepFinite, kFinite));

constexpr int64_t kWorkspaceBytes = 32 << 20;  // what cuBLASLt may ask for

uint64_t pattern_of(DType t, double value) {
  switch (t) {
    case DType::f32: return std::bit_cast<uint32_t>(static_cast<float>(value));
    case DType::f64: return std::bit_cast<uint64_t>(value);
    case DType::bf16: return to_bf16(static_cast<float>(value)).bits;
    case DType::i32: return std::bit_cast<uint32_t>(static_cast<int32_t>(value));
    default: fail("the cuda backend has no fill of {}", dtype_name(t));
  }
}

void fill_tensor(Stream stream, const Tensor& t, double value) {
  fill(stream, BackendAccess::raw(t.data), t.rows, t.cols, t.stride, static_cast<int>(dtype_bytes(t.dtype)), pattern_of(t.dtype, value));
}

RnnGates gates(const Tensor& pre) {
  const int64_t r = pre.cols / 3;
  return {mat(pre.col_range(0, r)), mat(pre.col_range(r, r)), mat(pre.col_range(2 * r, r))};
}

}  // namespace

CudaOps::CudaOps(CudaDevice& device, const BlasApi& blas)
    : device_(device), scratch_memory_(device, kScratchBytes), workspace_(device, kWorkspaceBytes), scratch_(scratch_memory_.scratch()), blas_(blas, device, workspace_.scratch()),
      graphs_(device.driver(), device.stream(Queue::compute)) {}

CudaOps::~CudaOps() { device_.driver().cuStreamSynchronize(stream()); }

// ---- moving ----------------------------------------------------------------------------------------------------------------

void CudaOps::copy(Context&, const Copy& a) { cuda::copy(stream(), mat(a.dst), mat(a.src)); }
void CudaOps::fill(Context&, const Fill& a) { fill_tensor(stream(), a.dst, a.value); }
void CudaOps::gather_rows(Context&, const GatherRows& a) { cuda::gather_rows(stream(), mat(a.dst), mat(a.table), pointer<int32_t>(a.index)); }
void CudaOps::scatter_rows(Context&, const ScatterRows& a) { cuda::scatter_rows(stream(), mat(a.dst), mat(a.src), pointer<int32_t>(a.index)); }
void CudaOps::scatter_add_rows(Context&, const ScatterAddRows& a) {
  if (a.write == Write::overwrite) fill_tensor(stream(), a.d_table, 0);
  cuda::scatter_add_rows(stream(), mat(a.d_table), mat(a.d_rows), pointer<int32_t>(a.row_of), pointer<int32_t>(a.begin), pointer<int32_t>(a.source), a.row_of.cols);
}

// ---- products --------------------------------------------------------------------------------------------------------------

void CudaOps::linear(Context&, const Linear& a) { blas_.multiply(stream(), {mat(a.y), mat(a.x), mat(a.w->value), false, true, a.write == Write::add}); }
void CudaOps::linear_dx(Context&, const LinearDx& a) { blas_.multiply(stream(), {mat(a.dx), mat(a.dy), mat(a.w->value), false, false, a.write == Write::add}); }
void CudaOps::linear_dw(Context&, const LinearDw& a) { blas_.multiply(stream(), {mat(a.dw), mat(a.dy), mat(a.x), true, false, a.write == Write::add}); }
void CudaOps::refresh(Context&, const Refresh&) {}  // products read the canonical matrix
void CudaOps::add_bias(Context&, const AddBias& a) { cuda::add_bias(stream(), mat(a.y), mat(a.bias)); }
void CudaOps::bias_grad(Context&, const BiasGrad& a) { column_sum(stream(), mat(a.d_bias), mat(a.dy), {}, nullptr, a.write == Write::add); }

// ---- norms, rope, activation -----------------------------------------------------------------------------------------------

void CudaOps::add_rmsnorm(Context&, const AddRmsNorm& a) {
  cuda::add_rmsnorm(stream(), {mat(a.y), mat(a.x_out), mat(a.x), mat(a.delta), mat(a.weight), pointer<float>(a.inv_rms), static_cast<float>(a.eps), a.unit_offset ? 1.0f : 0.0f});
}

void CudaOps::rmsnorm_backward(Context&, const RmsNormBackward& a) {
  // d_weight first: it reads dy, whose place d_x may take.
  if (a.d_weight) column_sum(stream(), mat(a.d_weight), mat(a.dy), mat(a.x), pointer<float>(a.inv_rms), a.write_dw == Write::add);
  rmsnorm_dx(stream(), {mat(a.d_x), mat(a.dy), mat(a.x), mat(a.weight), pointer<float>(a.inv_rms), a.unit_offset ? 1.0f : 0.0f, a.write_dx == Write::add});
}

void CudaOps::qk_norm_rope(Context&, const QkNormRope& a) {
  cuda::qk_norm_rope(stream(), {mat(a.y), mat(a.x), mat(a.weight), mat(a.inv_rms), pointer<int32_t>(a.position), pointer<float>(a.rope.inv_freq), static_cast<int>(a.head_dim),
                                static_cast<int>(a.rope.rot), static_cast<float>(a.rope.scale), static_cast<float>(a.eps)});
}

void CudaOps::qk_norm_rope_backward(Context&, const QkNormRopeBackward& a) {
  cuda::qk_norm_rope_backward(stream(),
                              {mat(a.d_x), mat(a.dy), mat(a.x), mat(a.weight), mat(a.inv_rms), mat(a.d_weight), pointer<int32_t>(a.position), pointer<float>(a.rope.inv_freq),
                               static_cast<int>(a.head_dim), static_cast<int>(a.rope.rot), static_cast<float>(a.rope.scale), a.write_dw == Write::add},
                              scratch_);
}

void CudaOps::swiglu(Context&, const SwiGlu& a) {
  const int64_t f = a.y.cols;
  cuda::swiglu(stream(), mat(a.y), mat(a.gate_up.col_range(0, f)), mat(a.gate_up.col_range(f, f)));
}
void CudaOps::swiglu_backward(Context&, const SwiGluBackward& a) {
  const int64_t f = a.dy.cols;
  cuda::swiglu_backward(stream(), mat(a.d_gate_up.col_range(0, f)), mat(a.d_gate_up.col_range(f, f)), mat(a.dy), mat(a.gate_up.col_range(0, f)), mat(a.gate_up.col_range(f, f)));
}

void CudaOps::sigmoid_gate(Context&, const SigmoidGate& a) { cuda::sigmoid_gate(stream(), mat(a.y), mat(a.pre), mat(a.x)); }
void CudaOps::sigmoid_gate_backward(Context&, const SigmoidGateBackward& a) {
  cuda::sigmoid_gate_backward(stream(), mat(a.d_pre), mat(a.d_x), mat(a.dy), mat(a.pre), mat(a.x), a.write_dx == Write::add);
}
void CudaOps::rnn_cell(Context&, const RnnCell& a) { cuda::rnn_cell(stream(), mat(a.state_out), mat(a.out), gates(a.pre), mat(a.state_in)); }
void CudaOps::rnn_cell_backward(Context&, const RnnCellBackward& a) {
  cuda::rnn_cell_backward(stream(), gates(a.d_pre), mat(a.d_state_in), mat(a.d_out), mat(a.d_state_out), gates(a.pre), mat(a.state_in));
}

// ---- optimizer -------------------------------------------------------------------------------------------------------------

void CudaOps::sum_squares(Context&, const SumSquares& a) { cuda::sum_squares(stream(), pointer<float>(a.sum), mat(a.grad), scratch_); }
void CudaOps::finish_norm(Context&, const FinishNorm& a) { cuda::finish_norm(stream(), pointer<float>(a.scalars), pointer<float>(a.sums), a.sums.cols, a.beta1, a.beta2); }
void CudaOps::adamw(Context&, const AdamW& a) {
  cuda::adamw(stream(), {mat(a.master), mat(a.m), mat(a.v), mat(a.grad), mat(a.value), pointer<float>(a.scalars), a.lr_factor, a.weight_decay, static_cast<float>(a.beta1),
                         static_cast<float>(1 - a.beta1), static_cast<float>(a.beta2), static_cast<float>(1 - a.beta2), static_cast<float>(a.eps)});
}

// ---- decoding --------------------------------------------------------------------------------------------------------------

void CudaOps::cache_attention(Context&, const CacheAttention& a) {
  const auto heads = [&](const Tensor& t) { return heads_of(t, a.head_dim); };
  bool in_bf16 = true;
  for (const Tensor* t : {&a.q, &a.k_cache, &a.v_cache}) in_bf16 = in_bf16 && t->dtype == DType::bf16;
  cuda::cache_attention(stream(), {heads(a.out), heads(a.q), heads(a.k_cache), heads(a.v_cache), a.first, static_cast<int>(a.window), static_cast<int>(a.q.cols / a.head_dim),
                                   static_cast<int>(a.k_cache.cols / a.head_dim), static_cast<int>(a.head_dim), in_bf16, static_cast<float>(a.scale)},
                        scratch_);
}
void CudaOps::token_probs(Context&, const TokenProbs& a) {
  cuda::token_probs(stream(), {mat(a.probs), mat(a.logits), a.params.temperature, a.params.top_p, a.params.min_p, a.params.top_k});
}
void CudaOps::sample_tokens(Context&, const SampleTokens& a) {
  cuda::sample_tokens(stream(), pointer<int32_t>(a.ids), pointer<int32_t>(a.raw_ids), mat(a.probs), pointer<double>(a.uniform), pointer<int32_t>(a.map));
}
void CudaOps::verify_block(Context&, const VerifyBlock& a) {
  cuda::verify_block(stream(), {pointer<int32_t>(a.result), pointer<int32_t>(a.draft_ids), pointer<int32_t>(a.map), static_cast<int>(a.draft_ids.cols), mat(a.draft_probs),
                                mat(a.target_probs), pointer<double>(a.uniform), pointer<float>(a.work)});
}

}  // namespace dspark::cuda
