// A drafter and a micro-step built from a training fixture, or from a packed drafter with a fixture's inputs.
#pragma once

#include <memory>
#include <span>

#include "golden.h"
#include "model/backends.h"
#include "model/drafter_files.h"
#include "target/target_files.h"
#include "train/step.h"

namespace dspark::golden {

model::DrafterConfig drafter_config(const Json& description);
train::Objective objective(const Json& description);

// Documents [N, T, ...] (or one [T, ...]) of a dsp case as one packed row, and how to find a fixture's rows in it.
struct PackedCase {
  std::vector<int32_t> tokens, anchors;
  std::vector<uint8_t> mask;
  std::vector<model::PackedDocument> documents;
  std::vector<double> taps, last;
  std::vector<int64_t> context_rows;  // packed context row -> fixture row n*T + t
  std::vector<int64_t> anchor_slots;  // packed anchor -> fixture anchor n*A + a
  train::MicroBatch batch;
};
// `prefix` is "in." or "micro0.". Of spk cases with several rows [N, T, ...] it takes one, and one row of anchors.
// `draft_id` as in PlanInput, empty for the full vocabulary (and for what takes its labels from the target).
std::unique_ptr<PackedCase> pack_case(const formats::SafetensorsFile& file, const std::string& prefix,
                                      const model::DrafterConfig& config, const train::Objective& objective, int64_t row = 0,
                                      int64_t anchor_row = 0, std::span<const int32_t> draft_id = {});

// Everything on one backend.
struct Harness {
  Harness(const model::BackendOptions& options, const Json& description, const formats::SafetensorsFile& file);
  // A drafter folder over its target; last states are pre_norm. Forward only.
  Harness(const model::BackendOptions& options, const model::DrafterFiles& files, const target::TargetFiles& target_files,
          const train::Objective& objective);
  ~Harness();
  std::vector<double> download(const model::Tensor& t);

  std::unique_ptr<model::Backend> backend;
  model::DrafterConfig config;
  train::Objective objective;
  std::unique_ptr<model::Drafter> drafter;
  train::TargetHead target;
  std::unique_ptr<train::TrainStep> step;
};

}  // namespace dspark::golden
