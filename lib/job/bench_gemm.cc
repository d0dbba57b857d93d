#include "job/bench_gemm.h"

#include <algorithm>
#include <chrono>
#include <functional>

#include "core/error.h"
#include "core/log.h"
#include "core/rng.h"
#include "core/stop.h"
#include "core/threads.h"
#include "job/bench_probe.h"
#include "model/ops_cpu/gemm.h"
#include "model/ops_cpu/gemm_table.h"

namespace dspark::job {
namespace {

using model::cpu::GemmContext;
using model::cpu::MatOut;
using model::cpu::MatRef;

double seconds_of(const std::function<void()>& body) {
  const auto start = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// 64-byte aligned memory of one operand, filled with normal numbers (a repeated block of them: drawing all would take
// longer than the measurement).
struct Operand {
  std::vector<std::byte> memory;
  std::byte* data = nullptr;
  explicit Operand(int64_t bytes) : memory(static_cast<size_t>(bytes + 64)) {
    data = reinterpret_cast<std::byte*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64);
  }
  void fill(int64_t n, DType type, uint64_t seed) {
    constexpr int64_t kBlock = 8191;
    const Rng rng(seed, RngStream::noise);
    std::vector<float> block(kBlock);
    for (int64_t i = 0; i < kBlock; ++i) block[static_cast<size_t>(i)] = static_cast<float>(rng.normal(static_cast<uint64_t>(i)));
    for (int64_t i = 0; i < n; ++i) {
      const float v = block[static_cast<size_t>(i % kBlock)];
      if (type == DType::bf16) reinterpret_cast<bf16*>(data)[i] = to_bf16(v);
      else reinterpret_cast<float*>(data)[i] = v;
    }
  }
};

}  // namespace

double peak_gflops(ThreadPool& pool, const model::cpu::GemmTable& table, DType type) {
  const auto peak = type == DType::bf16 ? table.peak_bf16 : table.peak_f32;
  std::vector<double> flops(static_cast<size_t>(pool.size()));
  int64_t rounds = 2000;
  double best = 0;
  // The first turns may be over before the scheduler has given a thread that slept a core of its own.
  for (int turn = 0; turn < 4;) {
    const double s = seconds_of([&] {
      pool.parallel_for(pool.size(), 1, [&](int64_t begin, int64_t end, int) {
        for (int64_t i = begin; i < end; ++i) {
          float sink = 0.001f;
          flops[static_cast<size_t>(i)] = peak(rounds, &sink);
        }
      });
    });
    if (s < 5e-3) {
      rounds *= 4;
      continue;
    }
    double sum = 0;
    for (double f : flops) sum += f;
    best = std::max(best, sum / s * 1e-9);
    ++turn;
  }
  return best;
}

namespace {

// GB/s of reading `bytes` of memory larger than the caches, all threads.
double read_gbps(ThreadPool& pool, const Operand& memory, int64_t bytes) {
  std::vector<uint64_t> sums(static_cast<size_t>(pool.size()));
  const double s = seconds_of([&] {
    pool.parallel_for(bytes / 64, 1, [&](int64_t begin, int64_t end, int thread) {
      const uint64_t* p = reinterpret_cast<const uint64_t*>(memory.data);
      uint64_t sum[8] = {};
      for (int64_t i = begin * 8; i < end * 8; i += 8)
        for (int j = 0; j < 8; ++j) sum[j] += p[i + j];
      for (int j = 1; j < 8; ++j) sum[0] += sum[j];
      sums[static_cast<size_t>(thread)] = sum[0];
    });
  });
  return static_cast<double>(bytes) / s * 1e-9 + (sums[0] == 1 ? 1e-12 : 0);
}

BenchResult bench_shape(GemmContext& ctx, const GemmShape& s, const BenchGemmOptions& options) {
  const bool packed = s.form == "packed", tn = s.form == "tn";
  DS_REQUIRE(packed || tn || s.form == "nt" || s.form == "nn", "bench gemm: form '{}' is none of nt, nn, tn, packed", s.form);
  const int64_t e = dtype_bytes(s.in);
  Operand a(s.m * s.k * e), b(s.n * s.k * e), c(s.m * s.n * dtype_bytes(s.out));
  a.fill(s.m * s.k, s.in, 1);
  b.fill(s.n * s.k, s.in, 2);
  const MatRef ra = {a.data, s.in, tn ? s.m : s.k};
  const MatRef rb = {b.data, s.in, packed || s.form == "nt" ? s.k : s.n};
  const MatOut rc = {c.data, s.out, s.n};
  Operand panels(packed ? model::cpu::packed_b_bytes(ctx.kernel(), s.in, s.n, s.k) : 0);
  model::cpu::PackedB pb;
  if (packed) pb = model::cpu::pack_b_nt(ctx, s.n, s.k, rb, panels.data);
  const auto product = [&] {
    if (packed) model::cpu::gemm_packed(ctx, s.m, s.n, s.k, ra, pb, rc);
    else if (tn) model::cpu::gemm_tn(ctx, s.m, s.n, s.k, ra, rb, rc);
    else if (s.form == "nt") model::cpu::gemm_nt(ctx, s.m, s.n, s.k, ra, rb, rc);
    else model::cpu::gemm_nn(ctx, s.m, s.n, s.k, ra, rb, rc);
  };

  BenchResult r;
  r.what = fmt::format("gemm {} {} {}x{}x{}", s.form, s.in == DType::bf16 ? "bf16" : "f32", s.m, s.n, s.k);
  r.kernel = ctx.kernel().name();
  r.device = fmt::format("{}, {} threads", model::cpu::cpu_model_name(), ctx.pool().size());
  const bool memory_bound = s.m <= 8;
  r.unit = memory_bound ? "GB/s" : "GFLOP/s";
  const double work = memory_bound ? static_cast<double>(s.n * s.k * e)
                                   : 2.0 * static_cast<double>(s.m) * static_cast<double>(s.n) * static_cast<double>(s.k);
  constexpr int64_t kReadBytes = 96 << 20;
  Operand read(memory_bound ? kReadBytes : 0);
  if (memory_bound) read.fill(kReadBytes / 4, DType::f32, 3);
  std::vector<double> limits;
  product();
  // Small products are repeated within a sample: a clock and a limit for each of them would take longer than they do.
  const auto inner = static_cast<int>(std::clamp(1e-3 / std::max(seconds_of(product), 1e-9), 1.0, 1e4));
  double spent = 0, spent_on_limits = 0;
  while (spent < options.seconds_per_shape || static_cast<int>(r.samples.size()) < options.min_repeats) {
    stop_point();
    if (spent_on_limits <= spent)  // between the samples, in half of the time
      spent_on_limits += seconds_of([&] {
        limits.push_back(memory_bound ? read_gbps(ctx.pool(), read, kReadBytes) : peak_gflops(ctx.pool(), ctx.kernel().table(), s.in));
      });
    const double all = seconds_of([&] {
      for (int i = 0; i < inner; ++i) product();
    });
    r.samples.push_back(work * inner / all * 1e-9);
    spent += all;
  }
  r.value = median(r.samples);
  r.limit = *std::max_element(limits.begin(), limits.end());
  r.share_of_limit = r.value / r.limit;
  return r;
}

}  // namespace

std::string kernel_choice(const std::string& kernel) {
  const model::cpu::Kernel& k = model::cpu::select_kernel(kernel);
  return fmt::format("{}: {}", k.name(), model::cpu::kernel_reason(k));
}

std::vector<BenchResult> bench_gemm(const BenchGemmOptions& options) {
  ThreadPool pool(options.threads > 0 ? options.threads : usable_cores());
  GemmContext ctx(pool, model::cpu::select_kernel(options.kernel));
  std::vector<BenchResult> results;
  for (const GemmShape& shape : options.shapes) results.push_back(bench_shape(ctx, shape, options));
  return results;
}

std::string bench_table(const std::vector<BenchResult>& results) {
  std::string text;
  for (const BenchResult& r : results) {
    const auto [low, high] = std::minmax_element(r.samples.begin(), r.samples.end());
    text += fmt::format("{:<38} {:>8.1f} [{:>7.1f} {:>7.1f}] {:<8} {:>5.1f} % of {:.1f}{}\n", r.what, r.value, *low, *high, r.unit, 100 * r.share_of_limit, r.limit,
                        r.memory_bytes > 0 ? ", in " + format_bytes(static_cast<double>(r.memory_bytes)) : "");
  }
  return text;
}

}  // namespace dspark::job
