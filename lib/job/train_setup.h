// What a run trains, and on what: settled from the options, the target and the stores before anything is on a device.
#pragma once

#include <optional>
#include <vector>

#include "job/init_drafter.h"
#include "job/train.h"
#include "target/target_files.h"
#include "train/data.h"
#include "train/objective.h"

namespace dspark::job {

struct TrainSetup {
  // Opens everything. Throws for what does not fit together. What the drafter decides of the options is settled in them (--warm-start).
  TrainSetup(TrainOptions& options, std::optional<InitDrafter> init_drafter);
  TrainSetup(const TrainSetup&) = delete;
  TrainSetup& operator=(const TrainSetup&) = delete;

  target::TargetFiles files;
  train::Dataset data;
  std::optional<InitDrafter> init;
  bool apply_norm = false;             // the stored last states are from before the target's final norm
  std::vector<model::TapLayer> taps;
  std::vector<int32_t> kept;           // tokens of the draft vocabulary, ascending; empty: all of the target's
  model::DrafterConfig config;
  train::Objective objective;
  int64_t batch_docs = 0, steps = 0;

  // Which store columns are the drafter's taps, and the last state.
  std::vector<int> state_parts() const;
};

// What must be equal to go on with a run.
OrderedJson run_identity(const TrainOptions& options, const TrainSetup& setup);
// Throws with every difference to the run that a checkpoint in `out` is of.
void check_same_run(const Json& saved, const OrderedJson& now, const fs::path& out);

}  // namespace dspark::job
