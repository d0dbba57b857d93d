// Which kernels there are here, and which one is taken.
#include <array>
#include <cmath>

#include "core/error.h"
#include "model/cpu_kernels.h"
#include "model/ops_cpu/gemm.h"
#include "model/ops_cpu/gemm_table.h"

namespace dspark::model::cpu {
namespace {

// The tables are filled by code of their own level, so they are asked for only where that level runs.
const Kernel* kernel_of(Isa level) {
  if (!isa_supported(level)) return nullptr;
  switch (level) {
    case Isa::base: {
      static const Kernel kernel(level, base::gemm_table());
      return &kernel;
    }
#if defined(__x86_64__)
    case Isa::avx2: {
      static const Kernel kernel(level, avx2::gemm_table());
      return &kernel;
    }
    case Isa::avx512: {
      static const Kernel kernel(level, avx512::gemm_table());
      return &kernel;
    }
    case Isa::avx512bf16: {
      static const Kernel kernel(level, avx512bf16::gemm_table());
      return &kernel;
    }
    case Isa::amx: {
      static const Kernel kernel(level, amx::gemm_table());
      return &kernel;
    }
#else
    default: return nullptr;
#endif
  }
  return nullptr;
}

// Two small products against scalar sums: an instruction that computes something else (an emulator, a faulty tile set-up)
// must not reach a model. Values are small integers, so every order of summation is exact and so is bf16.
bool self_test(const Kernel& kernel) {
  constexpr int64_t kM = 17, kN = 67, kK = 75;
  ThreadPool pool(1);
  GemmContext ctx(pool, kernel);
  std::vector<float> a(kM * kK), b(kN * kK), c(kM * kN);
  const auto value = [](int64_t i) { return static_cast<float>(i * 7919 % 13 - 6); };
  std::vector<bf16> a16(a.size()), b16(b.size());
  for (size_t i = 0; i < a.size(); ++i) a16[i] = to_bf16(a[i] = value(static_cast<int64_t>(i)));
  for (size_t i = 0; i < b.size(); ++i) b16[i] = to_bf16(b[i] = value(static_cast<int64_t>(i) + 5));
  for (const bool half : {false, true}) {
    std::fill(c.begin(), c.end(), NAN);
    const DType type = half ? DType::bf16 : DType::f32;
    gemm_nt(ctx, kM, kN, kK, {half ? static_cast<const void*>(a16.data()) : a.data(), type, kK},
            {half ? static_cast<const void*>(b16.data()) : b.data(), type, kK}, {c.data(), DType::f32, kN});
    for (int64_t i = 0; i < kM; ++i)
      for (int64_t j = 0; j < kN; ++j) {
        float sum = 0;
        for (int64_t k = 0; k < kK; ++k) sum += a[static_cast<size_t>(i * kK + k)] * b[static_cast<size_t>(j * kK + k)];
        if (c[static_cast<size_t>(i * kN + j)] != sum) return false;
      }
  }
  return true;
}

// Best first. VDPBF16PS is slower than fp32 FMA on Intel's cores, so there it is left to AMX or to widening.
std::vector<Isa> preference() {
  if (cpu_is_intel()) return {Isa::amx, Isa::avx512, Isa::avx512bf16, Isa::avx2, Isa::base};
  return {Isa::amx, Isa::avx512bf16, Isa::avx512, Isa::avx2, Isa::base};
}

}  // namespace

std::vector<const Kernel*> available_kernels() {
  std::vector<const Kernel*> found;
  for (int i = 0; i < kIsaCount; ++i) {
    const Kernel* kernel = kernel_of(static_cast<Isa>(i));
    if (kernel != nullptr && self_test(*kernel)) found.push_back(kernel);
  }
  return found;
}

const Kernel& select_kernel(std::string_view name) {
  for (Isa level : preference()) {
    if (name != "auto" && name != isa_name(level)) continue;
    const Kernel* kernel = kernel_of(level);
    if (kernel != nullptr && self_test(*kernel)) return *kernel;
  }
  std::string names;
  for (const Kernel* kernel : available_kernels()) names.append(names.empty() ? "" : ", ").append(kernel->name());
  bool known = name == "auto";
  for (int i = 0; i < kIsaCount; ++i) known = known || name == isa_name(static_cast<Isa>(i));
  fail("CPU kernel '{}' {} on {}; available: auto, {}", name, known ? "is not available" : "does not exist",
       cpu_model_name(), names);
}

std::string kernel_reason(const Kernel& kernel) {
  switch (kernel.level()) {
    case Isa::amx: return "AMX tiles: the fastest bf16 products there are on a CPU";
    case Isa::avx512bf16:
      return cpu_is_intel() ? "VDPBF16PS (slower than fp32 FMA on Intel's cores)" : "VDPBF16PS: bf16 at twice the fp32 rate";
    case Isa::avx512:
      return cpu_is_intel() ? "AVX-512 FMA, bf16 widened: faster than VDPBF16PS on Intel's cores"
                            : "AVX-512 FMA, bf16 widened";
    case Isa::avx2: return "AVX2 FMA, bf16 widened";
    case Isa::base: return "portable code: this CPU has none of the levels above";
  }
  return "";
}

}  // namespace dspark::model::cpu

namespace dspark::model {

std::vector<std::string> all_cpu_kernel_names() {
  std::vector<std::string> names;
  for (int i = 0; i < cpu::kIsaCount; ++i) names.emplace_back(cpu::isa_name(static_cast<cpu::Isa>(i)));
  return names;
}

}  // namespace dspark::model
