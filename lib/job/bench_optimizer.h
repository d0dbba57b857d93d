// Benchmark of the optimizers at a drafter's tensors.
//
// AdamW: GB/s of what it must read and write (with the gradient's norm, read once more) over all trainable tensors, against the memory's
// (job/bench_limit.h). Muon: GFLOP/s of each different matrix, counting what is computed (by the cpu backend not the mirrored halves of
// X X^T and G G^T, in blocks of a quarter), against the same products alone.
// Protocol: normal random values, one call to warm up, then repeats; the value is their median, the limit the best of those
// measured beside them.
#pragma once

#include <string>
#include <vector>

#include "job/bench_result.h"

namespace dspark::job {

struct BenchOptimizerOptions {
  std::string shape = "small", precision = "bf16", kernel = "auto", device = "auto";
  int threads = 0, repeats = 5;
};

std::vector<BenchResult> bench_optimizer(const BenchOptimizerOptions& options);

}  // namespace dspark::job
