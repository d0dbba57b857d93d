// Sizes a training step before the first one, by running the real step code on the planner: nothing is allocated or computed.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "model/backends.h"
#include "train/data.h"
#include "train/optimizer.h"
#include "train/step.h"

namespace dspark::train {

struct StepPlan {
  StepMemory memory;
  int64_t weight_bytes = 0;     // everything else: weights, masters, gradients
  int64_t packed_bytes = 0;     // the weights' copies in a backend that keeps them (the cpu's)
  model::PlanCounts counts;     // of one micro-step, forward and backward
  std::vector<model::PlanEntry> entries;      // the same by part, direction and kind of work
  std::vector<model::PlanProduct> products;
};

// For one row as it is planned.
StepPlan plan_step(const model::DrafterConfig& config, const Objective& objective, bool apply_norm, model::Precision precision, const model::BatchPlan& row);
// A row of `context` tokens, one document in which every token is a label and `anchors` blocks start, spread evenly.
model::BatchPlan full_row(const model::DrafterConfig& config, int64_t context, int64_t anchors, int64_t chunk_slots);
// No row of that many tokens and blocks needs more than this one.
model::BatchPlan largest_row(const model::DrafterConfig& config, int64_t context, int64_t anchors, int64_t chunk_slots);
// Nor any row that these documents are packed into.
model::BatchPlan largest_row(const model::DrafterConfig& config, const Dataset& data, const PackOptions& pack);

// One named tensor: what it takes, and what its part of an optimizer step costs.
struct TensorPlan {
  std::string name;
  bool trainable = false, muon = false;
  int64_t size = 0;          // elements
  int64_t value_bytes = 0;   // what products read; the master itself where there is no other copy (norms)
  int64_t master_bytes = 0;  // besides value
  int64_t grad_bytes = 0, state_bytes = 0;
  int64_t work_bytes = 0;    // Muon's, while it is updated
  std::vector<model::PlanEntry> update;
  double update_flops() const;
};
struct UpdatePlan {
  std::vector<TensorPlan> tensors;          // in the drafter's order
  std::vector<model::PlanEntry> everywhere;  // what each rank does whoever owns the tensors: refreshing its weights
};
// The owner, a place in a group of that many ranks, of each tensor that is trained: balanced by the optimizer's FLOPs.
std::map<std::string, int64_t> plan_owners(const model::DrafterConfig& config, model::Precision precision, const OptimizerOptions& options, int64_t group);
UpdatePlan plan_update(const model::DrafterConfig& config, model::Precision precision, const OptimizerOptions& options);

}  // namespace dspark::train
