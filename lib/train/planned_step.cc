#include "train/planned_step.h"

namespace dspark::train {

using namespace model;

std::unique_ptr<PlanBackend> planner(Precision precision) {
  BackendOptions options;
  options.device = "plan";
  options.precision = precision;
  return make_plan_backend(options);
}

PlannedStep::PlannedStep(const DrafterConfig& config, const Objective& objective, bool apply_norm, Precision precision)
    : objective_(objective), backend_(planner(precision)),
      drafter_(backend_->context(), config, DrafterOptions{.train_embeddings = config.own_embeddings()}) {
  Context& ctx = backend_->context();
  // A frozen head is the target's, in the same memory.
  const bool shared = !config.own_embeddings();
  target_.head.value = shared ? drafter_.find("lm_head.weight")->value : ctx.allocate(ctx.act_dtype(), config.draft_vocab, config.target_hidden);
  if (shared) target_.head.first_columns_of = &drafter_.head;
  target_.norm = ctx.allocate(ctx.acc_dtype(), 1, config.target_hidden);
  target_.apply_norm = apply_norm;
  weight_bytes_ = backend_->allocated_bytes();
  drafter_.refresh();
  refresh(ctx, {&target_.head});
  packed_bytes_ = backend_->packed_bytes();
}

PlannedStep::~PlannedStep() {
  if (drafter_.config().own_embeddings()) backend_->context().free(target_.head.value);
  backend_->context().free(target_.norm);
}

StepMemory PlannedStep::run(const BatchPlan& row) {
  MicroBatch batch;
  batch.plan = row;
  const int64_t e = drafter_.config().target_hidden, tap_cols = drafter_.config().n_taps() * e;
  batch.taps = {nullptr, DType::bf16, row.n_context, tap_cols, tap_cols};
  batch.last = {nullptr, DType::bf16, row.n_context, e, e};
  backend_->reset_counts();
  TrainStep step(backend_->context(), drafter_, target_, objective_, {});
  step.run(batch, true, Write::overwrite);
  return step.peak();
}

}  // namespace dspark::train
