// From options to what a training run is made of: each made in one place, for the run, its dry run and its plan.
#pragma once

#include <vector>

#include "job/train.h"
#include "train/data.h"
#include "train/init.h"
#include "train/optimizer.h"
#include "train/schedule.h"

namespace dspark::job {

// Everything that can be said (exit 2) before a file is read.
void check_options(const TrainOptions& options);
// `--layer-types`: one word for all layers, or one for each, in order. Throws (exit 2).
std::vector<model::LayerType> layer_types(const TrainOptions& options);
// Throws (exit 2) for terms and weights that do not go together.
train::Objective make_objective(const TrainOptions& options, bool confidence);
// The shape of a drafter that is not `--init`'s.
train::NewDrafter new_drafter(const TrainOptions& options);
train::OptimizerOptions optimizer_options(const TrainOptions& options);
train::PackOptions pack_options(const TrainOptions& options);
train::Schedule make_schedule(const TrainOptions& options, int64_t steps);
// [vocab]: a token's place in the draft vocabulary, -1 without one; empty when all tokens are kept.
std::vector<int32_t> draft_ids(const std::vector<int32_t>& kept, int64_t vocab);

}  // namespace dspark::job
