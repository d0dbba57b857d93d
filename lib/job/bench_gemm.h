// Measures the CPU's matrix kernels on single products: what the table of choices is made from (job/bench_gemm_table.h).
//
// Protocol: normal random operands (AMX is faster on zeros), one warm-up, then repeats; the value is their median. Before
// each repeat the limit is measured for a moment, and the best of those is the limit: for M > 8 the rate of multiply-adds
// on registers alone (of the instruction the product uses), for M <= 8 the speed of reading memory that no cache holds,
// both with as many threads. A product whose B fits a cache may pass the latter.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "core/threads.h"
#include "job/bench_result.h"
#include "model/ops_cpu/gemm.h"

namespace dspark::job {

struct GemmShape {
  std::string form;  // "nt", "nn", "tn", or "packed" (B packed before the clock starts)
  int64_t m = 0, n = 0, k = 0;
  DType in = DType::bf16, out = DType::f32;
};

struct BenchGemmOptions {
  std::string kernel = "auto";
  int threads = 0;                // 0: all usable cores
  double seconds_per_shape = 0.5;
  int min_repeats = 5;
  std::vector<GemmShape> shapes;
};

// GFLOP/s of the kernel's multiply-add on registers, all threads: the limit of matrix products.
double peak_gflops(ThreadPool& pool, const model::cpu::GemmTable& table, DType type);

// "avx512bf16: why this one is taken here".
std::string kernel_choice(const std::string& kernel);

std::vector<BenchResult> bench_gemm(const BenchGemmOptions& options);
// "what  median [min max] unit  share of limit", aligned, one line a result.
std::string bench_table(const std::vector<BenchResult>& results);

}  // namespace dspark::job
