// Benchmark of the cpu backend's matrix products at the shapes of a drafter's training step and of decoding.
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
#include "model/backends.h"
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
  std::vector<GemmShape> shapes;  // empty: default_gemm_shapes()
};

// GFLOP/s of the kernel's multiply-add on registers, all threads: the limit of matrix products.
double peak_gflops(ThreadPool& pool, const model::cpu::GemmTable& table, DType type);

// The same for a program that is about to work: a kernel by name, 30 ms of each thread's own time, so that it hardly matters what else the
// machine does in that moment.
struct MatrixLimit {
  double flops = 0;    // a second
  std::string device;  // "AMD EPYC 9B45, 2 threads"
};
MatrixLimit measure_matrix_limit(const std::string& kernel, int threads, DType type);
// Of a backend's products in its act dtype: the above for the cpu backend (threads and kernel are its), else what one large product reaches.
MatrixLimit measure_matrix_limit(model::Backend& backend, const std::string& kernel, int threads);

// "avx512bf16: why this one is taken here".
std::string kernel_choice(const std::string& kernel);

std::vector<GemmShape> default_gemm_shapes();
std::vector<BenchResult> bench_gemm(const BenchGemmOptions& options);
// "what  median [min max] unit  share of limit", aligned, one line a result.
std::string bench_table(const std::vector<BenchResult>& results);

}  // namespace dspark::job
