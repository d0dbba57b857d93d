// Measures which matrix kernel is fastest for each product of a drafter's training step, and writes the choices to a file.
//
// Protocol: bench_gemm's (job/bench_gemm.h) for every kernel of this CPU on each weight's products at the step's largest number of
// rows; another kernel than the usual one is chosen when its median is 3 % above.
#pragma once

#include <string>
#include <vector>

#include "core/files.h"
#include "job/bench_result.h"

namespace dspark::job {

struct GemmTableOptions {
  std::string shape = "small", precision = "bf16", kernel = "auto";
  int threads = 0;
  double seconds_per_kernel = 0.1;
  fs::path save;
};
// What was chosen for each product, its limit the registers'; `kernel` is the chosen one.
std::vector<BenchResult> bench_gemm_table(const GemmTableOptions& options);

}  // namespace dspark::job
