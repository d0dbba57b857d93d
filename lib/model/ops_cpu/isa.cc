#include "model/ops_cpu/isa.h"

#include <array>
#include <cstdint>
#include <fstream>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace dspark::model::cpu {
namespace {

constexpr std::array<std::string_view, kIsaCount> kNames = {"base", "avx2", "avx512", "avx512bf16", "amx"};

#if defined(__x86_64__)
struct CpuId {
  uint32_t a = 0, b = 0, c = 0, d = 0;
};

CpuId cpuid(uint32_t leaf, uint32_t subleaf = 0) {
  CpuId r;
  if (__get_cpuid_count(leaf, subleaf, &r.a, &r.b, &r.c, &r.d) == 0) return {};
  return r;
}

// Which register states the operating system saves (XCR0); instructions whose registers it does not save must not be used.
uint64_t saved_states() {
  if ((cpuid(1).c >> 27 & 1) == 0) return 0;  // OSXSAVE
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return static_cast<uint64_t>(high) << 32 | low;
}

bool has(uint32_t reg, std::initializer_list<int> bits) {
  for (int bit : bits)
    if ((reg >> bit & 1) == 0) return false;
  return true;
}

bool amx_permitted() {
  constexpr int kReqXcompPerm = 0x1023, kXtileData = 18;  // <asm/prctl.h>, Linux 5.16
  return syscall(SYS_arch_prctl, kReqXcompPerm, kXtileData) == 0;
}
#endif

}  // namespace

std::string_view isa_name(Isa level) { return kNames[static_cast<size_t>(level)]; }

bool isa_supported(Isa level) {
  if (level == Isa::base) return true;
#if defined(__x86_64__)
  constexpr uint64_t kAvxState = 0x6, kAvx512State = 0xe6, kTileState = 0x60000;
  const uint64_t saved = saved_states();
  const CpuId one = cpuid(1), seven = cpuid(7), seven1 = cpuid(7, 1), extended = cpuid(0x80000001);
  // x86-64-v3: AVX, FMA, F16C, MOVBE; BMI1, AVX2, BMI2; LZCNT.
  const bool v3 = (saved & kAvxState) == kAvxState && has(one.c, {12, 22, 28, 29}) && has(seven.b, {3, 5, 8}) &&
                  has(extended.c, {5});
  if (level == Isa::avx2) return v3;
  // x86-64-v4: AVX-512 F, DQ, CD, BW, VL.
  const bool v4 = v3 && (saved & kAvx512State) == kAvx512State && has(seven.b, {16, 17, 28, 30, 31});
  if (level == Isa::avx512) return v4;
  const bool dot = v4 && has(seven1.a, {5});
  if (level == Isa::avx512bf16) return dot;
  return dot && (saved & kTileState) == kTileState && has(seven.d, {22, 24}) && amx_permitted();
#else
  return false;
#endif
}

bool cpu_is_intel() {
#if defined(__x86_64__)
  const CpuId vendor = cpuid(0);
  return vendor.b == signature_INTEL_ebx && vendor.c == signature_INTEL_ecx && vendor.d == signature_INTEL_edx;
#else
  return false;
#endif
}

std::string cpu_model_name() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    const size_t colon = line.find(": ");
    if (line.rfind("model name", 0) == 0 && colon != std::string::npos) return line.substr(colon + 2);
  }
  return "unknown CPU";
}

}  // namespace dspark::model::cpu
