#include "job/bench_step.h"

#include <algorithm>

#include "core/error.h"
#include "core/log.h"
#include "core/rng.h"
#include "core/stop.h"
#include "job/bench_gemm.h"
#include "job/bench_limit.h"
#include "job/bench_machine.h"
#include "job/bench_probe.h"
#include "job/common.h"
#include "job/plan.h"
#include "job/shapes.h"
#include "train/init.h"
#include "train/optimizer.h"
#include "train/plan_step.h"

namespace dspark::job {

using namespace model;

namespace {

// Normal numbers, a block of them repeated: drawing millions would take longer than the measurement.
class Normal {
 public:
  explicit Normal(uint64_t seed) : block_(8191) {
    const Rng rng(seed, RngStream::noise);
    for (size_t i = 0; i < block_.size(); ++i) block_[i] = static_cast<float>(rng.normal(i));
  }
  std::vector<float> values(int64_t n, float scale) const {
    std::vector<float> v(static_cast<size_t>(n));
    for (size_t i = 0; i < v.size(); ++i) v[i] = scale * block_[i % block_.size()];
    return v;
  }

 private:
  std::vector<float> block_;
};

Plan predict_step(const Shape& shape, const train::Objective& objective, const train::OptimizerOptions& optimizer, Precision precision, const BatchPlan& row, const Machine& machine) {
  job::PlanInput in;
  in.name = shape.name, in.config = shape.config, in.objective = objective, in.optimizer = optimizer;
  in.apply_norm = false, in.precision = precision;
  in.rows = {row}, in.largest = row;
  return make_plan(in, {}, machine);
}

}  // namespace

BenchStepResult bench_step(const BenchStepOptions& o) {
  const Shape shape = measured_shape(o.shape, o.tokens, o.anchors);
  if (o.optimizer != "adamw" && o.optimizer != "muon") fail_usage("--optimizer {}: adamw or muon", o.optimizer);
  if (o.precision != "bf16" && o.precision != "fp32") fail_usage("--precision {}: bf16 or fp32", o.precision);
  const DrafterConfig& c = shape.config;
  CommonOptions common;
  common.device = o.device, common.precision = o.precision, common.threads = o.threads, common.cpu_kernel = o.kernel;
  const Precision precision = parse_precision(o.precision);
  const train::Objective objective = train::deepspec_objective(c.confidence);
  const BatchPlan row = train::full_row(c, shape.row_tokens, shape.anchors, o.chunk_slots);
  train::OptimizerOptions optimizer_options;
  optimizer_options.muon = o.optimizer == "muon";
  const auto backend = make_job_backend(common);
  const bool cpu = is_cpu(*backend);
  const auto named = o.machine == "auto" ? machine_of_device(backend->describe(), precision) : std::nullopt;
  Machine machine = named ? *named : o.machine == "auto" || o.machine == "this" ? measure_machine(*backend, common) : find_machine(o.machine, precision);
  const Plan predicted = predict_step(shape, objective, optimizer_options, precision, row, machine);
  const auto memory = static_cast<double>(backend->context().device().memory_bytes());
  DS_REQUIRE(static_cast<double>(predicted.fullest().bytes) <= memory, "bench step {}: needs {} of memory, this device has {}; 'dspark train --plan --shape {}' says what for", o.shape,
             format_bytes(static_cast<double>(predicted.fullest().bytes)), format_bytes(memory), o.shape);
  const MatrixLimit matrix = measure_matrix_limit(*backend, o.kernel, o.threads);
  if (o.parts) {  // the device's own limits, whatever predicts
    ThreadPool pool(!cpu ? 1 : o.threads > 0 ? o.threads : usable_cores());
    machine.peak_flops = matrix.flops, machine.peak_bytes = measure_memory_limit(*backend, pool);
  }

  TimedBackend timed(backend->context(), machine);
  Context& ctx = o.parts ? timed.context() : backend->context();
  Drafter drafter(ctx, c, DrafterOptions{.train_embeddings = c.own_embeddings()});
  const Normal normal(1);
  BenchStepResult out;
  for (Parameter& p : drafter.parameters()) {
    stop_point();
    const bool norm = p.is_vector && p.name.ends_with("norm.weight");
    const std::vector<float> v = norm ? std::vector<float>(static_cast<size_t>(p.value.size()), 1.0f) : normal.values(p.value.size(), 0.02f);
    drafter.set(p, {v.data(), DType::f32, p.value.rows, p.value.cols, p.value.cols});
    out.parameters += p.value.size();
    out.trainable += p.trainable ? p.value.size() : 0;
  }
  drafter.refresh();
  train::TargetHead target;
  if (c.own_embeddings()) {
    target.head.value = ctx.allocate(ctx.act_dtype(), c.draft_vocab, c.target_hidden);
    const std::vector<float> v = normal.values(target.head.value.size(), 0.02f);
    ctx.upload_now(target.head.value, {v.data(), DType::f32, c.draft_vocab, c.target_hidden, c.target_hidden});
  } else {
    target.head.value = drafter.find("lm_head.weight")->value;  // the target's head is the same memory
    target.head.first_columns_of = &drafter.head;
  }
  refresh(ctx, {&target.head});
  target.apply_norm = false;

  train::MicroBatch batch;
  batch.plan = row;
  const int64_t e = c.target_hidden, tap_cols = c.n_taps() * e, width = tap_cols + e;
  const std::vector<float> random = normal.values(shape.row_tokens * width, 1.0f);
  std::vector<bf16> states;
  for (float v : random) states.push_back(to_bf16(v));
  batch.taps = {states.data(), DType::bf16, shape.row_tokens, tap_cols, width};
  batch.last = {states.data() + tap_cols, DType::bf16, shape.row_tokens, e, width};

  const train::StepPlan plan = train::plan_step(c, objective, false, precision, batch.plan);
  train::TrainStep step(ctx, drafter, target, objective, plan.memory);
  train::Optimizer optimizer(drafter, optimizer_options);

  const double limit = matrix.flops * 1e-9;
  std::vector<double> whole, compute, update, host;
  // As in training, a device with queues has work when more comes: the step before.
  const auto measure = [&](std::vector<double>& seconds, const auto& work) {
    Readback before;
    if (!cpu && !o.parts) step.enqueue(batch, true, Write::overwrite, before);
    seconds.push_back(ctx.device().time([&] {
      const double start = now_s();
      work();
      host.back() += now_s() - start;
    }));
  };
  const auto run = [&] {
    stop_point();
    host.push_back(0);
    Readback slots, scalars;
    measure(compute, [&] { step.enqueue(batch, true, Write::overwrite, slots); });
    const train::StepMetrics m = step.metrics(batch, slots);
    measure(update, [&] { optimizer.enqueue(1e-4, 1 / m.weight_sum, scalars); });
    scalars.wait();
    out.slots = m.slots;
    whole.push_back(compute.back() + update.back());
  };
  // To warm up: of a device whose kernels are chosen by trying, twice.
  if (backend->chooses_kernels()) backend->choose_kernels(run);
  run();
  timed.reset();
  compute.clear(), update.clear(), whole.clear(), host.clear();
  for (int i = 0; i < o.steps; ++i) run();
  if (c.own_embeddings()) ctx.free(target.head.value);
  out.step_seconds = median(whole), out.forward_backward_seconds = median(compute), out.optimizer_seconds = median(update);
  out.host_seconds = cpu ? 0 : median(host);
  out.peak_rss_bytes = peak_rss_bytes();
  out.predicted_step_seconds = predicted.step, out.predicted_forward_backward_seconds = predicted.forward_backward, out.predicted_optimizer_seconds = predicted.optimizer;

  const std::string device = device_text(*backend, o.threads), name = backend->kernel();
  BenchResult rate{fmt::format("step {} {} {}", o.shape, o.precision, o.optimizer), out.slots / out.step_seconds, "slots/s", 0, 0, {}, name, device};
  for (double s : whole) rate.samples.push_back(out.slots / s);
  // Slots a second if the step took the time of its products at the limit.
  rate.limit = out.slots / (plan.counts.flops / (limit * 1e9));
  rate.share_of_limit = rate.value / rate.limit;
  BenchResult flops{fmt::format("forward and backward, {:.3g} FLOP", plan.counts.flops), plan.counts.flops / out.forward_backward_seconds * 1e-9, "GFLOP/s", limit, 0, {}, name, device};
  for (double s : compute) flops.samples.push_back(plan.counts.flops / s * 1e-9);
  flops.share_of_limit = flops.value / limit;
  out.results = {rate, flops};
  const auto beside = [&](double measured, double expected) {
    return fmt::format("{:.{}f} s (predicted {:.{}f}, {:+.0f} %)", measured, cpu ? 3 : 5, expected, cpu ? 3 : 5, 100 * (expected / measured - 1));
  };
  out.text = bench_table(out.results) +
             fmt::format("row of {} tokens, {} anchors of {} slots, {:.0f} supervised; {} parameters, {} trained\n"
                         "step {}: forward and backward {}, optimizer {}\n{}arena {}, peak memory {} (planned {}){}\n",
                         shape.row_tokens, shape.anchors, c.block, out.slots, out.parameters, out.trainable, beside(out.step_seconds, predicted.step),
                         beside(out.forward_backward_seconds, predicted.forward_backward), beside(out.optimizer_seconds, predicted.optimizer),
                         cpu ? "" : fmt::format("the host enqueues a step in {:.5f} s, {:.0f} % of it\n", out.host_seconds, 100 * out.host_seconds / out.step_seconds),
                         format_bytes(static_cast<double>(plan.memory.total())), format_bytes(static_cast<double>(out.peak_rss_bytes)), format_bytes(static_cast<double>(predicted.fullest().bytes)),
                         fmt::format("; predicted from {}", machine.measured ? machine.assumptions : fmt::format("{} ({})", machine.name, machine.assumptions)));
  if (!o.parts) return out;
  out.parts = timed.rows();
  out.text += fmt::format("{:<32} {:>13} {:>13} {:>15}\n", "each operator waited for", "measured", "predicted", "share of limit");
  for (PartTime& p : out.parts) {
    p.measured /= o.steps, p.predicted /= o.steps, p.at_limit /= o.steps;
    const std::string share = p.at_limit > 0 && p.measured > 0 ? fmt::format("{:.1f} %", 100 * p.at_limit / p.measured) : "-";
    out.text += fmt::format("  {:<30} {:>10.3f} ms {:>10.3f} ms {:>15}\n", p.name, 1e3 * p.measured, 1e3 * p.predicted, share);
  }
  return out;
}

}  // namespace dspark::job
