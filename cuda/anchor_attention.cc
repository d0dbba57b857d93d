// The operators of anchor attention: from tensors to the kernels' arguments.
#include "cuda/backend.h"
#include "cuda/matrices.h"

namespace dspark::cuda {

using namespace model;

namespace {

// What both directions have in common.
template <typename A>
AnchorArgs arguments(const A& a) {
  const auto heads = [&](const Tensor& t) { return heads_of(t, a.head_dim); };
  AnchorArgs k;
  k.out = heads(a.out), k.lse = mat(a.lse), k.q = heads(a.q), k.k_ctx = heads(a.k_ctx), k.v_ctx = heads(a.v_ctx);
  k.k_block = heads(a.k_block), k.v_block = heads(a.v_block);
  k.anchor_row = pointer<int32_t>(a.anchor_row), k.doc_start = pointer<int32_t>(a.doc_start);
  k.anchors = static_cast<int>(a.anchor_row.cols), k.block = static_cast<int>(a.rule.block), k.window = static_cast<int>(a.rule.window);
  k.head_dim = static_cast<int>(a.head_dim), k.heads = static_cast<int>(a.q.cols / a.head_dim), k.kv_heads = static_cast<int>(a.k_ctx.cols / a.head_dim);
  k.causal = a.rule.causal_in_block, k.by_anchor = a.rule.window_by_anchor, k.scale = static_cast<float>(a.scale);
  k.in_bf16 = true;
  for (const Tensor* t : {&a.q, &a.k_ctx, &a.v_ctx, &a.k_block, &a.v_block}) k.in_bf16 = k.in_bf16 && t->dtype == DType::bf16;
  return k;
}

}  // namespace

void CudaOps::anchor_attention(Context&, const AnchorAttention& a) { cuda::anchor_attention(stream(), arguments(a)); }

void CudaOps::anchor_attention_backward(Context&, const AnchorAttentionBackward& a) {
  AnchorArgs k = arguments(a);
  const auto heads = [&](const Tensor& t) { return heads_of(t, a.head_dim); };
  k.d_out = heads(a.d_out), k.d_q = heads(a.d_q), k.d_k_ctx = heads(a.d_k_ctx), k.d_v_ctx = heads(a.d_v_ctx);
  k.d_k_block = heads(a.d_k_block), k.d_v_block = heads(a.d_v_block);
  k.delta = pointer<float>(a.work);
  k.in_bf16 = k.in_bf16 && a.d_out.dtype == DType::bf16;
  cuda::anchor_attention_backward(stream(), k);
}

}  // namespace dspark::cuda
