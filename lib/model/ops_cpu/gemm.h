// Matrix products of the cpu backend: C = A B (+ C) with fp32 accumulation, on raw row-major memory.
//
// A `Kernel` is one ISA level's set of tile products, tested on this CPU before it can be had. A `GemmContext` binds it to
// a thread pool and owns the threads' scratch memory; calls on one context must not overlap. Weights that are used often
// are packed once (`pack_b_*`) into memory of the caller's and used through a `PackedB`.
//
// Bits. Every element of C is computed by the same sequence of operations whatever M and N are, wherever the element lies
// and however many threads run: K is walked in blocks that depend on K and the kernel only. Packed and unpacked B give the
// same bits. Kernels differ from each other in bits.
//
// Types. f32 x f32 and bf16 x bf16 are what the kernels are made for. With f32 A and bf16 B, `avx512bf16` and `amx` round A
// to bf16, the others widen B (both are exact products otherwise); with bf16 A and f32 B, A is widened.
// VDPBF16PS and AMX treat denormals as zero. C is f32 or bf16 (rounded once, to nearest even); `add` needs an f32 C.
//
// Nothing is allocated in a call. C must not overlap A or B.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/dtype.h"
#include "core/threads.h"
#include "model/ops_cpu/isa.h"

namespace dspark::model::cpu {

struct GemmTable;

class Kernel {
 public:
  Kernel(Isa level, const GemmTable* table) : level_(level), table_(table) {}
  Isa level() const { return level_; }
  std::string_view name() const { return isa_name(level_); }
  const GemmTable& table() const { return *table_; }

 private:
  Isa level_;
  const GemmTable* table_;
};

// The kernels that this CPU runs and whose self-test passed here, slowest level first.
std::vector<const Kernel*> available_kernels();
// By name, or "auto": the best one for this CPU and vendor. An unknown or unavailable name is an Error that lists the ones
// there are. Runs the self-test of the kernel it returns (about a millisecond).
const Kernel& select_kernel(std::string_view name);
// Why "auto" takes what it takes, in words for `bench gemm` and the run's record.
std::string kernel_reason(const Kernel& kernel);

struct MatRef {
  const void* data = nullptr;
  DType dtype = DType::f32;  // f32 or bf16
  int64_t stride = 0;        // elements from row to row
};
struct MatOut {
  void* data = nullptr;
  DType dtype = DType::f32;
  int64_t stride = 0;
};

// B [K, N] in panels of the kernel that packed it. A view: the caller owns the memory, 64-byte aligned.
struct PackedB {
  const void* data = nullptr;
  DType dtype = DType::f32;
  int64_t n = 0, k = 0;
  const Kernel* kernel = nullptr;
  int64_t panel_k = 0;  // rows of a panel, padding too
};

// An exception from the context's kernel: products with a weight B [k, n], or gradients (gemm_tn) of a weight of n columns.
struct KernelChoice {
  bool gradient = false;
  DType dtype = DType::f32;  // of B
  int64_t n = 0, k = 0;      // k is not looked at for gradients
  const Kernel* kernel = nullptr;
};

class GemmContext {
 public:
  GemmContext(ThreadPool& pool, const Kernel& kernel, std::vector<KernelChoice> choices = {});
  ~GemmContext();
  GemmContext(const GemmContext&) = delete;
  GemmContext& operator=(const GemmContext&) = delete;

  ThreadPool& pool() const { return pool_; }
  const Kernel& kernel() const { return kernel_; }
  // By shape alone, never by rows.
  const Kernel& kernel_of_weight(DType dtype, int64_t n, int64_t k) const;
  const Kernel& kernel_of_gradient(DType dtype, int64_t n) const;
  // Used by the driver: 64-byte aligned, one per thread.
  struct Scratch {
    void* a;
    void* b;
    float* c;
  };
  Scratch scratch(int thread) const;

 private:
  ThreadPool& pool_;
  const Kernel& kernel_;
  std::vector<KernelChoice> choices_;
  std::unique_ptr<std::byte[]> memory_;
};

int64_t packed_b_bytes(const Kernel& kernel, DType dtype, int64_t n, int64_t k);
// From W [N, K] (for C = A W^T) or from W [K, N] (for C = A W; an input gradient with W as it is stored).
PackedB pack_b_nt(GemmContext& ctx, int64_t n, int64_t k, MatRef w, void* memory);
PackedB pack_b_nn(GemmContext& ctx, int64_t n, int64_t k, MatRef w, void* memory);
// The first k rows of a packed B; without data where a panel cannot be cut there.
PackedB packed_prefix(const PackedB& b, int64_t k);

// C [M, N] (+)= A [M, K] B [N, K]^T
void gemm_nt(GemmContext& ctx, int64_t m, int64_t n, int64_t k, MatRef a, MatRef b, MatOut c, bool add = false);
// C [M, N] (+)= A [M, K] B [K, N]
void gemm_nn(GemmContext& ctx, int64_t m, int64_t n, int64_t k, MatRef a, MatRef b, MatOut c, bool add = false);
// The same with B a weight that was not packed: the bits of gemm_packed on pack_b_nn's packing.
void gemm_weight_nn(GemmContext& ctx, int64_t m, int64_t n, int64_t k, MatRef a, MatRef b, MatOut c, bool add = false);
// C [M, N] (+)= A [K, M]^T B [K, N]: weight gradients, K = rows
void gemm_tn(GemmContext& ctx, int64_t m, int64_t n, int64_t k, MatRef a, MatRef b, MatOut c, bool add = false);
// C [M, N] (+)= A [M, K] B, B packed; by the kernel that it was packed for
void gemm_packed(GemmContext& ctx, int64_t m, int64_t n, int64_t k, MatRef a, const PackedB& b, MatOut c,
                 bool add = false);

}  // namespace dspark::model::cpu
