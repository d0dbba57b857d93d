#include "train/step_flops.h"

#include <algorithm>

#include "train/planned_step.h"

namespace dspark::train {

using namespace model;

namespace {

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

StepFlops::StepFlops(const DrafterConfig& config, const Objective& objective, bool apply_norm, Precision precision)
    : config_(config), step_(std::make_unique<PlannedStep>(config, objective, apply_norm, precision)) {}
StepFlops::~StepFlops() = default;

double StepFlops::of(const BatchPlan& row) {
  step_->run(row);
  const PlanBackend& backend = step_->backend();
  double flops = backend.counts().flops;
  for (const char* name : {"anchor_attention", "anchor_attention_backward"})
    if (const auto it = backend.by_operator().find(name); it != backend.by_operator().end()) flops -= it->second.flops;
  // A key costs each query head two products of HD in the forward (score, value) and five in the backward.
  return flops + keys_seen(config_, row) * 2 * (2 + 5) * static_cast<double>(config_.q_cols());
}

}  // namespace dspark::train
