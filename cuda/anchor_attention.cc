// The operators of anchor attention: from tensors to the kernels' arguments.
#include "cuda/backend.h"
#include "cuda/matrices.h"

namespace dspark::cuda {

using namespace model;

namespace {

// What both directions have in common. 16-byte accesses need heads that begin at multiples of 16 bytes.
template <typename A>
AnchorArgs arguments(const A& a) {
  DS_REQUIRE(a.head_dim <= kMaxHeadDim, "the cuda backend has anchor attention for heads of up to {} columns, not {}; use --device cpu", kMaxHeadDim, a.head_dim);
  const auto heads_of = [&](const Tensor& t) {
    Matrix m = mat(t);
    m.vector = m.vector && a.head_dim % 8 == 0;
    return m;
  };
  AnchorArgs k;
  k.out = heads_of(a.out), k.lse = mat(a.lse), k.q = heads_of(a.q), k.k_ctx = heads_of(a.k_ctx), k.v_ctx = heads_of(a.v_ctx);
  k.k_block = heads_of(a.k_block), k.v_block = heads_of(a.v_block);
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
  const auto heads_of = [&](const Tensor& t) {
    Matrix m = mat(t);
    m.vector = m.vector && a.head_dim % 8 == 0;
    return m;
  };
  k.d_out = heads_of(a.d_out), k.d_q = heads_of(a.d_q), k.d_k_ctx = heads_of(a.d_k_ctx), k.d_v_ctx = heads_of(a.d_v_ctx);
  k.d_k_block = heads_of(a.d_k_block), k.d_v_block = heads_of(a.d_v_block);
  k.delta = pointer<float>(a.work);
  k.in_bf16 = k.in_bf16 && a.d_out.dtype == DType::bf16;
  cuda::anchor_attention_backward(stream(), k);
}

}  // namespace dspark::cuda
