#include "train/step.h"

#include <algorithm>

namespace dspark::train {

using namespace model;

TrainStep::TrainStep(Context& ctx, Drafter& drafter, TargetHead& target, const Objective& objective, const StepMemory& memory)
    : ctx_(ctx), drafter_(drafter), target_(target), objective_(objective), arena_(ctx.device(), memory.arena),
      inboxes_{{{ctx.device(), memory.inbox}, {}, {}, {}}, {{ctx.device(), memory.inbox}, {}, {}, {}}} {
  for (Inbox& inbox : inboxes_) inbox.lists.reserve(static_cast<size_t>(memory.lists));
}

StepMemory TrainStep::peak() const {
  StepMemory m{arena_.peak_bytes(), 0, 0};
  for (const Inbox& inbox : inboxes_) m.inbox = std::max(m.inbox, inbox.arena.peak_bytes()), m.lists = std::max(m.lists, static_cast<int64_t>(inbox.lists.size()));
  return m;
}

void TrainStep::enqueue(const MicroBatch& batch, bool backward, Write write, Readback& slots, const GradientsReady& ready) {
  const DrafterConfig& c = drafter_.config();
  const BatchPlan& plan = batch.plan;
  const DType act = ctx_.act_dtype(), acc = ctx_.acc_dtype();
  const int64_t n_slots = plan.n_slots(), n_rows = static_cast<int64_t>(plan.target_source.size());
  Device& device = ctx_.device();
  arena_.release(0);

  Inbox& inbox = inboxes_[enqueued_++ % 2];
  inbox.arena.release(0);
  device.synchronize(inbox.filled);
  device.wait(Queue::upload, inbox.free);
  const DeviceBatch b = upload_batch(ctx_, inbox.arena, plan, Queue::upload, inbox.lists);
  const Tensor taps = inbox.arena.matrix(act, plan.n_context, c.n_taps() * c.target_hidden);
  const Tensor last = inbox.arena.matrix(act, plan.n_context, c.target_hidden);
  device.upload(Queue::upload, taps, batch.taps);
  device.upload(Queue::upload, last, batch.last);
  inbox.filled = device.record(Queue::upload);
  device.wait(Queue::compute, inbox.filled);

  drafter_.forward(arena_, taps, b, state_);

  // The target's states that some slot needs, after its final norm.
  const Tensor target_state = arena_.matrix(act, n_rows, c.target_hidden);
  {
    const Labelled label(ctx_, {Part::target_vocab});
    if (target_.apply_norm) {
      const int64_t mark = arena_.mark();
      const Tensor raw = arena_.matrix(acc, n_rows, c.target_hidden);
      gather_rows(ctx_, {raw, last, b.target_source});
      add_rmsnorm(ctx_, {.y = target_state, .x = raw, .weight = target_.norm, .eps = target_.eps, .unit_offset = target_.unit_offset});
      arena_.release(mark);
    } else {
      gather_rows(ctx_, {target_state, last, b.target_source});
    }
  }

  // [hidden | e] of the supervised slots.
  const Tensor joint = arena_.matrix(act, n_slots, c.joint_cols());
  const Tensor features = joint.col_range(c.hidden, c.rank);
  MarkovSaved markov;
  gather_rows(ctx_, {joint.col_range(0, c.hidden), state_.hidden, b.slot_row});
  if (c.rank > 0) drafter_.markov_forward(arena_, state_.hidden, b, features, markov);

  const Tensor slot_out = arena_.matrix(acc, n_slots, kSlotOutCols);
  const Tensor scale = arena_.vector(acc, kNumTerms);
  d_joint_ = arena_.matrix(acc, n_slots, c.joint_cols());
  for (int t = 0; t < kNumTerms; ++t) fill(ctx_, {scale.col_range(t, 1), objective_.scale(t, plan, batch.weight_sum)});

  // The confidence head's share of the Markov input: vanilla heads have it in d_joint.
  Tensor d_e;
  if (backward && c.confidence && c.confidence_with_markov && c.rank > 0) {
    if (c.markov == Markov::vanilla) {
      d_e = d_joint_.col_range(c.hidden, c.rank);
    } else {
      d_e = arena_.matrix(acc, n_slots, c.rank);
      fill(ctx_, {d_e, 0});
    }
  }

  const int64_t mark = arena_.mark();
  VocabLoss loss;
  loss.joint = joint;
  loss.head = &drafter_.head;
  loss.target_state = target_state;
  loss.target_head = &target_.head;
  loss.target_row = b.target_row;
  loss.label = b.label;
  loss.weight = loss.conf_weight = b.weight;
  loss.scale = scale;
  loss.coef = objective_.coef;
  loss.label_from_target = objective_.label_from_target;
  loss.dpace_alpha = objective_.dpace_alpha;
  loss.dpace_confidence = objective_.dpace_confidence;
  if (loss.dpace_alpha > 0) loss.block_of = b.block_of;
  loss.detach_confidence = objective_.detach_confidence;
  loss.hidden_cols = c.hidden;
  loss.chunks = plan.chunks;
  loss.backward = backward;
  loss.slot_out = slot_out;
  loss.write_dw = write;
  if (c.confidence) {
    loss.conf_w = drafter_.confidence_w;
    loss.conf_b = drafter_.confidence_b;
    if (c.confidence_with_markov && c.rank > 0) loss.conf_e = markov.e;
  }
  if (backward) {
    loss.d_joint = d_joint_;
    loss.d_head = drafter_.d_head;
    if (c.confidence) {
      loss.d_conf_w = drafter_.d_confidence_w;
      loss.d_conf_b = drafter_.d_confidence_b;
      loss.d_conf_e = d_e;
    }
  }
  loss.work = arena_.vector(DType::u8, vocab_loss_work(ctx_, plan.max_chunk_slots, plan.max_chunk_rows, c.draft_vocab, c.joint_cols()));
  vocab_loss(ctx_, loss);
  arena_.release(mark);

  if (backward) {
    const Tensor d_hidden = arena_.matrix(acc, state_.hidden.rows, c.hidden);
    drafter_.markov_backward(arena_, b, markov, d_joint_, d_e, d_hidden, write);
    if (ready) ready(kHeadsBucket);
    drafter_.backward(arena_, taps, b, state_, d_hidden, write, ready);
  }

  inbox.free = device.record(Queue::compute);
  slots.start(ctx_, slot_out);
  device.wait(Queue::compute, slots.event());  // the arena is used again
}

StepMetrics TrainStep::metrics(const MicroBatch& batch, Readback& slots) const {
  return reduce_metrics(batch.plan, slots.wait(), objective_, drafter_.config().confidence);
}

StepMetrics TrainStep::run(const MicroBatch& batch, bool backward, Write write, std::vector<double>* slot_out) {
  Readback slots;
  enqueue(batch, backward, write, slots);
  const auto values = slots.wait();
  if (slot_out) slot_out->assign(values.begin(), values.end());
  return metrics(batch, slots);
}

}  // namespace dspark::train
