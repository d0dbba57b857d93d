// What a training step must compute: the model FLOPs that `mfu` is made of. The planner runs the step's own code on each row; only
// attention is counted here, by the context that the row's anchors really see (the planner does not know where they are).
#pragma once

#include <memory>

#include "model/backends.h"
#include "train/step.h"

namespace dspark::train {

class PlannedStep;

class StepFlops {
 public:
  StepFlops(const model::DrafterConfig& config, const Objective& objective, bool apply_norm, model::Precision precision);
  ~StepFlops();
  // Forward and backward of one row; a multiply and an add are two.
  double of(const model::BatchPlan& row);

 private:
  model::DrafterConfig config_;
  std::unique_ptr<PlannedStep> step_;
};

}  // namespace dspark::train
