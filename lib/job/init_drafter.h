// --init: what a run takes over from the drafter it continues, and what it refuses.
//
// Everything a drafter's weights were trained as stays (recipe.h fills in the options), its draft vocabulary above all: rows of
// its head mean tokens by their place. Embeddings and head come from the target, unless the drafter has a width of its own.
#pragma once

#include <optional>

#include "job/train.h"
#include "model/drafter_files.h"
#include "target/target_files.h"
#include "train/init.h"

namespace dspark::job {

class InitDrafter {
 public:
  // Reads --init; a run that has begun goes on as its own drafter when the other one is gone. Nothing without --init.
  static std::optional<InitDrafter> open(const TrainOptions& options);

  const model::DrafterConfig& config() const { return files_.config; }
  // Before the new config is made. Throws for a draft vocabulary that may not change, for heads nobody says how to turn, and says
  // what is another one than the options' reader may expect.
  void check(const TrainOptions& options, const target::TargetFiles& target);
  // The draft vocabulary the run keeps; nothing: a new one is to be chosen.
  std::optional<std::vector<int32_t>> kept() const;
  // The drafter's taps where the store has them all, else the store's.
  std::vector<model::TapLayer> taps(const std::vector<int>& stored) const;
  int64_t mask_token() const { return same_.tokenizer ? files_.config.mask_token : -1; }

  // Throws with every tensor that cannot go on in a drafter of this config, unless --init-partial.
  void check_fit(const TrainOptions& options, const model::DrafterConfig& config);
  // Fills a drafter of that config.
  void load(model::Drafter& drafter, const TrainOptions& options, const model::TensorValues& target) const;

 private:
  InitDrafter(fs::path name, model::DrafterFiles files) : name_(std::move(name)), files_(std::move(files)) {}
  fs::path name_;
  model::DrafterFiles files_;
  train::SameTokens same_;
  std::vector<train::Mismatch> mismatches_;
};

}  // namespace dspark::job
