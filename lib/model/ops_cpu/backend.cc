#include "model/ops_cpu/backend.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <cstdlib>

#include "core/error.h"
#include "model/convert.h"

namespace dspark::model::cpu {

void* allocate_block(int64_t bytes) {
  constexpr int64_t kAlign = 64, kHugePage = 2 << 20;
  const int64_t align = bytes >= 2 * kHugePage ? kHugePage : kAlign;
  const int64_t rounded = std::max(align, (bytes + align - 1) / align * align);
  void* p = std::aligned_alloc(static_cast<size_t>(align), static_cast<size_t>(rounded));
  DS_REQUIRE(p != nullptr,
             "not enough memory: the CPU backend could not get {} bytes; use fewer anchors or rows at once", rounded);
  if (align == kHugePage)
    ::madvise(p, static_cast<size_t>(rounded), MADV_HUGEPAGE);  // a wish; refusal costs only speed
  return p;
}

namespace {

const Kernels* kernels_of(Isa level) {
  switch (level) {
    case Isa::base:
      return base::kernels();
#if defined(__x86_64__)
    case Isa::avx2:
      return avx2::kernels();
    case Isa::avx512:
      return avx512::kernels();
    case Isa::avx512bf16:
      return avx512bf16::kernels();
    case Isa::amx:
      return amx::kernels();
#else
    default:
      break;
#endif
  }
  DS_ASSERT(false, "no kernels for ISA level {}", static_cast<int>(level));
}

// ---- conversions between host and device
// -------------------------------------------------------------------------------

struct Side {
  void* data;
  DType dtype;
  int64_t rows, cols, stride;
  std::byte* row(int64_t r) const { return static_cast<std::byte*>(data) + r * stride * dtype_bytes(dtype); }
};

// On comm it stays on the calling thread, beside what another one has the pool do.
void transfer(Machine& m, Queue q, const Side& dst, const Side& src) {
  DS_ASSERT(dst.rows == src.rows && dst.cols == src.cols, "a transfer of {}x{} to {}x{}", src.rows, src.cols, dst.rows,
            dst.cols);
  if (dst.cols == 0) return;  // the pointers may be null
  const auto narrow = [](DType t) { return t == DType::f32 || t == DType::bf16; };
  const auto rows = [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      void* d = dst.row(r);
      const void* s = src.row(r);
      if (dst.dtype != src.dtype && narrow(dst.dtype) && narrow(src.dtype))
        m.kernels().convert({d, dst.dtype == DType::bf16}, {s, src.dtype == DType::bf16}, dst.cols);
      else
        convert_elements(d, dst.dtype, s, src.dtype, dst.cols);
    }
  };
  if (q == Queue::comm) rows(0, dst.rows, 0);
  else m.pool().parallel_for(dst.rows, row_grain(dst.cols), rows);
}

std::vector<KernelChoice> kernel_choices(const std::vector<GemmChoice>& choices) {
  std::vector<KernelChoice> chosen;
  for (const GemmChoice& c : choices) {
    DS_ASSERT(c.form == "packed" || c.form == "tn", "a choice for products of form '{}'", c.form);
    chosen.push_back({c.form == "tn", c.type, c.n, c.k, &select_kernel(c.kernel)});
  }
  return chosen;
}

}  // namespace

// ---- machine
// -----------------------------------------------------------------------------------------------------------

Machine::Machine(const BackendOptions& options)
    : pool_(options.threads > 0 ? options.threads : usable_cores()),
      gemm_(pool_, select_kernel(options.cpu_kernel), kernel_choices(options.gemm_choices)),
      kernels_(kernels_of(gemm_.kernel().level())) {
  scratch_ = static_cast<std::byte*>(allocate_block(pool_.size() * kScratchBytes));
}

Machine::~Machine() { std::free(scratch_); }

// ---- device
// ------------------------------------------------------------------------------------------------------------

Address CpuDevice::allocate(int64_t bytes) { return BackendAccess::make(blocks_.keep(allocate_block(bytes))); }

void CpuDevice::free(Address a) { blocks_.free(BackendAccess::raw(a)); }

Event CpuDevice::upload(Queue q, const Tensor& dst, const ConstHostMatrix& src) {
  transfer(machine_, q, {BackendAccess::raw(dst.data), dst.dtype, dst.rows, dst.cols, dst.stride},
           {const_cast<void*>(src.data), src.dtype, src.rows, src.cols, src.stride});
  return {};
}

Event CpuDevice::download(Queue q, const HostMatrix& dst, const Tensor& src) {
  transfer(machine_, q, {dst.data, dst.dtype, dst.rows, dst.cols, dst.stride},
           {BackendAccess::raw(src.data), src.dtype, src.rows, src.cols, src.stride});
  return {};
}

int64_t CpuDevice::memory_bytes() const { return int64_t{::sysconf(_SC_PHYS_PAGES)} * ::sysconf(_SC_PAGESIZE); }

// ---- backend
// -----------------------------------------------------------------------------------------------------------

namespace {

class CpuBackend final : public Backend {
 public:
  explicit CpuBackend(const BackendOptions& options)
      : precision_(options.precision),
        choices_(options.gemm_choices),
        machine_(options),
        device_(machine_, options.precision == Precision::bf16 ? DType::bf16 : DType::f32),
        ops_(machine_),
        context_(ops_, device_) {}
  Context& context() override { return context_; }
  std::string describe() const override {
    return fmt::format("cpu {}, {} threads, gemm {}{}", precision_ == Precision::bf16 ? "bf16" : "fp32", machine_.threads(), kernel(),
                       choices_.empty() ? "" : fmt::format(" and a table of {} choices", choices_.size()));
  }
  std::string kernel() const override { return std::string(machine_.gemm().kernel().name()); }
  const std::vector<GemmChoice>& gemm_choices() const override { return choices_; }

 private:
  Precision precision_;
  std::vector<GemmChoice> choices_;
  Machine machine_;
  CpuDevice device_;
  CpuOps ops_;
  Context context_;
};

}  // namespace
}  // namespace dspark::model::cpu

namespace dspark::model {

std::unique_ptr<Backend> make_cpu_backend(const BackendOptions& options) {
  DS_REQUIRE(options.precision == Precision::bf16 || options.precision == Precision::fp32,
             "the cpu backend computes in bf16 or fp32; fp64 and complex numbers are the ref backend's");
  return std::make_unique<cpu::CpuBackend>(options);
}

std::vector<std::string> cpu_kernel_names() {
  std::vector<std::string> names;
  for (const cpu::Kernel* kernel : cpu::available_kernels()) names.emplace_back(kernel->name());
  return names;
}

}  // namespace dspark::model
