// The real step code on the planner: what a row's forward and backward would allocate, compute and move; nothing is allocated or
// computed.
#pragma once

#include <memory>

#include "model/backends.h"
#include "train/step.h"

namespace dspark::train {

std::unique_ptr<model::PlanBackend> planner(model::Precision precision);

class PlannedStep {
 public:
  PlannedStep(const model::DrafterConfig& config, const Objective& objective, bool apply_norm, model::Precision precision);
  ~PlannedStep();
  PlannedStep(const PlannedStep&) = delete;
  PlannedStep& operator=(const PlannedStep&) = delete;

  // Forward and backward of one row, into counts that start at 0; returns the memory it takes. Some microseconds an operator.
  StepMemory run(const model::BatchPlan& row);
  model::PlanBackend& backend() { return *backend_; }
  int64_t weight_bytes() const { return weight_bytes_; }  // weights, masters, gradients
  int64_t packed_bytes() const { return packed_bytes_; }  // their copies in a backend that keeps them

 private:
  Objective objective_;
  std::unique_ptr<model::PlanBackend> backend_;
  model::Drafter drafter_;
  TargetHead target_;
  int64_t weight_bytes_ = 0, packed_bytes_ = 0;
};

}  // namespace dspark::train
