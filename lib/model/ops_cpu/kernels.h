// The element-wise hot loops: plain functions on plain pointers, compiled once an ISA level (isa/*.cc, namespace
// DS_ISA) and collected into a table of function pointers that the backend picks once.
//
// A kernel works on one row (or one run of elements); operators (ops_cpu/<operator>.cc) walk rows and threads around
// it. Sums inside a kernel use 16 interleaved partial sums in a fixed order, so a row's bits depend on its length only.
// Included by the kernel sources too, so: no std types, no inline code.
//
// To add a kernel: one line in DS_KERNELS, its definition in a file under isa/ (inside namespace DS_ISA).
#pragma once

#include "model/ops_cpu/attention_kernels.h"
#include "model/ops_cpu/kernel_types.h"
#include "model/ops_cpu/loss_kernels.h"

namespace dspark::model::cpu {

// How one row of qk_norm_rope is laid out. cos and sin (the rope's scale included) have rot / 2 values.
struct HeadRow {
  int64_t heads, head_dim, rot;  // head_dim <= kMaxHeadDim
  const float* cos;
  const float* sin;
  const float* weight;  // [head_dim]; null: no norm
};
inline constexpr int64_t kMaxHeadDim = 1024;

// Columns a column-sum kernel takes at most.
inline constexpr int64_t kColumnBlock = 128;

struct AdamWStep {
  float grad_scale;  // kGradScale * kClip
  float beta1, one_minus_beta1, beta2, one_minus_beta2;
  float decay;  // lr wd
  float lr, bias1, bias2, eps;
};

// Muon's update of an element: fresh * (grad * scale) + keep * buf, with the buffer already moved.
struct MuonMomentum {
  float keep, fresh, scale;
};

// X(result, name, parameters)
#define DS_KERNELS(X)                                                                                                 \
  /* dst = src, converted */                                                                                          \
  X(void, convert, (Out dst, In src, int64_t n))                                                                      \
  /* dst += src */                                                                                                    \
  X(void, accumulate, (Out dst, In src, int64_t n))                                                                   \
  /* x_out = x (+ delta; its p may be null), y = x_out * inv_rms * (offset + weight); returns inv_rms. x_out: null, x \
     itself or elsewhere */                                                                                           \
  X(float, rmsnorm,                                                                                                   \
    (Out y, float* x_out, const float* x, In delta, const float* weight, float offset, int64_t n, float eps))         \
  /* d_x (+)= gradient through y = x * inv_rms * (offset + weight) */                                                 \
  X(void, rmsnorm_dx,                                                                                                 \
    (float* d_x, In dy, const float* x, const float* weight, float offset, float inv_rms, int64_t n, int add))        \
  /* out[c] (+)= sum over rows of dy[r, c], or of dy[r, c] * x[r, c] * scale[r] with x; cols <= kColumnBlock */       \
  X(void, column_sum,                                                                                                 \
    (float* out, In dy, int64_t dy_stride, const float* x, int64_t x_stride, const float* scale, int64_t rows,        \
     int64_t cols, int add))                                                                                          \
  /* cos and sin of position * inv_freq (the product and its reduction in fp64), times scale */                       \
  X(void, rope_angles, (float* cos, float* sin, const float* inv_freq, int64_t n, double position, double scale))     \
  /* y = rope(rmsnorm_head(x)); y may be x; inv_rms [heads] or null */                                                \
  X(void, head_norm_rope, (Out y, In x, const HeadRow& h, float eps, float* inv_rms))                                 \
  /* its gradient; d_x may be dy; d_weight[head_dim] += (or null) */                                                  \
  X(void, head_norm_rope_backward, (Out d_x, float* d_weight, In dy, In x, const HeadRow& h, const float* inv_rms))   \
  /* y = silu(gate) * up */                                                                                           \
  X(void, swiglu, (Out y, In gate, In up, int64_t n))                                                                 \
  X(void, swiglu_backward, (Out d_gate, Out d_up, In dy, In gate, In up, int64_t n))                                  \
  X(float, sum_squares, (const float* x, int64_t n))                                                                  \
  X(float, row_max, (In x, int64_t n))                                                                                \
  /* out = exp((x - max) * inv_temperature), the argument in fp64 */                                                  \
  X(void, tempered_exp, (float* out, In x, float max, double inv_temperature, int64_t n))                             \
  /* value: cast of the new master, or p null */                                                                      \
  X(void, adamw, (float* master, float* m, float* v, const float* grad, Out value, int64_t n, const AdamWStep& s))    \
  /* buf = keep * buf + fresh * (grad * scale); returns the sum of the updates' squares */                            \
  X(float, muon_momentum, (float* buf, const float* grad, int64_t n, const MuonMomentum& m))                          \
  /* x = factor * update */                                                                                           \
  X(void, muon_update, (float* x, const float* grad, const float* buf, float factor, int64_t n, const MuonMomentum& m)) \
  /* s = b * g + c * (s + (d + diagonal) * g) */                                                                      \
  X(void, muon_polynomial, (float* s, const float* g, const float* diagonal, float d, float b, float c, int64_t n))   \
  X(void, scale, (float* y, float a, int64_t n))                                                                      \
  /* y -= decay * y + size * x */                                                                                     \
  X(void, decayed_step, (float* y, const float* x, float decay, float size, int64_t n))                               \
  DS_ATTENTION_KERNELS(X) DS_LOSS_KERNELS(X)

struct Kernels {
#define DS_FIELD(result, name, params) result(*name) params;
  DS_KERNELS(DS_FIELD)
#undef DS_FIELD
};

// The table of one level, by the names CMakeLists.txt gives them.
#define DS_DECLARE_KERNELS(level) \
  namespace level {               \
  const Kernels* kernels();       \
  }
DS_DECLARE_KERNELS(base)
#if defined(__x86_64__)
DS_DECLARE_KERNELS(avx2)
DS_DECLARE_KERNELS(avx512)
DS_DECLARE_KERNELS(avx512bf16)
DS_DECLARE_KERNELS(amx)
#endif
#undef DS_DECLARE_KERNELS

#ifdef DS_ISA
namespace DS_ISA {
#define DS_PROTOTYPE(result, name, params) result name params;
DS_KERNELS(DS_PROTOTYPE)
#undef DS_PROTOTYPE
}  // namespace DS_ISA
#endif

}  // namespace dspark::model::cpu
