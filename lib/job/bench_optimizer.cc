#include "job/bench_optimizer.h"

#include <algorithm>
#include <functional>
#include <set>

#include "core/error.h"
#include "job/bench_limit.h"
#include "job/bench_probe.h"
#include "job/common.h"
#include "job/shapes.h"
#include "train/optimizer.h"
#include "train/plan_step.h"

namespace dspark::job {

using namespace model;

namespace {

// All tensors that are trained, flat, with AdamW's states.
struct Flat {
  Tensor master, m, v, grad, value;
};

BenchResult bench_adamw(Backend& backend, const train::UpdatePlan& plan, const BenchOptimizerOptions& o) {
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
  r.what = fmt::format("adamw {} {}", o.shape, o.precision);
  r.unit = "GB/s";
  ThreadPool pool(!is_cpu(backend) ? 1 : o.threads > 0 ? o.threads : usable_cores());
  const std::vector<double> seconds = times(p.ctx, [&] {
    for (const Flat& t : tensors) sum_squares(p.ctx, {sum, t.grad});
    for (const Flat& t : tensors) adamw(p.ctx, {t.master, t.m, t.v, t.grad, t.value, scalars});
  }, 0, o.repeats);
  for (const double s : seconds) r.samples.push_back(bytes / s * 1e-9);
  for (int i = 0; i < (is_cpu(backend) ? o.repeats : 1); ++i) r.limit = std::max(r.limit, measure_memory_limit(backend, pool) * 1e-9);
  return r;
}

// What a step on [m, n] computes: of the symmetric products the cpu backend leaves out blocks below the diagonal, 3/8.
struct MuonWork {
  double gram, square, update;
  double all() const { return gram + square + update; }
};
MuonWork muon_work_of(Backend& backend, int64_t rows, int64_t cols) {
  const auto m = static_cast<double>(std::min(rows, cols)), n = static_cast<double>(std::max(rows, cols));
  const double computed = is_cpu(backend) ? 0.625 : 1;
  return {5 * computed * 2 * m * m * n, 5 * computed * 2 * m * m * m, 5 * 2 * m * m * n};
}

// GFLOP/s of a step's products alone: X X^T and G G^T as y = x W^T, P X as an input gradient, which is dy W.
double products_rate(Backend& backend, int64_t rows, int64_t cols) {
  const int64_t m = std::min(rows, cols), n = std::max(rows, cols);
  Probe p(backend.context());
  const DType acc = p.ctx.acc_dtype();
  const Tensor x = p.act(m, n), poly = p.act(m, m), gram = p.empty(acc, m, m), next = p.empty(acc, m, n);
  const Weight *wide = p.weight(p.act(m, n), true), *square = p.weight(p.act(m, m), false);
  const std::function<void()> products[] = {[&] { linear(p.ctx, {gram, x, wide}); }, [&] { linear(p.ctx, {gram, poly, square}); }, [&] { linear_dx(p.ctx, {next, poly, wide}); }};
  const double flops[] = {2.0 * static_cast<double>(m * m * n), 2.0 * static_cast<double>(m * m * m), 2.0 * static_cast<double>(m * m * n)};
  const MuonWork w = muon_work_of(backend, rows, cols);
  const double work[] = {w.gram, w.square, w.update};
  double seconds = 0;
  for (size_t i = 0; i < 3; ++i) {
    backend.choose_kernels(products[i]);
    seconds += work[i] * median(times(p.ctx, products[i], 0.05, 3, 1e-3)) / flops[i];
  }
  return 1e-9 * w.all() / seconds;
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
  const auto step = [&] { muon(p.ctx, {master, buf, grad, value, scalars, work, muon_size(rows, cols)}); };
  backend.choose_kernels(step);
  for (double s : times(p.ctx, step, 0, o.repeats)) r.samples.push_back(muon_work_of(backend, rows, cols).all() / s * 1e-9);
  r.limit = products_rate(backend, rows, cols);
  return r;
}

}  // namespace

std::vector<BenchResult> bench_optimizer(const BenchOptimizerOptions& o) {
  const Shape shape = find_shape(o.shape);
  if (o.precision != "bf16" && o.precision != "fp32") fail_usage("--precision {}: bf16 or fp32", o.precision);
  CommonOptions common;
  common.device = o.device, common.precision = o.precision, common.threads = o.threads, common.cpu_kernel = o.kernel;
  const auto backend = make_job_backend(common);
  BackendOptions options;
  options.precision = parse_precision(o.precision);
  std::vector<BenchResult> results{bench_adamw(*backend, train::plan_update(shape.config, options.precision, {}), o)};
  // Each different matrix that Muon would take, once.
  const auto planner = make_plan_backend(options);
  Drafter drafter(planner->context(), shape.config, DrafterOptions{});
  std::set<std::pair<int64_t, int64_t>> seen;
  for (const Parameter& p : drafter.parameters())
    if (p.trainable && train::takes_muon(p) && seen.insert({p.value.rows, p.value.cols}).second) results.push_back(bench_muon(*backend, o, p.value.rows, p.value.cols));
  const std::string device = device_text(*backend, o.threads);
  for (BenchResult& r : results) {
    r.value = median(r.samples);
    r.kernel = backend->kernel(), r.device = device;
    r.share_of_limit = r.value / r.limit;
  }
  return results;
}

}  // namespace dspark::job
