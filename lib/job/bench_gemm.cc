#include "job/bench_gemm.h"

#include <time.h>

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

double thread_cpu_s() {
  timespec t{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v.size() % 2 == 1 ? v[v.size() / 2] : (v[v.size() / 2 - 1] + v[v.size() / 2]) / 2;
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

MatrixLimit measure_matrix_limit(const std::string& kernel, int threads, DType type) {
  ThreadPool pool(threads > 0 ? threads : usable_cores());
  const model::cpu::GemmTable& table = model::cpu::select_kernel(kernel).table();
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
  return {sum, fmt::format("{}, {} threads", model::cpu::cpu_model_name(), pool.size())};
}

MatrixLimit measure_matrix_limit(model::Backend& backend, const std::string& kernel, int threads) {
  model::Context& ctx = backend.context();
  if (ctx.device().name() == "cpu") return measure_matrix_limit(kernel, threads, ctx.act_dtype());
  constexpr int64_t n = 8192;
  Probe p(ctx);
  const model::Weight* w = p.weight(n, n);
  const model::Tensor x = p.act(n, n), y = p.empty(ctx.act_dtype(), n, n);
  const std::vector<double> seconds = times(ctx, [&] { model::linear(ctx, {y, x, w}); }, 0.1, 10);
  return {2.0 * n * n * n / *std::min_element(seconds.begin(), seconds.end()), backend.describe()};
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

std::vector<GemmShape> default_gemm_shapes() {
  std::vector<GemmShape> shapes;
  const auto both = [&](const char* form, int64_t m, int64_t n, int64_t k) {
    shapes.push_back({form, m, n, k, DType::bf16, DType::f32});
    shapes.push_back({form, m, n, k, DType::f32, DType::f32});
  };
  both("packed", 4096, 2560, 2560);
  both("nt", 4096, 2560, 2560);
  // A drafter of width 576 (SmolLM2-135M's): q|k|v, o, gate|up, down, fc; then input and weight gradients.
  both("packed", 896, 960, 576);
  both("packed", 896, 576, 576);
  both("packed", 896, 3072, 576);
  both("packed", 896, 576, 1536);
  both("packed", 512, 576, 2880);
  both("nn", 896, 576, 3072);
  both("tn", 3072, 576, 896);
  both("tn", 576, 1536, 896);
  // The loss: [lm_head | markov_w2] of a pruned and of the full vocabulary, and its gradients.
  both("packed", 512, 8192, 832);
  both("packed", 512, 49152, 832);
  both("nn", 512, 832, 8192);
  both("tn", 8192, 832, 512);
  // Decoding.
  for (int64_t m : {1, 4, 8}) {
    both("packed", m, 49152, 576);
    both("packed", m, 1536, 576);
  }
  return shapes;
}

std::vector<BenchResult> bench_gemm(const BenchGemmOptions& options) {
  ThreadPool pool(options.threads > 0 ? options.threads : usable_cores());
  GemmContext ctx(pool, model::cpu::select_kernel(options.kernel));
  std::vector<BenchResult> results;
  for (const GemmShape& shape : options.shapes.empty() ? default_gemm_shapes() : options.shapes)
    results.push_back(bench_shape(ctx, shape, options));
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
