// Operators that are not written yet. Each line goes when its operator comes; the file goes with the last.
#include "core/error.h"
#include "model/ops_cpu/backend.h"

namespace dspark::model::cpu {

#define DS_PENDING(name, Args) \
  void CpuOps::name(Context&, const Args&) { DS_ASSERT(false, "cpu: " #name " is not written yet"); }
DS_PENDING(vocab_loss, VocabLoss)
DS_PENDING(copy, Copy)
DS_PENDING(fill, Fill)
DS_PENDING(gather_rows, GatherRows)
DS_PENDING(scatter_rows, ScatterRows)
DS_PENDING(scatter_add_rows, ScatterAddRows)
DS_PENDING(linear, Linear)
DS_PENDING(linear_dx, LinearDx)
DS_PENDING(linear_dw, LinearDw)
DS_PENDING(refresh, Refresh)
DS_PENDING(add_bias, AddBias)
DS_PENDING(bias_grad, BiasGrad)
DS_PENDING(add_rmsnorm, AddRmsNorm)
DS_PENDING(rmsnorm_backward, RmsNormBackward)
DS_PENDING(qk_norm_rope, QkNormRope)
DS_PENDING(qk_norm_rope_backward, QkNormRopeBackward)
DS_PENDING(swiglu, SwiGlu)
DS_PENDING(swiglu_backward, SwiGluBackward)
DS_PENDING(sum_squares, SumSquares)
DS_PENDING(finish_norm, FinishNorm)
DS_PENDING(adamw, AdamW)
DS_PENDING(token_probs, TokenProbs)
DS_PENDING(sample_tokens, SampleTokens)
DS_PENDING(verify_block, VerifyBlock)
#undef DS_PENDING

}  // namespace dspark::model::cpu
