// Runs of elements as kernels take them. Included by the kernel sources, so: no std types, no inline code.
#pragma once

#include <stdint.h>

namespace dspark::model::cpu {

// n neighbouring elements, fp32 or bf16.
struct In {
  const void* p;
  int bf16;
};
struct Out {
  void* p;
  int bf16;
};

}  // namespace dspark::model::cpu
