// The element-wise hot loops: plain functions on plain pointers, compiled once an ISA level (isa/*.cc, namespace DS_ISA) and
// collected into a table of function pointers that the backend picks once.
//
// A kernel works on one row (or one run of elements); operators (ops_cpu/<operator>.cc) walk rows and threads around it.
// Sums inside a kernel use 16 interleaved partial sums in a fixed order, so a row's bits depend on its length only.
// Included by the kernel sources too, so: no std types, no inline code.
//
// To add a kernel: one line in DS_KERNELS, its definition in a file under isa/ (inside namespace DS_ISA).
#pragma once

#include "model/ops_cpu/attention_kernels.h"
#include "model/ops_cpu/kernel_types.h"

namespace dspark::model::cpu {

// How one row of qk_norm_rope is laid out; cos and sin (scale included) have rot / 2 values.
struct HeadRow {
  int64_t heads, head_dim, rot;
  const float* cos;
  const float* sin;
  const float* weight;  // [head_dim], null: no norm
  float eps;
};

// X(result, name, parameters)
#define DS_KERNELS(X)                                                                                                  \
  /* dst = src, converted */                                                                                           \
  X(void, convert, (Out dst, In src, int64_t n))                                                                      \
  DS_ATTENTION_KERNELS(X)

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
