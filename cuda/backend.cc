#include "cuda/backend.h"

#include <fmt/format.h>

#include <charconv>
#include <chrono>
#include <string_view>
#include <thread>

#include "core/error.h"
#include "model/backend_access.h"
#include "model/convert.h"

namespace dspark::cuda {

using model::BackendAccess;
using model::Queue;
using model::Tensor;

// A copy from memory that is not pinned holds up the host until the device comes to it: a step's batch is staged, so that the next
// step is enqueued while this one runs, and its memory is free at once. Whole weights, which are loaded once and on the compute queue,
// are not worth pinning as much again.
constexpr int64_t kMaxStagedBytes = int64_t{256} << 20;

// ---- staging ---------------------------------------------------------------------------------------------------------------

void Staging::clear() {
  for (const Buffer& b : free_) driver_.cuMemFreeHost(b.data);
  free_.clear();
}

Staging::Buffer Staging::take(int64_t bytes) {
  {
    const std::lock_guard lock(mutex_);
    for (size_t i = 0; i < free_.size(); ++i) {
      if (free_[i].bytes < bytes) continue;
      const Buffer b = free_[i];
      free_.erase(free_.begin() + static_cast<std::ptrdiff_t>(i));
      return b;
    }
  }
  Buffer b{nullptr, (bytes + 65535) / 65536 * 65536};
  check(driver_, driver_.cuMemHostAlloc(&b.data, static_cast<size_t>(b.bytes), 0), fmt::format("pin {} bytes of host memory", b.bytes));
  return b;
}

void Staging::give_back(Buffer b) {
  const std::lock_guard lock(mutex_);
  free_.push_back(b);
}

// ---- device ----------------------------------------------------------------------------------------------------------------

CudaDevice::CudaDevice(const Driver& driver, int ordinal, DType act) : driver_(driver), ordinal_(ordinal), act_(act), staging_(driver) {
  int version = 0;
  check(driver_, driver_.cuDriverGetVersion(&version), "ask for the driver's version");
  DS_REQUIRE(version >= kDriverVersion, "{}: it is for CUDA {}.{}, too old; wanted: {}", kDriverFile, version / 1000, version % 1000 / 10, kDriverWanted);
  check(driver_, driver_.cuInit(0), "start the driver");
  int count = 0, major = 0, minor = 0;
  check(driver_, driver_.cuDeviceGetCount(&count), "count GPUs");
  DS_REQUIRE(ordinal < count, "--device cuda:{}: this machine has {} usable GPU{} (CUDA_VISIBLE_DEVICES may hide some)", ordinal, count, count == 1 ? "" : "s");
  check(driver_, driver_.cuDeviceGet(&device_, ordinal), "open the GPU");
  check(driver_, driver_.cuDeviceGetAttribute(&major, kComputeMajor, device_), "ask for the GPU's architecture");
  check(driver_, driver_.cuDeviceGetAttribute(&minor, kComputeMinor, device_), "ask for the GPU's architecture");
  DS_REQUIRE(major >= 8, "cuda:{}: its architecture is sm_{}{}; sm_80 (A100) or newer is needed", ordinal, major, minor);
  check(driver_, driver_.cuDevicePrimaryCtxRetain(&context_, device_), "open the GPU's context");
  check(driver_, driver_.cuCtxSetCurrent(context_), "enter the GPU's context");
  for (void*& s : streams_) check(driver_, driver_.cuStreamCreate(&s, kStreamNonBlocking), "make a stream");
}

CudaDevice::~CudaDevice() {
  for (void* s : streams_)
    if (s != nullptr) driver_.cuStreamSynchronize(s);
  for (const Live& l : live_) driver_.cuEventDestroy_v2(l.event);
  for (void* e : idle_events_) driver_.cuEventDestroy_v2(e);
  for (void* s : streams_)
    if (s != nullptr) driver_.cuStreamDestroy_v2(s);
  staging_.clear();
  if (context_ != nullptr) driver_.cuDevicePrimaryCtxRelease_v2(device_);
}

std::string CudaDevice::name() const { return fmt::format("cuda:{}", ordinal_); }

std::string CudaDevice::architecture() const {
  int major = 0, minor = 0;
  check(driver_, driver_.cuDeviceGetAttribute(&major, kComputeMajor, device_), "ask for the GPU's architecture");
  check(driver_, driver_.cuDeviceGetAttribute(&minor, kComputeMinor, device_), "ask for the GPU's architecture");
  return fmt::format("sm_{}{}", major, minor);
}

int64_t CudaDevice::memory_bytes() const {
  size_t bytes = 0;
  check(driver_, driver_.cuDeviceTotalMem_v2(&bytes, device_), "ask for the GPU's memory");
  return static_cast<int64_t>(bytes);
}

std::string CudaDevice::describe() const {
  char text[256] = {};
  check(driver_, driver_.cuDeviceGetName(text, sizeof text - 1, device_), "ask for the GPU's name");
  return fmt::format("{}, {}, {:.1f} GiB", text, architecture(), static_cast<double>(memory_bytes()) / (1 << 30));
}

model::Address CudaDevice::allocate(int64_t bytes) {
  DS_ASSERT(bytes >= 0, "{} bytes", bytes);
  DevicePointer p = 0;
  check(driver_, driver_.cuMemAlloc_v2(&p, static_cast<size_t>(bytes > 0 ? bytes : 1)), fmt::format("get {} bytes of memory on {}; use fewer anchors or rows at once", bytes, name()));
  return BackendAccess::make(static_cast<uintptr_t>(p));
}

// Without a check, as all that ends: a GPU's fault was said by the call that met it, and comes back from every later one.
void CudaDevice::free(model::Address a) { driver_.cuMemFree_v2(reinterpret_cast<DevicePointer>(BackendAccess::raw(a))); }

namespace {

Copy2D host_to_device(const Tensor& dst, const void* src, int64_t src_stride) {
  const auto bytes = static_cast<size_t>(dtype_bytes(dst.dtype));
  Copy2D c;
  c.src_type = kHostMemory, c.src_host = src, c.src_pitch = static_cast<size_t>(src_stride) * bytes;
  c.dst_type = kDeviceMemory, c.dst_device = reinterpret_cast<DevicePointer>(BackendAccess::raw(dst.data)), c.dst_pitch = static_cast<size_t>(std::max(dst.stride, dst.cols)) * bytes;
  c.width_bytes = static_cast<size_t>(dst.cols) * bytes, c.height = static_cast<size_t>(dst.rows);
  return c;
}

Copy2D device_to_host(void* dst, int64_t dst_stride, const Tensor& src) {
  const auto bytes = static_cast<size_t>(dtype_bytes(src.dtype));
  Copy2D c;
  c.src_type = kDeviceMemory, c.src_device = reinterpret_cast<DevicePointer>(BackendAccess::raw(src.data)), c.src_pitch = static_cast<size_t>(std::max(src.stride, src.cols)) * bytes;
  c.dst_type = kHostMemory, c.dst_host = dst, c.dst_pitch = static_cast<size_t>(dst_stride) * bytes;
  c.width_bytes = static_cast<size_t>(src.cols) * bytes, c.height = static_cast<size_t>(src.rows);
  return c;
}

// What runs on the driver's thread when a staged transfer has happened.
struct AfterTransfer {
  Staging* staging;
  Staging::Buffer buffer;
  model::HostMatrix dst;  // data null after an upload
  DType src_dtype;

  static void run(void* user) {
    const std::unique_ptr<AfterTransfer> t(static_cast<AfterTransfer*>(user));
    if (t->dst.data != nullptr)
      for (int64_t r = 0; r < t->dst.rows; ++r)
        model::convert_elements(static_cast<char*>(t->dst.data) + r * t->dst.stride * dtype_bytes(t->dst.dtype), t->dst.dtype,
                                static_cast<char*>(t->buffer.data) + r * t->dst.cols * dtype_bytes(t->src_dtype), t->src_dtype, t->dst.cols);
    t->staging->give_back(t->buffer);
  }
};

}  // namespace

model::Event CudaDevice::upload(Queue q, const Tensor& dst, const model::ConstHostMatrix& src) {
  DS_ASSERT(dst.rows == src.rows && dst.cols == src.cols, "upload of [{}, {}] to [{}, {}]", src.rows, src.cols, dst.rows, dst.cols);
  if (dst.size() == 0) return record(q);
  if (q == Queue::compute && src.dtype == dst.dtype && dst.size() * dtype_bytes(dst.dtype) > kMaxStagedBytes) {
    const Copy2D c = host_to_device(dst, src.data, std::max(src.stride, src.cols));
    check(driver_, driver_.cuMemcpy2DAsync_v2(&c, stream(q)), "upload");
    return record(q);
  }
  const Staging::Buffer b = staging_.take(dst.size() * dtype_bytes(dst.dtype));
  try {
    for (int64_t r = 0; r < src.rows; ++r)
      model::convert_elements(static_cast<char*>(b.data) + r * dst.cols * dtype_bytes(dst.dtype), dst.dtype, static_cast<const char*>(src.data) + r * src.stride * dtype_bytes(src.dtype),
                              src.dtype, dst.cols);
  } catch (...) {
    staging_.give_back(b);
    throw;
  }
  const Copy2D c = host_to_device(dst, b.data, dst.cols);
  check(driver_, driver_.cuMemcpy2DAsync_v2(&c, stream(q)), "upload");
  check(driver_, driver_.cuLaunchHostFunc(stream(q), AfterTransfer::run, new AfterTransfer{&staging_, b, {}, dst.dtype}), "upload");
  return record(q);
}

model::Event CudaDevice::download(Queue q, const model::HostMatrix& dst, const Tensor& src) {
  DS_ASSERT(dst.rows == src.rows && dst.cols == src.cols, "download of [{}, {}] to [{}, {}]", src.rows, src.cols, dst.rows, dst.cols);
  if (src.size() == 0) return record(q);
  if (src.dtype == dst.dtype) {
    const Copy2D c = device_to_host(dst.data, std::max(dst.stride, dst.cols), src);
    check(driver_, driver_.cuMemcpy2DAsync_v2(&c, stream(q)), "download");
    return record(q);
  }
  const Staging::Buffer b = staging_.take(src.size() * dtype_bytes(src.dtype));
  const Copy2D c = device_to_host(b.data, src.cols, src);
  check(driver_, driver_.cuMemcpy2DAsync_v2(&c, stream(q)), "download");
  check(driver_, driver_.cuLaunchHostFunc(stream(q), AfterTransfer::run, new AfterTransfer{&staging_, b, dst, src.dtype}), "download");
  return record(q);
}

model::Event CudaDevice::record(Queue q) {
  while (!live_.empty() && driver_.cuEventQuery(live_.front().event) == kSuccess) {
    idle_events_.push_back(live_.front().event);
    live_.pop_front();
  }
  void* event = nullptr;
  if (idle_events_.empty()) {
    check(driver_, driver_.cuEventCreate(&event, kEventDisableTiming), "make an event");
  } else {
    event = idle_events_.back();
    idle_events_.pop_back();
  }
  check(driver_, driver_.cuEventRecord(event, stream(q)), "record an event");
  live_.push_back({next_id_, event});
  return {next_id_++};
}

double CudaDevice::time(const std::function<void()>& work) {
  void* events[2] = {};
  for (void*& e : events) check(driver_, driver_.cuEventCreate(&e, 0), "make an event");
  check(driver_, driver_.cuEventRecord(events[0], stream(Queue::compute)), "record an event");
  work();
  check(driver_, driver_.cuEventRecord(events[1], stream(Queue::compute)), "record an event");
  check(driver_, driver_.cuEventSynchronize(events[1]), "wait for the GPU");
  float ms = 0;
  check(driver_, driver_.cuEventElapsedTime_v2(&ms, events[0], events[1]), "measure a time");
  for (void* e : events) driver_.cuEventDestroy_v2(e);
  return 1e-3 * ms;
}

void* CudaDevice::find(model::Event e) {
  for (const Live& l : live_)
    if (l.id == e.id) return l.event;
  return nullptr;
}

void CudaDevice::wait(Queue q, model::Event e) {
  if (void* event = find(e)) check(driver_, driver_.cuStreamWaitEvent(stream(q), event, 0), "wait for an event");
}

void CudaDevice::synchronize(model::Event e) {
  void* event = find(e);
  if (event == nullptr) return;
  for (int64_t i = 0; watch_ && driver_.cuEventQuery(event) == kNotReady; ++i) {
    if (i % 32 == 31) {
      try {
        watch_();
      } catch (...) {
        driver_.cuEventSynchronize(event);  // what others left hanging has ended; what is enqueued may use memory that goes now
        throw;
      }
    }
    if (i > 1000) std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  check(driver_, driver_.cuEventSynchronize(event), "wait for the GPU");
}

// ---- backend ---------------------------------------------------------------------------------------------------------------

namespace {

class CudaBackend final : public model::Backend {
 public:
  CudaBackend(const Driver& driver, const BlasApi& blas, int ordinal, const model::BackendOptions& o)
      : precision_(o.precision), device_(driver, ordinal, o.precision == model::Precision::bf16 ? DType::bf16 : DType::f32),
        ops_(device_, blas), context_(ops_, device_) {
    take_choices(o.gemm_choices);
  }
  ~CudaBackend() override { device_.driver().cuStreamSynchronize(device_.stream(Queue::compute)); }
  model::Context& context() override { return context_; }
  const std::vector<model::GemmChoice>& gemm_choices() const override { return ops_.blas().choices(); }
  bool chooses_kernels() const override { return true; }
  void choose_kernels(const std::function<void()>& work) override { ops_.blas().measure(work); }
  void take_choices(const std::vector<model::GemmChoice>& choices) override { ops_.blas().take(choices); }
  int64_t most_head_dim() const override { return kMaxHeadDim; }
  std::string describe() const override { return fmt::format("{} {}, {}", device_.name(), precision_ == model::Precision::bf16 ? "bf16" : "fp32", device_.describe()); }

 private:
  model::Precision precision_;
  CudaDevice device_;
  CudaOps ops_;
  model::Context context_;
};

int ordinal_of(const std::string& device) {
  if (device == "cuda") return 0;
  const std::string number = device.substr(device.find(':') + 1);
  int n = -1;
  const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), n);
  if (error != std::errc() || end != number.data() + number.size() || n < 0) fail_usage("--device {}: '{}' is not the number of a GPU", device, number);
  return n;
}

}  // namespace

std::unique_ptr<model::Backend> make_backend_on(const model::BackendOptions& options, const Driver& driver, const BlasApi& blas) {
  DS_REQUIRE(options.cpu_kernel == "auto", "--cpu-kernel {}: the cuda backend has none of the CPU's", options.cpu_kernel);
  DS_REQUIRE(options.precision == model::Precision::bf16 || options.precision == model::Precision::fp32, "the cuda backend computes in bf16 or fp32; fp64 and complex numbers are the ref backend's");
  return std::make_unique<CudaBackend>(driver, blas, ordinal_of(options.device), options);
}

}  // namespace dspark::cuda
