#include "train/step_flops.h"

#include <algorithm>

namespace dspark::train {

using namespace model;

namespace {

std::unique_ptr<PlanBackend> plan_backend(Precision precision) {
  BackendOptions options;
  options.device = "plan";
  options.precision = precision;
  return make_plan_backend(options);
}

// Keys that the slots of all the row's blocks see in all layers.
double keys_seen(const DrafterConfig& c, const BatchPlan& row) {
  double keys = 0;
  const auto block = static_cast<double>(row.block);
  for (const LayerType type : c.layers) {
    const bool sliding = type == LayerType::sliding && c.window > 0;
    const double own = sliding && c.sliding_causal ? (block + 1) / 2 : block;
    for (size_t a = 0; a < row.anchor_row.size(); ++a) {
      if (row.anchor_row[a] < 0) continue;  // padding
      const int64_t before = row.anchor_row[a] - row.doc_start[a];
      keys += block * (static_cast<double>(sliding ? std::min(before, c.window) : before) + own);
    }
  }
  return keys;
}

}  // namespace

struct StepFlops::Impl {
  DrafterConfig config;
  Objective objective;
  std::unique_ptr<PlanBackend> backend;
  Drafter drafter;
  TargetHead target;

  Impl(const DrafterConfig& c, const Objective& o, bool apply_norm, Precision precision)
      : config(c), objective(o), backend(plan_backend(precision)), drafter(backend->context(), c, DrafterOptions{.train_embeddings = c.own_embeddings()}) {
    Context& ctx = backend->context();
    target.head.value = ctx.allocate(ctx.act_dtype(), c.draft_vocab, c.target_hidden);
    target.norm = ctx.allocate(ctx.acc_dtype(), 1, c.target_hidden);
    target.apply_norm = apply_norm;
  }
  ~Impl() {
    backend->context().free(target.head.value);
    backend->context().free(target.norm);
  }
};

StepFlops::StepFlops(const DrafterConfig& config, const Objective& objective, bool apply_norm, Precision precision)
    : impl_(std::make_unique<Impl>(config, objective, apply_norm, precision)) {}
StepFlops::~StepFlops() = default;

double StepFlops::of(const BatchPlan& row) {
  Impl& s = *impl_;
  MicroBatch batch;
  batch.plan = row;
  const int64_t e = s.config.target_hidden, tap_cols = s.config.n_taps() * e;
  batch.taps = {nullptr, DType::bf16, row.n_context, tap_cols, tap_cols};
  batch.last = {nullptr, DType::bf16, row.n_context, e, e};
  s.backend->reset_counts();
  TrainStep(s.backend->context(), s.drafter, s.target, s.objective, 0).run(batch, true, Write::overwrite);
  double flops = s.backend->counts().flops;
  for (const char* name : {"anchor_attention", "anchor_attention_backward"})
    if (const auto it = s.backend->by_operator().find(name); it != s.backend->by_operator().end()) flops -= it->second.flops;
  // A key costs each query head two products of HD in the forward (score, value) and five in the backward.
  return flops + keys_seen(s.config, row) * 2 * (2 + 5) * static_cast<double>(s.config.q_cols());
}

}  // namespace dspark::train
