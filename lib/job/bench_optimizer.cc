#include "job/bench_optimizer.h"

#include <algorithm>
#include <set>

#include "core/error.h"
#include "job/bench_gemm.h"
#include "job/bench_memory.h"
#include "job/bench_probe.h"
#include "job/common.h"
#include "job/shapes.h"
#include "model/ops_cpu/gemm.h"
#include "train/optimizer.h"
#include "train/plan_step.h"

namespace dspark::job {

using namespace model;

namespace {

// All tensors that are trained, flat, with AdamW's states.
struct Flat {
  Tensor master, m, v, grad, value;
};

BenchResult bench_adamw(Backend& backend, ThreadPool& pool, const train::UpdatePlan& plan, int repeats) {
  Probe p(backend.context());
  const DType acc = p.ctx.acc_dtype();
  const Tensor scalars = p.empty(acc, 1, kNumStepScalars), sum = p.empty(acc, 1, 1);
  fill(p.ctx, {scalars, 1e-3});
  std::vector<Flat> tensors;
  double bytes = 0;
  for (const auto& t : plan.tensors) {
    if (!t.trainable) continue;
    for (const PlanEntry& e : t.update) bytes += e.counts.bytes();
    tensors.push_back({p.acc(1, t.size), p.acc(1, t.size, 0.01f), p.empty(acc, 1, t.size), p.acc(1, t.size, 0.01f),
                       t.master_bytes > 0 ? p.empty(p.ctx.act_dtype(), 1, t.size) : Tensor{}});
    fill(p.ctx, {tensors.back().v, 1e-4});
  }
  BenchResult r;
  r.unit = "GB/s";
  for (double s : times(p.ctx, [&] {
         for (const Flat& t : tensors) sum_squares(p.ctx, {sum, t.grad});
         for (const Flat& t : tensors) adamw(p.ctx, {t.master, t.m, t.v, t.grad, t.value, scalars});
       }, 0, repeats)) {
    r.samples.push_back(bytes / s * 1e-9);
    r.limit = std::max(r.limit, memory_bytes_per_s(pool) * 1e-9);
  }
  r.value = median(r.samples);
  return r;
}

// What a step on [m, n] computes: 5/8 of the symmetric products, their blocks on and above the diagonal.
struct MuonWork {
  double gram, square, update;
  double all() const { return gram + square + update; }
};
MuonWork muon_work_of(int64_t rows, int64_t cols) {
  const auto m = static_cast<double>(std::min(rows, cols)), n = static_cast<double>(std::max(rows, cols));
  return {5 * 0.625 * 2 * m * m * n, 5 * 0.625 * 2 * m * m * m, 5 * 2 * m * m * n};
}

// GFLOP/s of a step's products alone.
double products_rate(const BenchOptimizerOptions& o, int64_t rows, int64_t cols, DType act) {
  const int64_t m = std::min(rows, cols), n = std::max(rows, cols);
  BenchGemmOptions g;
  g.kernel = o.kernel, g.threads = o.threads, g.seconds_per_shape = 0.05, g.min_repeats = 3;
  g.shapes = {{"nt", m, m, n, act, DType::f32}, {"nt", m, m, m, act, DType::f32}, {"nn", m, n, m, act, DType::f32}};
  const auto results = bench_gemm(g);
  const MuonWork w = muon_work_of(rows, cols);
  return w.all() / (w.gram / results[0].value + w.square / results[1].value + w.update / results[2].value);
}

BenchResult bench_muon(Backend& backend, const BenchOptimizerOptions& o, int64_t rows, int64_t cols) {
  Probe p(backend.context());
  const Tensor master = p.acc(rows, cols), buf = p.acc(rows, cols, 0.01f), grad = p.acc(rows, cols, 0.01f), scalars = p.empty(p.ctx.acc_dtype(), 1, kNumStepScalars),
               work = p.empty(DType::u8, 1, muon_work(p.ctx, rows, cols));
  const Tensor value = p.ctx.act_dtype() == p.ctx.acc_dtype() ? Tensor{} : p.empty(p.ctx.act_dtype(), rows, cols);
  fill(p.ctx, {scalars, 1e-3});
  BenchResult r;
  r.what = fmt::format("muon {} {}x{}", o.precision, rows, cols);
  r.unit = "GFLOP/s";
  for (double s : times(p.ctx, [&] { muon(p.ctx, {master, buf, grad, value, scalars, work, muon_size(rows, cols)}); }, 0, o.repeats)) r.samples.push_back(muon_work_of(rows, cols).all() / s * 1e-9);
  r.limit = products_rate(o, rows, cols, p.ctx.act_dtype());
  r.value = median(r.samples);
  return r;
}

}  // namespace

std::vector<BenchResult> bench_optimizer(const BenchOptimizerOptions& o) {
  const Shape shape = find_shape(o.shape);
  if (o.precision != "bf16" && o.precision != "fp32") fail_usage("--precision {}: bf16 or fp32", o.precision);
  BackendOptions options;
  options.precision = parse_precision(o.precision);
  options.threads = o.threads, options.cpu_kernel = o.kernel;
  const auto backend = make_cpu_backend(options);
  ThreadPool pool(o.threads > 0 ? o.threads : usable_cores());
  const train::UpdatePlan plan = train::plan_update(shape.config, options.precision, {});
  std::vector<BenchResult> results{bench_adamw(*backend, pool, plan, o.repeats)};
  results[0].what = fmt::format("adamw {} {}", o.shape, o.precision);
  // Each different matrix that Muon would take, once.
  const auto planner = make_plan_backend(options);
  Drafter drafter(planner->context(), shape.config, DrafterOptions{});
  std::set<std::pair<int64_t, int64_t>> seen;
  for (const Parameter& p : drafter.parameters())
    if (p.trainable && train::takes_muon(p) && seen.insert({p.value.rows, p.value.cols}).second) results.push_back(bench_muon(*backend, o, p.value.rows, p.value.cols));
  for (BenchResult& r : results) {
    r.kernel = model::cpu::select_kernel(o.kernel).name();
    r.device = fmt::format("{}, {} threads", model::cpu::cpu_model_name(), pool.size());
    r.share_of_limit = r.value / r.limit;
  }
  return results;
}

}  // namespace dspark::job
