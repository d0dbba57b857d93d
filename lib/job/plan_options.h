// What `train --plan` takes beyond a training run's own options. `ranks` and `grad_wire` are a run's too.
#pragma once

#include <cstdint>
#include <string>

namespace dspark::job {

struct PlanOptions {
  std::string machine = "this", shape, grad_wire = "fp32";
  int64_t ranks = 1, rows = 0;  // rows a step, all ranks together; 0: one each, or what the store gives
  double price = 0;             // of one machine, an hour; 0: not asked
  double codec_ratio = 0;       // 0: the store's own, or zstd's usual one
};

}  // namespace dspark::job
