#include "train/plan_step.h"

#include <algorithm>

namespace dspark::train {

using namespace model;

StepPlan plan_step(const DrafterConfig& config, const Objective& objective, bool apply_norm, Precision precision, const BatchPlan& row) {
  BackendOptions options;
  options.device = "plan";
  options.precision = precision;
  auto backend = make_plan_backend(options);
  Context& ctx = backend->context();
  Drafter drafter(ctx, config, DrafterOptions{.train_embeddings = config.own_embeddings()});
  TargetHead target;
  target.head.value = ctx.allocate(ctx.act_dtype(), config.draft_vocab, config.target_hidden);
  target.norm = ctx.allocate(ctx.acc_dtype(), 1, config.target_hidden);
  target.apply_norm = apply_norm;
  StepPlan plan;
  plan.weight_bytes = backend->allocated_bytes();
  MicroBatch batch;
  batch.plan = row;
  const int64_t e = config.target_hidden, tap_cols = config.n_taps() * e;
  batch.taps = {nullptr, DType::bf16, row.n_context, tap_cols, tap_cols};
  batch.last = {nullptr, DType::bf16, row.n_context, e, e};
  {
    TrainStep step(ctx, drafter, target, objective, 0);
    step.run(batch, true, Write::overwrite);
    plan.arena_bytes = step.arena_peak();
  }
  plan.counts = backend->counts();
  ctx.free(target.head.value);
  ctx.free(target.norm);
  return plan;
}

StepPlan plan_step(const DrafterConfig& config, const Objective& objective, bool apply_norm, Precision precision, int64_t context,
                   int64_t anchors, int64_t chunk_slots) {
  // The worst row: one document in which every token is a label, and another token than those before it. Its anchors lie as far
  // apart as their blocks allow, so that they need as many different target rows as they have slots.
  std::vector<int32_t> tokens, starts;
  for (int64_t t = 0; t < context; ++t) tokens.push_back(static_cast<int32_t>(t % config.vocab));
  const std::vector<uint8_t> mask(static_cast<size_t>(context), 1);
  const int64_t n = std::min(anchors, context - 1), room = context - 1 - config.block;
  for (int64_t a = 0; a < n; ++a) starts.push_back(static_cast<int32_t>(n > 1 && n <= room ? a * room / (n - 1) : a));
  const std::vector<PackedDocument> documents{{0, context}};
  PlanInput in = plan_input(config);
  in.tokens = tokens, in.mask = mask, in.documents = documents, in.anchors = starts;
  in.chunk_slots = chunk_slots;
  BatchPlan row = make_batch_plan(in);
  // A row whose anchors lie unevenly may have a chunk with as many slots, and as many target rows as slots.
  const auto rows = static_cast<int64_t>(row.target_source.size());
  row.max_chunk_slots = std::max(row.max_chunk_slots, chunk_slots > 0 ? std::min(chunk_slots, row.n_slots()) : row.n_slots());
  row.max_chunk_rows = std::max(row.max_chunk_rows, std::min(row.max_chunk_slots, rows));
  return plan_step(config, objective, apply_norm, precision, row);
}

}  // namespace dspark::train
