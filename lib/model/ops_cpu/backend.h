// The CPU backend: one process, one memory, everything inline on a pool of threads.
//
// A Machine is what operators need besides their arguments: threads, the element-wise kernels of the chosen ISA level, the
// matrix products and fixed scratch memory. CpuOps has one method an operator; each lives in ops_cpu/<operator>.cc and
// splits its work over rows (or columns), never in a way that changes a sum's order. All queues are the calling thread:
// an operation has happened when its call returns, so every event is the one that has already happened.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "core/threads.h"
#include "model/backend_access.h"
#include "model/backends.h"
#include "model/ops.h"
#include "model/ops_cpu/kernels.h"

namespace dspark::model::cpu {

class Machine {
 public:
  explicit Machine(const BackendOptions& options);
  ~Machine();
  Machine(const Machine&) = delete;
  Machine& operator=(const Machine&) = delete;

  ThreadPool& pool() { return pool_; }
  int threads() const { return pool_.size(); }
  const Kernels& kernels() const { return *kernels_; }
  // Scratch memory of one thread inside parallel_for (its third argument), kScratchBytes long, 64-byte aligned; what is in
  // it ends with the operator. Operators must not allocate.
  template <typename T = float>
  T* scratch(int thread) {
    return reinterpret_cast<T*>(scratch_ + thread * kScratchBytes);
  }
  static constexpr int64_t kScratchBytes = 1 << 20;

 private:
  ThreadPool pool_;
  const Kernels* kernels_;
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

 private:
  Machine& machine_;
  DType act_;
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

// ---- helpers of operator files ---------------------------------------------------------------------------------------

// Row `r` of a float tensor as kernels take it.
inline In in_row(const Tensor& t, int64_t r) {
  const bool half = t.dtype == DType::bf16;
  return {pointer<std::byte>(t) + r * t.stride * (half ? 2 : 4), half};
}
inline Out out_row(const Tensor& t, int64_t r) {
  const bool half = t.dtype == DType::bf16;
  return {pointer<std::byte>(t) + r * t.stride * (half ? 2 : 4), half};
}
// Row `r` of a tensor whose type is fixed (acc: float, indices: int32_t).
template <typename T>
T* row(const Tensor& t, int64_t r) {
  return pointer<T>(t) + r * t.stride;
}
// Rows a thread should get at least, so that small calls stay on one thread (about 16k elements a share).
inline int64_t row_grain(int64_t cols) { return cols > 0 ? (16384 + cols - 1) / cols : 1; }

}  // namespace dspark::model::cpu
