#include "job/bench_products.h"

#include <algorithm>
#include <map>
#include <tuple>

#include "core/error.h"
#include "job/bench_limit.h"
#include "job/bench_probe.h"
#include "job/common.h"
#include "train/plan_step.h"

namespace dspark::job {

using namespace model;

std::vector<PlanProduct> step_products(const Shape& shape, Precision precision, bool input_gradients) {
  const auto plan = train::plan_step(shape.config, train::deepspec_objective(shape.config.confidence), false, precision,
                                    train::largest_row(shape.config, shape.row_tokens, shape.anchors, 512));
  std::map<std::tuple<std::string, bool, int64_t, int64_t>, PlanProduct> largest;
  for (const PlanProduct& p : plan.products) {
    PlanProduct& most = largest[{p.form, p.input_gradient && input_gradients, p.n, p.form == "tn" ? p.m : p.k}];
    if (p.m * p.k > most.m * most.k) most = p;
  }
  std::vector<PlanProduct> all;
  for (const auto& [key, p] : largest) all.push_back(p);
  return all;
}

namespace {

BenchResult measure(Backend& backend, const PlanProduct& product, const BenchProductsOptions& o) {
  Probe p(backend.context());
  Context& ctx = p.ctx;
  const DType acc = ctx.acc_dtype();
  const auto [m, n, k] = std::tuple(product.m, product.n, product.k);
  std::string name = "linear";
  if (product.form == "tn") {
    name = "linear_dw";
    p.run = [&ctx, dw = p.empty(acc, m, n), dy = p.act(k, m, 0.1f), x = p.act(k, n)] { linear_dw(ctx, {dw, dy, x}); };
  } else if (product.input_gradient) {
    name = "linear_dx";
    p.run = [&ctx, dx = p.empty(acc, m, n), dy = p.act(m, k, 0.1f), w = p.weight(k, n)] { linear_dx(ctx, {dx, dy, w}); };
  } else {
    p.run = [&ctx, y = p.empty(ctx.act_dtype(), m, n), x = p.act(m, k), w = p.weight(p.act(n, k, 0.05f), false)] { linear(ctx, {y, x, w}); };
  }
  backend.choose_kernels(p.run);
  BenchResult r;
  r.what = fmt::format("gemm {} {} {}x{}x{}", name, o.precision, m, n, k);
  r.unit = "GFLOP/s";
  for (const double s : times(ctx, p.run, o.seconds_per_product, o.repeats, 1e-3)) r.samples.push_back(2e-9 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k) / s);
  return r;
}

}  // namespace

std::vector<BenchResult> bench_products(const BenchProductsOptions& o) {
  const Shape shape = measured_shape(o.shape, o.tokens, o.anchors);
  if (o.precision != "bf16" && o.precision != "fp32") fail_usage("--precision {}: bf16 or fp32", o.precision);
  CommonOptions common;
  common.device = o.device, common.precision = o.precision, common.threads = o.threads, common.cpu_kernel = o.kernel;
  const auto backend = make_job_backend(common);
  const MatrixLimit matrix = measure_matrix_limit(*backend, o.kernel, o.threads);
  std::vector<BenchResult> results;
  std::vector<PlanProduct> products = step_products(shape, parse_precision(o.precision), true);
  if (o.large) products.insert(products.begin(), {"packed", 4096, 2560, 2560, 1});
  for (const PlanProduct& product : products) {
    results.push_back(measure(*backend, product, o));
    results.back().limit = matrix.flops * 1e-9;
  }
  ThreadPool pool(!is_cpu(*backend) ? 1 : o.threads > 0 ? o.threads : usable_cores());
  const double memory = measure_memory_limit(*backend, pool) * 1e-9;
  for (const int64_t rows : {1, 8}) {
    const int64_t n = shape.config.draft_vocab, k = shape.config.joint_cols();
    BenchResult r = measure(*backend, {"packed", rows, n, k, 1}, o);
    // From FLOPs to the weight's bytes.
    for (double& s : r.samples) s *= static_cast<double>(dtype_bytes(backend->context().act_dtype())) / (2 * static_cast<double>(rows));
    r.unit = "GB/s", r.limit = memory;
    results.push_back(std::move(r));
  }
  for (BenchResult& r : results) {
    r.value = median(r.samples);
    r.share_of_limit = r.value / r.limit;
    r.kernel = backend->kernel(), r.device = device_text(*backend, o.threads);
  }
  return results;
}

}  // namespace dspark::job
