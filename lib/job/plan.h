// `train --plan`: what a run takes and how long, before anything is allocated. The counts come from the real step code on the planner
// (train/plan_step.h), the sharing among ranks from train/shards.h, the times from a machine's rates (job/machines.h).
#pragma once

#include <string>
#include <vector>

#include "core/json.h"
#include "job/plan_options.h"
#include "job/predict.h"
#include "train/plan_step.h"

namespace dspark::job {

// The run to be planned.
struct PlanInput {
  std::string name;
  model::DrafterConfig config;
  train::Objective objective;
  train::OptimizerOptions optimizer;
  bool apply_norm = true;
  model::Precision precision = model::Precision::bf16;
  std::vector<model::BatchPlan> rows;  // micro-steps as they come, of one step: their mean is planned
  model::BatchPlan largest;            // the arena's
  double rows_per_step = 1;            // over all ranks
  int64_t steps = 0;                   // 0: not said
  double codec_ratio = 1;
  std::string codec;                   // where the ratio is from
};

struct Plan {
  struct Group {
    std::string name;
    int64_t total = 0, trainable = 0;
  };
  struct RankShare {
    int64_t tensors = 0;
    double flops = 0, seconds = 0;                                      // of its part of the optimizer step
    int64_t owned_bytes = 0;                                            // gradients of its tensors, in acc
    int64_t master_bytes = 0, state_bytes = 0, work_bytes = 0, bytes = 0;  // bytes: everything on this rank
  };
  std::vector<Group> groups;
  int64_t parameters = 0, trainable = 0;
  // The same on every rank.
  int64_t weight_bytes = 0, packed_bytes = 0, gradient_bytes = 0, arena_bytes = 0, staging_bytes = 0;
  bool staging_counts = false;       // the host's memory is the machine's
  int64_t group_ranks = 1;           // of a shard group
  std::vector<RankShare> ranks;      // of one group
  double imbalance = 1;
  std::vector<PartCost> micro_step;  // of one row
  std::vector<PartCost> update;      // of all tensors, as if on one rank
  double micro_steps = 1;            // of the busiest rank
  // Seconds of a step. The reduction overlaps the last backward, what it exceeds it by is `reduce`.
  double forward_backward = 0, reduce = 0, optimizer = 0, gather = 0, step = 0;
  double reduce_bytes = 0, gather_bytes = 0;  // sent by one rank, at most
  double reduce_rate = 0, gather_rate = 0;    // bytes a second; 0: not known
  std::string limit;
  double tokens_per_step = 0, store_bytes_per_step = 0;  // all ranks; as states in bf16, before the codec
  const RankShare& fullest() const;
  bool fits(const Machine& machine) const { return static_cast<double>(fullest().bytes) <= machine.memory_bytes; }
};

Plan make_plan(const PlanInput& input, const PlanOptions& options, const Machine& machine);
std::string plan_text(const Plan& plan, const PlanInput& input, const PlanOptions& options, const Machine& machine);
OrderedJson plan_json(const Plan& plan, const PlanInput& input, const PlanOptions& options, const Machine& machine);

// The group a drafter's tensor is counted in: embed_tokens, lm_head, fc, attention, mlp, norms, markov or confidence.
std::string tensor_group(const std::string& name);

}  // namespace dspark::job
