// The instruction-set levels that the kernel sources under isa/ are compiled for, and what this CPU offers.
//
// Levels are not a simple order of speed: on Intel VDPBF16PS is slower than fp32 FMA, so `avx512bf16` is a level that an
// Intel CPU has and that is not chosen there.
#pragma once

#include <string>
#include <string_view>

namespace dspark::model::cpu {

enum class Isa : int { base = 0, avx2, avx512, avx512bf16, amx };
inline constexpr int kIsaCount = 5;

std::string_view isa_name(Isa level);

// Whether this CPU and this operating system run code of that level. For `amx` this asks the kernel for permission to use
// the tile registers (arch_prctl), once per process and idempotent.
bool isa_supported(Isa level);

bool cpu_is_intel();

// "AMD EPYC 9654 96-Core Processor"; "unknown CPU" where the system does not say.
std::string cpu_model_name();

}  // namespace dspark::model::cpu
