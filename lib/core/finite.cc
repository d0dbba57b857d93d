#include "core/finite.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

namespace dspark {

std::optional<size_t> first_non_finite(std::span<const float> values) {
  constexpr size_t kAtOnce = 4096;  // without a branch inside: whole models are looked through
  constexpr uint32_t kExponent = 0x7f800000u;
  for (size_t begin = 0; begin < values.size(); begin += kAtOnce) {
    const auto part = values.subspan(begin, std::min(kAtOnce, values.size() - begin));
    uint32_t bad = 0;
    for (const float v : part) bad |= static_cast<uint32_t>((std::bit_cast<uint32_t>(v) & kExponent) == kExponent);
    if (bad == 0) continue;
    for (size_t i = 0; i < part.size(); ++i)
      if (!std::isfinite(part[i])) return begin + i;
  }
  return std::nullopt;
}

}  // namespace dspark
