#include "train/plan_step.h"

#include <algorithm>

#include "train/planned_step.h"
#include "train/shards.h"

namespace dspark::train {

using namespace model;

StepPlan plan_step(const DrafterConfig& config, const Objective& objective, bool apply_norm, Precision precision, const BatchPlan& row) {
  PlannedStep step(config, objective, apply_norm, precision);
  StepPlan plan;
  plan.memory = step.run(row);
  plan.weight_bytes = step.weight_bytes(), plan.packed_bytes = step.packed_bytes();
  plan.counts = step.backend().counts();
  plan.entries = step.backend().entries();
  plan.products = step.backend().products();
  return plan;
}

BatchPlan full_row(const DrafterConfig& config, int64_t context, int64_t anchors, int64_t chunk_slots) {
  // Every token is another one than those before it, and the anchors lie as far apart as their blocks allow, so that they need as
  // many different target rows as they have slots.
  std::vector<int32_t> tokens, starts;
  for (int64_t t = 0; t < context; ++t) tokens.push_back(static_cast<int32_t>(t % config.vocab));
  const std::vector<uint8_t> mask(static_cast<size_t>(context), 1);
  const int64_t n = std::min(anchors, context - 1), room = context - 1 - config.block;
  for (int64_t a = 0; a < n; ++a) starts.push_back(static_cast<int32_t>(n > 1 && n <= room ? a * room / (n - 1) : a));
  const std::vector<PackedDocument> documents{{0, context}};
  PlanInput in = plan_input(config);
  in.tokens = tokens, in.mask = mask, in.documents = documents, in.anchors = starts;
  in.chunk_slots = chunk_slots;
  return make_batch_plan(in);
}

BatchPlan largest_row(const DrafterConfig& config, int64_t context, int64_t anchors, int64_t chunk_slots) {
  BatchPlan row = full_row(config, context, anchors, chunk_slots);
  // A row whose anchors lie unevenly may have a chunk with as many slots, and as many target rows as slots.
  const auto rows = static_cast<int64_t>(row.target_source.size());
  row.max_chunk_slots = std::max(row.max_chunk_slots, chunk_slots > 0 ? std::min(chunk_slots, row.n_slots()) : row.n_slots());
  row.max_chunk_rows = std::max(row.max_chunk_rows, std::min(row.max_chunk_slots, rows));
  return row;
}

BatchPlan largest_row(const DrafterConfig& config, const Dataset& data, const PackOptions& pack) {
  const int64_t context = std::max(pack.row_tokens, data.longest());
  const int64_t anchors = pack.anchors_per_row ? pack.anchors : data.most_anchors(pack.row_tokens, pack.anchors);
  return largest_row(config, context, std::min(context, anchors), pack.chunk_slots);
}

double TensorPlan::update_flops() const {
  double sum = 0;
  for (const PlanEntry& e : update) sum += e.counts.flops;
  return sum;
}

std::map<std::string, int64_t> plan_owners(const DrafterConfig& config, Precision precision, const OptimizerOptions& options, int64_t group) {
  const UpdatePlan plan = plan_update(config, precision, options);
  std::vector<const TensorPlan*> trained;
  std::vector<double> costs;
  for (const TensorPlan& t : plan.tensors)
    if (t.trainable) trained.push_back(&t), costs.push_back(t.update_flops());
  const std::vector<int> owners = assign_owners(costs, group);
  std::map<std::string, int64_t> by_name;
  for (size_t i = 0; i < trained.size(); ++i) by_name[trained[i]->name] = owners[i];
  return by_name;
}

UpdatePlan plan_update(const DrafterConfig& config, Precision precision, const OptimizerOptions& options) {
  const auto backend = planner(precision);
  Context& ctx = backend->context();
  Drafter drafter(ctx, config, DrafterOptions{.train_embeddings = config.own_embeddings()});
  Optimizer optimizer(drafter, options);
  const auto bytes = [](const Tensor& t) { return t ? t.size() * dtype_bytes(t.dtype) : 0; };
  UpdatePlan plan;
  for (const Parameter& p : drafter.parameters()) {
    TensorPlan t;
    t.name = p.name, t.trainable = p.trainable, t.size = p.value.size();
    t.muon = p.trainable && options.muon && takes_muon(p);
    t.value_bytes = bytes(p.value);
    t.master_bytes = p.cast_on_update() ? bytes(p.master) : 0;
    t.grad_bytes = bytes(p.grad);
    for (size_t j = 0; p.trainable && j < optimizer.states().size(); ++j) {
      const OptimizerState& s = optimizer.states()[j];
      if (s.name != p.name) continue;
      t.state_bytes = bytes(s.m) + bytes(s.v);
      t.work_bytes = t.muon ? muon_work(ctx, p.grad.rows, p.grad.cols) : 0;
      backend->reset_counts();
      optimizer.enqueue_norm(j);
      optimizer.enqueue_update(j);
      t.update = backend->entries();
    }
    plan.tensors.push_back(std::move(t));
  }
  backend->reset_counts();
  drafter.refresh_trainable();
  plan.everywhere = backend->entries();
  return plan;
}

}  // namespace dspark::train
