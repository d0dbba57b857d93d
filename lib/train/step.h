// One micro-step: a packed row through the drafter, the loss head and back.
//
// A TrainStep owns the arena, sized by running the same code on the planner for the largest row it will see. It writes
// gradients (overwritten or added) and hands out the loss head's per-slot results; the optimizer is separate.
#pragma once

#include <memory>
#include <vector>

#include "model/drafter.h"
#include "model/readback.h"
#include "train/objective.h"

namespace dspark::train {

// The target's side of the loss: its head's kept rows and its final norm.
struct TargetHead {
  model::Weight head;     // [VD, E]
  model::Tensor norm;     // acc [1, E]
  double eps = 1e-6;
  bool unit_offset = false;  // x * (1 + w)
  bool apply_norm = true;    // the states are pre_norm
};

// One packed row on the host. States [T, L*E] and [T, E] may be views into one matrix through their strides.
struct MicroBatch {
  model::BatchPlan plan;
  model::ConstHostMatrix taps, last;
  double weight_sum = -1;  // of the micro-step over all ranks (Denominator::micro); < 0: the plan's own
};

// What a step's device memory takes, in bytes, and its host memory.
struct StepMemory {
  int64_t arena = 0;  // saved activations and work; every micro-step's in turn
  int64_t inbox = 0;  // a batch: its plan and states
  int64_t lists = 0;  // on the host, 32-bit numbers: the plan on its way
  int64_t total() const { return arena + 2 * inbox; }
};

// Two inboxes take turns: while one micro-step computes, the next one's batch comes in.
class TrainStep {
 public:
  // Memory for the largest row; none: for planning, unlimited.
  TrainStep(model::Context& ctx, model::Drafter& drafter, TargetHead& target, const Objective& objective, const StepMemory& memory);

  // Enqueues the micro-step and the way back of its slots' results [S, kSlotOutCols]. With backward, gradients follow `write`.
  // The batch must live until the results are here. `ready` hears of each bucket of gradients while the backward goes on.
  void enqueue(const MicroBatch& batch, bool backward, model::Write write, model::Readback& slots, const model::GradientsReady& ready = {});
  StepMetrics metrics(const MicroBatch& batch, model::Readback& slots) const;  // waits
  StepMetrics run(const MicroBatch& batch, bool backward, model::Write write, std::vector<double>* slot_out = nullptr);  // both
  StepMemory peak() const;

  // For the golden tests: what the last run left in the arena, valid until the next.
  const model::ForwardState& state() const { return state_; }
  const model::Tensor& d_joint() const { return d_joint_; }

 private:
  model::Context& ctx_;
  model::Drafter& drafter_;
  TargetHead& target_;
  Objective objective_;
  struct Inbox {
    model::Arena arena;
    model::Event free;           // nothing enqueued so far reads it any more
    std::vector<int32_t> lists;  // the plan's, on their way
    model::Event filled;
  };
  model::Arena arena_;
  Inbox inboxes_[2];
  uint64_t enqueued_ = 0;
  model::ForwardState state_;
  model::Tensor d_joint_;
};

}  // namespace dspark::train
