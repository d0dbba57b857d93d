// The cuda backend: device memory, three streams and the operator table.
//
//     make_cuda_backend (register.cc)  ->  CudaBackend { Device: driver.h }  ->  CudaOps: ops.cc  ->  kernels.h: *.cu
//                                                                                              ->  blas.h: cuBLASLt
// Everything below ops.h only enqueues. Uploads, and downloads that convert, go through pinned staging memory; huge uploads and other
// downloads copy straight between the caller's memory and the device.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cuda/blas.h"
#include "cuda/driver.h"
#include "cuda/graphs.h"
#include "model/backend_access.h"
#include "model/backends.h"

namespace dspark::cuda {

// Pinned host memory for transfers, reused when its transfer has happened.
class Staging {
 public:
  explicit Staging(const Driver& driver) : driver_(driver) {}
  ~Staging() { clear(); }
  struct Buffer {
    void* data = nullptr;
    int64_t bytes = 0;
  };
  Buffer take(int64_t bytes);
  void give_back(Buffer b);  // from any thread
  void clear();

 private:
  const Driver& driver_;
  std::mutex mutex_;
  std::vector<Buffer> free_;
};

class CudaDevice final : public model::Device {
 public:
  CudaDevice(const Driver& driver, int ordinal, DType act);
  ~CudaDevice() override;
  std::string name() const override;
  DType act_dtype() const override { return act_; }
  DType acc_dtype() const override { return DType::f32; }
  model::Address allocate(int64_t bytes) override;
  void free(model::Address a) override;
  model::Event upload(model::Queue q, const model::Tensor& dst, const model::ConstHostMatrix& src) override;
  model::Event download(model::Queue q, const model::HostMatrix& dst, const model::Tensor& src) override;
  model::Event record(model::Queue q) override;
  void wait(model::Queue q, model::Event e) override;
  void synchronize(model::Event e) override;
  double time(const std::function<void()>& work) override;
  int64_t memory_bytes() const override;

  Stream stream(model::Queue q) const { return streams_[static_cast<size_t>(q)]; }
  const Driver& driver() const { return driver_; }
  void* context() const { return context_; }
  // Called now and then while the host waits for the device; what it throws ends the wait. For work that others may leave hanging.
  void set_watch(std::function<void()> watch) { watch_ = std::move(watch); }
  std::string architecture() const;  // "sm_90"
  std::string describe() const;      // "NVIDIA H200, sm_90, 139.8 GiB"

 private:
  struct Live {
    uint64_t id;
    void* event;
  };
  void* find(model::Event e);  // null when it has happened
  const Driver& driver_;
  int ordinal_, device_ = 0;
  DType act_;
  void* context_ = nullptr;
  void* streams_[model::kQueues] = {};
  Staging staging_;
  uint64_t next_id_ = 1;
  std::deque<Live> live_;            // ascending ids
  std::vector<void*> idle_events_;
  std::function<void()> watch_;
};

// Device memory that goes with its owner, also when the owner could not be made whole.
class DeviceMemory {
 public:
  DeviceMemory(CudaDevice& device, int64_t bytes) : device_(device), address_(device.allocate(bytes)), bytes_(bytes) {}
  ~DeviceMemory() { device_.free(address_); }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  Scratch scratch() const { return {model::BackendAccess::raw(address_), bytes_}; }

 private:
  CudaDevice& device_;
  model::Address address_;
  int64_t bytes_;
};

class CudaOps final : public model::Ops {
 public:
  CudaOps(CudaDevice& device, const BlasApi& blas);
  ~CudaOps() override;
#define DS_OVERRIDE(name, Args) void name(model::Context& ctx, const model::Args& a) override;
  DS_OPS(DS_OVERRIDE)
#undef DS_OVERRIDE
  Blas& blas() { return blas_; }
  const Blas& blas() const { return blas_; }

 private:
  Stream stream() const { return device_.stream(model::Queue::compute); }
  CudaDevice& device_;
  DeviceMemory scratch_memory_, workspace_;
  Scratch scratch_;
  Blas blas_;
  Graphs graphs_;
};

// On the functions given: what tests use. `options.device` is "cuda" or "cuda:N"; `gemm_choices` are what another backend's gemm_choices()
// said; `cpu_kernel` is "auto".
std::unique_ptr<model::Backend> make_backend_on(const model::BackendOptions& options, const Driver& driver, const BlasApi& blas);

}  // namespace dspark::cuda
