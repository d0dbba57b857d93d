// The CPU backend: one process, one memory, everything inline on a pool of threads.
//
// A Machine is what operators need besides their arguments: threads, the element-wise kernels of the chosen ISA level,
// the matrix products and fixed scratch memory. CpuOps has one method an operator; each lives in ops_cpu/<operator>.cc
// and splits its work over rows (or columns), never in a way that changes a sum's order. All queues are the calling
// thread: an operation has happened when its call returns, so every event is the one that has already happened.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <memory>
#include <string>

#include "core/threads.h"
#include "model/backend_access.h"
#include "model/backends.h"
#include "model/host_blocks.h"
#include "model/ops.h"
#include "model/ops_cpu/gemm.h"
#include "model/ops_cpu/kernels.h"

namespace dspark::model::cpu {

// 64-byte aligned memory (2 MiB, in huge pages where the system has them, for big blocks); throws; std::free frees it.
void* allocate_block(int64_t bytes);

class Machine {
 public:
  explicit Machine(const BackendOptions& options);
  ~Machine();
  Machine(const Machine&) = delete;
  Machine& operator=(const Machine&) = delete;

  ThreadPool& pool() { return pool_; }
  int threads() const { return pool_.size(); }
  const Kernels& kernels() const { return *kernels_; }
  GemmContext& gemm() { return gemm_; }
  const GemmContext& gemm() const { return gemm_; }
  // Scratch memory of one thread inside parallel_for (its third argument), kScratchBytes long, 64-byte aligned; what is
  // in it ends with the operator. Operators must not allocate. Untouched pages cost nothing.
  template <typename T = float>
  T* scratch(int thread) {
    return reinterpret_cast<T*>(scratch_ + thread * kScratchBytes);
  }
  static constexpr int64_t kScratchBytes = 4 << 20;

 private:
  ThreadPool pool_;
  GemmContext gemm_;
  const Kernels* kernels_;  // of the same ISA level
  std::byte* scratch_;
};

class CpuDevice final : public Device {
 public:
  CpuDevice(Machine& machine, DType act) : machine_(machine), act_(act) {}
  std::string name() const override { return "cpu"; }
  DType act_dtype() const override { return act_; }
  DType acc_dtype() const override { return DType::f32; }
  Address allocate(int64_t bytes) override;
  void free(Address a) override;
  Event upload(Queue q, const Tensor& dst, const ConstHostMatrix& src) override;
  Event download(Queue q, const HostMatrix& dst, const Tensor& src) override;
  Event record(Queue) override { return {}; }
  void wait(Queue, Event) override {}
  void synchronize(Event) override {}
  int64_t memory_bytes() const override;

 private:
  Machine& machine_;
  DType act_;
  HostBlocks blocks_;
};

class CpuOps final : public Ops {
 public:
  explicit CpuOps(Machine& machine) : m_(machine) {}
#define DS_OVERRIDE(name, Args) void name(Context& ctx, const Args& a) override;
  DS_OPS(DS_OVERRIDE)
#undef DS_OVERRIDE

 private:
  Machine& m_;
};

// Packings of one weight for the kernel in use; built by `refresh`.
class CpuPacking final : public WeightPacking {
 public:
  // W as B of y = x W^T, and of dx = dy W. `backward.data` is null unless the weight needs input gradients and is not very large.
  PackedB forward, backward;
  // 64-byte aligned memory behind them, kept from one refresh to the next.
  void* memory(int which, int64_t bytes);
  ~CpuPacking() override;

 private:
  void* memory_[2] = {};
};
// The weight's packing; aborts when `refresh` was forgotten.
const CpuPacking& packing(const Weight& w);
// dx [rows, in] (+)= dy [rows, out] W, whether or not it was packed for that.
void input_gradient(Machine& m, int64_t rows, const Weight& w, MatRef dy, MatOut dx, bool add);

// ---- helpers of operator files
// ---------------------------------------------------------------------------------------

// Row `r` of a float tensor from column `c` on, as kernels take it.
inline In in_row(const Tensor& t, int64_t r, int64_t c = 0) {
  const bool half = t.dtype == DType::bf16;
  return {pointer<std::byte>(t) + (r * t.stride + c) * (half ? 2 : 4), half};
}
inline Out out_row(const Tensor& t, int64_t r, int64_t c = 0) {
  const bool half = t.dtype == DType::bf16;
  return {pointer<std::byte>(t) + (r * t.stride + c) * (half ? 2 : 4), half};
}
inline MatRef mat(const Tensor& t) { return {BackendAccess::raw(t.data), t.dtype, t.stride}; }
inline MatOut mat_out(const Tensor& t) { return {BackendAccess::raw(t.data), t.dtype, t.stride}; }
// Row `r` of a tensor whose type is fixed (acc: float, indices: int32_t).
template <typename T>
T* row(const Tensor& t, int64_t r) {
  return pointer<T>(t) + r * t.stride;
}
// One element of a float tensor, for operators that are too small to need kernels of their own.
inline float load(const Tensor& t, int64_t r, int64_t c) {
  return t.dtype == DType::bf16 ? to_float(row<bf16>(t, r)[c]) : row<float>(t, r)[c];
}
inline void store(const Tensor& t, int64_t r, int64_t c, float v) {
  if (t.dtype == DType::bf16) row<bf16>(t, r)[c] = to_bf16(v);
  else row<float>(t, r)[c] = v;
}
inline float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }
// Rows a thread should get at least, so that small calls stay on one thread (about 16k elements a share).
inline int64_t row_grain(int64_t cols) { return cols > 0 ? (16384 + cols - 1) / cols : 1; }

// body(row, first column, columns) over pieces of a matrix, for operators whose elements are independent of each other.
template <typename Body>
void for_pieces(Machine& m, int64_t rows, int64_t cols, const Body& body) {
  constexpr int64_t kPiece = 16384;
  const int64_t per_row = (cols + kPiece - 1) / kPiece;
  m.pool().parallel_for(rows * per_row, row_grain(std::min(cols, kPiece)), [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t c = i % per_row * kPiece;
      body(i / per_row, c, std::min(kPiece, cols - c));
    }
  });
}

}  // namespace dspark::model::cpu
