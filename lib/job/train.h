// train: a store of hidden states -> a drafter.
#pragma once

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "job/common.h"
#include "job/plan_options.h"

namespace dspark::job {

struct TrainOptions {
  CommonOptions common;
  std::vector<fs::path> stores;
  std::vector<double> store_weights;  // one a store, or none
  fs::path target, out, init, tensorboard, report;
  std::string recipe = "deepspec", algorithm = "dspark", markov = "vanilla", layout = "anchor", warm_start = "target", taps = "store",
              layer_types = "full", window_rule = "served", rotary = "served", optimizer = "adamw", loss, denominator = "pooled",
              slots = "label-prefix", label = "data", anchors_per = "document", schedule = "cosine", weights = "deepspec", on_nonfinite = "skip";
  int64_t layers = 5, hidden = 0, block = 7, rank = 256, steps = 0, batch_docs = 0, row_tokens = 1024, anchors = 512, draft_vocab = 0, window = 0,
          save_every = 0, keep = 2, chunk_slots = 256, mask_token = -1, validate_every = 0, max_validation_docs = 64;
  double epochs = 0, lr = 6e-4, weight_decay = 0, muon_lr = 0, muon_weight_decay = 0, clip = 1.0, val_fraction = 0.05, decay = 4.0, warmup = 0.04, time_limit_s = 0, rank_timeout_s = 600,
         dpace = 0, tap_noise = 0;
  PlanOptions planning;  // with `plan`
  bool resume = false, plan = false, no_confidence = false, print_config = false, detach_confidence = false, non_causal = false,
       init_partial = false;
  std::vector<std::string> given;  // long names of the options on the command line or in the config file: a recipe leaves them alone
  bool was_given(std::string_view name) const { return std::find(given.begin(), given.end(), name) != given.end(); }
};

// Returns normally when the run is complete; throws Error 75 when it was stopped and can be resumed.
void run_train(const TrainOptions& options);

}  // namespace dspark::job
