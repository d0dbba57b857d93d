// Conversion between fp32 and bf16.
#include "model/ops_cpu/isa/math.h"

namespace dspark::model::cpu::DS_ISA {

void convert(Out dst, In src, int64_t n) {
  with(dst, [&](auto* __restrict d) {
    with(src, [&](auto* __restrict s) {
      for (int64_t i = 0; i < n; ++i) store(d + i, load(s[i]));
    });
  });
}

}  // namespace dspark::model::cpu::DS_ISA
