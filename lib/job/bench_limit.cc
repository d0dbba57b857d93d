#include "job/bench_limit.h"

#include <time.h>

#include <algorithm>

#include "core/log.h"
#include "job/bench_memory.h"
#include "job/bench_probe.h"
#include "job/machines.h"
#include "model/ops_cpu/gemm.h"
#include "model/ops_cpu/gemm_table.h"

namespace dspark::job {

using namespace model;

namespace {

double thread_cpu_s() {
  timespec t{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

MatrixLimit cpu_matrix_limit(const std::string& kernel, int threads, DType type) {
  ThreadPool pool(threads > 0 ? threads : usable_cores());
  const cpu::GemmTable& table = cpu::select_kernel(kernel).table();
  const auto peak = type == DType::bf16 ? table.peak_bf16 : table.peak_f32;
  // A turn for each thread, by its own clock: one that wakes late may leave its turn to another.
  std::vector<double> rates(static_cast<size_t>(pool.size()));
  pool.parallel_for(pool.size(), 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      float sink = 0.001f;
      double& best = rates[static_cast<size_t>(i)];
      int64_t rounds = 2000;
      for (double spent = 0; spent < 0.03;) {
        const double start = thread_cpu_s(), flops = peak(rounds, &sink), seconds = thread_cpu_s() - start;
        if (seconds < 1e-3) rounds *= 4;
        else best = std::max(best, flops / seconds);
        spent += std::max(seconds, 1e-6);
      }
    }
  });
  double sum = 0;
  for (double r : rates) sum += r;
  return {sum, "multiply-adds on registers alone, measured at the start"};
}

Precision precision_of(Context& ctx) { return ctx.act_dtype() == DType::bf16 ? Precision::bf16 : Precision::fp32; }

// The best rate of a probe that grows to `most`, or until it takes a while on something slower than a GPU.
template <typename Rate>
double best_while_growing(int64_t least, int64_t most, const Rate& rate) {
  double best = 0;
  for (int64_t n = least; n <= most; n *= 2) {
    const double start = now_s();
    best = std::max(best, rate(n));
    if (now_s() - start > 0.3) break;
  }
  return best;
}

}  // namespace

std::string device_text(Backend& backend, int threads) {
  return is_cpu(backend) ? fmt::format("{}, {} threads", cpu::cpu_model_name(), threads > 0 ? threads : usable_cores()) : backend.describe();
}

MatrixLimit measure_matrix_limit(Backend& backend, const std::string& kernel, int threads) {
  Context& ctx = backend.context();
  if (is_cpu(backend)) return cpu_matrix_limit(kernel, threads, ctx.act_dtype());
  if (const auto m = machine_of_device(backend.describe(), precision_of(ctx))) return {m->peak_flops, "its data sheet"};
  const double flops = best_while_growing(128, 8192, [&](int64_t n) {
    Probe p(ctx);
    const Weight* w = p.weight(n, n);
    const Tensor x = p.act(n, n), y = p.empty(ctx.act_dtype(), n, n);
    const std::vector<double> seconds = times(ctx, [&] { linear(ctx, {y, x, w}); }, 0, 3, 1e-3);
    return 2.0 * static_cast<double>(n * n * n) / *std::min_element(seconds.begin(), seconds.end());
  });
  return {flops, "one large product, measured at the start"};
}

double measure_memory_limit(Backend& backend, ThreadPool& pool) {
  Context& ctx = backend.context();
  if (is_cpu(backend)) return memory_bytes_per_s(pool);
  if (const auto m = machine_of_device(backend.describe(), precision_of(ctx))) return m->peak_bytes;
  constexpr int64_t kCols = 1024;
  return best_while_growing(256, int64_t{1} << 17, [&](int64_t rows) {
    Probe p(ctx);
    const Tensor from = p.empty(DType::f32, rows, kCols), to = p.empty(DType::f32, rows, kCols);
    fill(ctx, {from, 1});
    const std::vector<double> seconds = times(ctx, [&] { copy(ctx, {to, from}); }, 0, 3, 1e-3);
    return 8.0 * static_cast<double>(rows * kCols) / *std::min_element(seconds.begin(), seconds.end());
  });
}

}  // namespace dspark::job
