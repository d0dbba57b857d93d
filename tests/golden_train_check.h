// The training fixtures' numbers against what a backend computes, for tests of any backend.
#pragma once

#include <cstdint>
#include <string>

#include "golden_train.h"

namespace dspark::golden {

// Of the fixtures' README: fp64 1e-11 outputs, 1e-10 gradients; fp32 5e-6, 2e-5 with 1e-7 absolute; bf16 3e-2, 1e-1.
struct Tolerance {
  model::BackendOptions options;
  double outputs, gradients, absolute;
  const char* label;
  bool vectors = true;  // their gradients too; in bf16 "small vectors can be far off"
  bool exact() const { return absolute == 0; }
};

// A drafter_step case: forward, losses, metrics, every gradient.
void check_step(const Case& c, const Tolerance& tol);
// Trajectories, all steps or the first ones; the final weights only where all are taken. Of DeepSpec: micro-batches in turn.
void check_trajectory(const Case& c, const Tolerance& tol, int64_t steps = -1);
// Of speculators: three rows in turn, new anchors each step; `run` is adamw or muon (with AdamW for the rest).
void check_trajectory(const Case& c, const Tolerance& tol, const std::string& run, int64_t steps = -1);

}  // namespace dspark::golden
