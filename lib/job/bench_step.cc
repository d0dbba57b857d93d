#include "job/bench_step.h"

#include <algorithm>

#include "core/error.h"
#include "core/log.h"
#include "core/rng.h"
#include "job/bench_gemm.h"
#include "model/ops_cpu/gemm_table.h"
#include "train/init.h"
#include "train/optimizer.h"
#include "train/plan_step.h"

namespace dspark::job {

using namespace model;

namespace {

struct Shape {
  DrafterConfig config;
  int64_t tokens, anchors;
};

Shape shape_of(const std::string& name) {
  DrafterConfig c;
  c.layers.assign(5, LayerType::full);
  c.block = 7, c.rank = 256;
  c.max_position = 8192;
  auto width = [&](int64_t d, int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t ffn, int64_t vocab, int64_t taps) {
    c.hidden = c.target_hidden = d, c.heads = heads, c.kv_heads = kv_heads, c.head_dim = head_dim, c.ffn = ffn;
    c.vocab = c.draft_vocab = vocab;
    c.mask_token = vocab - 1;
    for (int64_t i = 0; i < taps; ++i) c.taps.push_back({static_cast<int>(i + 1)});
  };
  if (name == "small") {
    width(576, 9, 3, 64, 1536, 49152, 5);
    return {c, 512, 128};
  }
  if (name == "qwen3-0.6b") {
    width(1024, 16, 8, 128, 3072, 151936, 5);
    return {c, 1024, 128};
  }
  if (name == "tiny") {
    width(64, 4, 2, 16, 128, 997, 2);
    c.layers.assign(2, LayerType::full);
    c.rank = 16;
    return {c, 64, 16};
  }
  fail_usage("--shape {}: small, qwen3-0.6b or tiny", name);
}

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

double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v.size() % 2 == 1 ? v[v.size() / 2] : (v[v.size() / 2 - 1] + v[v.size() / 2]) / 2;
}

}  // namespace

BenchStepResult bench_step(const BenchStepOptions& o) {
  Shape shape = shape_of(o.shape);
  if (o.tokens > 0) shape.tokens = o.tokens;
  if (o.anchors > 0) shape.anchors = o.anchors;
  DS_REQUIRE(shape.tokens > 8 && shape.anchors >= 1 && shape.anchors < shape.tokens, "bench step: {} anchors in a row of {} tokens", shape.anchors, shape.tokens);
  if (o.optimizer != "adamw" && o.optimizer != "muon") fail_usage("--optimizer {}: adamw or muon", o.optimizer);
  if (o.precision != "bf16" && o.precision != "fp32") fail_usage("--precision {}: bf16 or fp32", o.precision);
  const DrafterConfig& c = shape.config;
  BackendOptions backend_options;
  backend_options.precision = o.precision == "bf16" ? Precision::bf16 : Precision::fp32;
  backend_options.threads = o.threads, backend_options.cpu_kernel = o.kernel;
  const auto backend = make_cpu_backend(backend_options);
  Context& ctx = backend->context();
  const train::Objective objective = train::deepspec_objective(true);

  Drafter drafter(ctx, c, DrafterOptions{});
  const Normal normal(1);
  BenchStepResult out;
  for (Parameter& p : drafter.parameters()) {
    const bool norm = p.is_vector && p.name.ends_with("norm.weight");
    const std::vector<float> v = norm ? std::vector<float>(static_cast<size_t>(p.value.size()), 1.0f) : normal.values(p.value.size(), 0.02f);
    drafter.set(p, {v.data(), DType::f32, p.value.rows, p.value.cols, p.value.cols});
    out.parameters += p.value.size();
    out.trainable += p.trainable ? p.value.size() : 0;
  }
  drafter.refresh();
  train::TargetHead target;
  target.head.value = drafter.find("lm_head.weight")->value;  // the target's head is the same memory
  target.head.first_columns_of = &drafter.head;
  refresh(ctx, {&target.head});
  target.apply_norm = false;

  std::vector<int32_t> tokens, anchors;
  for (int64_t t = 0; t < shape.tokens; ++t) tokens.push_back(static_cast<int32_t>(t * 7919 % (c.vocab - 1)));
  for (int64_t a = 0; a < shape.anchors; ++a) anchors.push_back(static_cast<int32_t>(a * (shape.tokens - 1) / shape.anchors));
  const std::vector<uint8_t> mask(tokens.size(), 1);
  const std::vector<PackedDocument> documents{{0, shape.tokens}};
  PlanInput in = plan_input(c);
  in.tokens = tokens, in.mask = mask, in.documents = documents, in.anchors = anchors;
  in.chunk_slots = o.chunk_slots;
  train::MicroBatch batch;
  batch.plan = make_batch_plan(in);
  const int64_t e = c.target_hidden, tap_cols = c.n_taps() * e, width = tap_cols + e;
  const std::vector<float> random = normal.values(shape.tokens * width, 1.0f);
  std::vector<bf16> states;
  for (float v : random) states.push_back(to_bf16(v));
  batch.taps = {states.data(), DType::bf16, shape.tokens, tap_cols, width};
  batch.last = {states.data() + tap_cols, DType::bf16, shape.tokens, e, width};

  const train::StepPlan plan = train::plan_step(c, objective, false, backend_options.precision, batch.plan);
  train::TrainStep step(ctx, drafter, target, objective, plan.arena_bytes);
  train::OptimizerOptions optimizer_options;
  optimizer_options.muon = o.optimizer == "muon";
  train::Optimizer optimizer(drafter, optimizer_options);

  ThreadPool pool(o.threads > 0 ? o.threads : usable_cores());
  const model::cpu::Kernel& kernel = model::cpu::select_kernel(o.kernel);
  const DType type = backend_options.precision == Precision::bf16 ? DType::bf16 : DType::f32;
  std::vector<double> whole, compute, update;
  double limit = 0;
  for (int i = 0; i <= o.steps; ++i) {
    limit = std::max(limit, peak_gflops(pool, kernel.table(), type));
    const double t0 = now_s();
    const train::StepMetrics m = step.run(batch, true, Write::overwrite);
    const double t1 = now_s();
    optimizer.step(1e-4, 1 / m.weight_sum);
    const double t2 = now_s();
    if (i == 0) continue;  // warm-up
    out.slots = m.slots;
    compute.push_back(t1 - t0), update.push_back(t2 - t1), whole.push_back(t2 - t0);
  }
  out.step_seconds = median(whole), out.forward_backward_seconds = median(compute), out.optimizer_seconds = median(update);
  out.peak_rss_bytes = peak_rss_bytes();

  const std::string device = fmt::format("{}, {} threads", model::cpu::cpu_model_name(), pool.size()), name(kernel.name());
  BenchResult rate{fmt::format("step {} {} {}", o.shape, o.precision, o.optimizer), out.slots / out.step_seconds, "slots/s", 0, 0, {}, name, device};
  for (double s : whole) rate.samples.push_back(out.slots / s);
  // Slots a second if the step took the time of its products at the limit.
  rate.limit = out.slots / (plan.counts.flops / (limit * 1e9));
  rate.share_of_limit = rate.value / rate.limit;
  BenchResult flops{fmt::format("forward and backward, {:.3g} FLOP", plan.counts.flops), plan.counts.flops / out.forward_backward_seconds * 1e-9, "GFLOP/s", limit, 0, {}, name, device};
  for (double s : compute) flops.samples.push_back(plan.counts.flops / s * 1e-9);
  flops.share_of_limit = flops.value / limit;
  out.results = {rate, flops};
  out.text = bench_table(out.results) +
             fmt::format("row of {} tokens, {} anchors of {} slots, {:.0f} supervised; {} parameters, {} trained\n"
                         "step {:.3f} s: forward and backward {:.3f} s, optimizer {:.3f} s; arena {}, peak memory {}\n",
                         shape.tokens, shape.anchors, c.block, out.slots, out.parameters, out.trainable, out.step_seconds, out.forward_backward_seconds,
                         out.optimizer_seconds, format_bytes(static_cast<double>(plan.arena_bytes)), format_bytes(static_cast<double>(out.peak_rss_bytes)));
  return out;
}

}  // namespace dspark::job
