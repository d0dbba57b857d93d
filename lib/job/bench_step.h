// Benchmark of whole training steps at a drafter's shape: forward, loss, backward and optimizer on random states.
//
// Protocol: one row of T tokens, one document, A anchors spread evenly, every slot supervised that can be; one warm-up step, then
// repeats, by the device's own clock. The limit is the device's of matrix products (job/bench_limit.h): what a step could reach if everything but its products cost
// nothing. Beside the measurement stands what `train --plan` predicts for the step: from the data sheet of a GPU that is known by name,
// else from rates that are measured first and know nothing of the shape (job/bench_machine.h).
#pragma once

#include <string>

#include "job/bench_parts.h"
#include "job/bench_result.h"

namespace dspark::job {

struct BenchStepOptions {
  std::string shape = "small";      // job/shapes.h
  int64_t tokens = 0, anchors = 0;  // 0: the shape's
  std::string optimizer = "adamw", precision = "bf16", kernel = "auto", device = "auto";
  int threads = 0, steps = 5;
  int64_t chunk_slots = 256;
  bool parts = false;  // time every operator, and wait for it
  std::string machine = "auto";  // that predicts: this (measured), a name or a file of job/machines.h; auto: see above
};

struct BenchStepResult {
  std::vector<BenchResult> results;  // slots/s, the step's products in GFLOP/s, the optimizer's share
  double step_seconds = 0, forward_backward_seconds = 0, optimizer_seconds = 0, slots = 0;
  double host_seconds = 0;           // to enqueue a step, while the device is at the one before; 0 on a CPU
  double predicted_step_seconds = 0, predicted_forward_backward_seconds = 0, predicted_optimizer_seconds = 0;
  std::vector<PartTime> parts;       // with `parts`, a step's mean
  uint64_t peak_rss_bytes = 0;
  int64_t parameters = 0, trainable = 0;
  std::string text;
};

BenchStepResult bench_step(const BenchStepOptions& options);

}  // namespace dspark::job
