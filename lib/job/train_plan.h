// From `train`'s options to a plan (job/plan.h): of a named shape alone, or of a run on a store.
#pragma once

#include "job/train.h"
#include "train/data.h"

namespace dspark::job {

// Before anything is checked: what --shape decides and nobody gave becomes the options' value, so that they describe the shape.
void adopt_shape(TrainOptions& options);
// Both print the plan (and write it to --json).
void plan_shape(const TrainOptions& options, const train::Objective& objective);
void plan_run(const TrainOptions& options, const model::DrafterConfig& config, const train::Objective& objective, const train::Dataset& data,
              const std::vector<int32_t>& kept, int64_t steps, int64_t batch_docs);

}  // namespace dspark::job
