// One measured number of `dspark bench`, with what it could be at most.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace dspark::job {

struct BenchResult {
  std::string what;            // "gemm nt bf16 4096x2560x2560"
  double value = 0;            // median of the samples
  std::string unit;            // "GFLOP/s", "GB/s"
  double limit = 0;            // same unit; measured on this machine beside the samples
  double share_of_limit = 0;   // value / limit
  std::vector<double> samples;
  std::string kernel;
  std::string device;
  int64_t memory_bytes = 0;    // what it works in besides its operands; 0: nothing to say
};

}  // namespace dspark::job
