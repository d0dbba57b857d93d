// The training loop: batches from a reader thread one step ahead, forward, backward, update, a line a step, validation,
// checkpoints; stops on request between steps.
//
// Of several ranks each has a Trainer of its own, made with the same data and options. A step's rows are dealt to them; one without a row
// takes part with zeros. They stop at the same step when one is asked to. Records, results and the drafter's files are rank 0's; records
// and metrics are of all ranks together.
#pragma once

#include <functional>
#include <future>
#include <optional>
#include <string>

#include "train/checkpoint.h"
#include "train/data.h"
#include "train/schedule.h"
#include "train/step_flops.h"

namespace dspark::train {

struct StepRecord {
  int64_t step = 0, total = 0;
  std::string phase = "train";  // or "validation"
  StepMetrics metrics;
  double loss = 0, lr = 0, grad_norm = 0;
  bool applied = true;          // false: skipped (no supervised slot, or gradients that are not finite)
  int64_t tokens = 0;
  double flops = 0;             // of the step's forward and backward (StepFlops), a rank's on average
  double data_ms = 0, compute_ms = 0, optimizer_ms = 0, step_ms = 0;
};

struct TrainerOptions {
  fs::path out;
  int64_t steps = 0, batch_docs = 8;
  PackOptions pack;
  Schedule schedule;
  int64_t save_every = 0;      // 0: only at the end and on a stop
  int64_t keep = 2;            // and the best by validation
  int64_t validate_every = 0;  // 0: only at the end; a validation better than all before is saved at once
  int64_t max_validation_docs = 64;
  double time_limit_s = 0;     // 0: none
  bool stop_on_nonfinite = false;  // a gradient that is not finite is an Error; else its step is skipped and counted
  std::function<std::string()> config;  // a JSON object that goes into state.json, asked for at each checkpoint
  std::function<void(const StepRecord&)> on_step;             // on rank 0
  std::function<void(const fs::path& folder)> write_drafter;  // on rank 0, for each checkpoint and at the end
  Sharing sharing;  // among ranks; the drafter was made with its `owns`
};

struct TrainerResult {
  int64_t steps = 0, skipped = 0;  // of the whole run, what it resumed from too
  double seconds = 0, last_loss = 0;  // of the last training step
  StepMetrics validation;
  bool has_validation = false, stopped = false, out_of_time = false;  // stopped: on request, or out of time
  std::optional<BestCheckpoint> best;  // by validation, among the checkpoints that are kept
};

class Trainer {
 public:
  Trainer(model::Drafter& drafter, TargetHead& target, const Dataset& data, const PackTarget& pack_target,
          const Objective& objective, const OptimizerOptions& optimizer, const TrainerOptions& options);

  void resume(const FoundCheckpoint& checkpoint);  // before run(): goes on from there
  // Before run(): every kind of product that steps will ask for, on a row of zeros. Changes no weight and no state. Waits.
  void rehearse();
  TrainerResult run();  // what it throws, the other ranks are told
  int64_t arena_bytes() const { return arena_bytes_; }

 private:
  struct Enqueued;
  TrainerResult train(Enqueued* last_two, std::future<StepBatch>& next);
  StepBatch read_step(int64_t step) const;
  StepMetrics validate();
  bool any(bool here);                                 // on some rank
  bool decide(const std::function<bool()>& question);  // rank 0's answer, on all
  StepMetrics sum(const StepMetrics& here);            // over the ranks
  void save(int64_t step, int64_t skipped, const StepMetrics* validation = nullptr);
  void tell(const StepRecord& record);

  model::Drafter& drafter_;
  TargetHead& target_;
  const Dataset& data_;
  PackTarget pack_target_;
  Objective objective_;
  TrainerOptions options_;
  model::Collectives& ranks_;
  Optimizer optimizer_;
  int64_t first_step_ = 0, skipped_before_ = 0, arena_bytes_ = 0;
  std::unique_ptr<StepFlops> flops_;  // the reader thread's
  std::unique_ptr<TrainStep> step_;
};

}  // namespace dspark::train
