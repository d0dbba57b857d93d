// Sizes a training step before the first one, by running the real step code on the planner.
#pragma once

#include "model/backends.h"
#include "train/data.h"

namespace dspark::train {

struct StepPlan {
  int64_t arena_bytes = 0;
  int64_t weight_bytes = 0;     // everything outside the arena: weights, masters, gradients
  model::PlanCounts counts;     // of one micro-step, forward and backward
};

// For one row as it is planned.
StepPlan plan_step(const model::DrafterConfig& config, const Objective& objective, bool apply_norm, model::Precision precision, const model::BatchPlan& row);
// For a row of `context` tokens in which `anchors` blocks start.
StepPlan plan_step(const model::DrafterConfig& config, const Objective& objective, bool apply_norm, model::Precision precision,
                   int64_t context, int64_t anchors, int64_t chunk_slots);

}  // namespace dspark::train
