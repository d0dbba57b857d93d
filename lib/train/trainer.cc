#include "train/trainer.h"

#include <algorithm>
#include <cmath>
#include <future>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/log.h"
#include "core/stop.h"
#include "train/plan_step.h"

namespace dspark::train {

using namespace model;

namespace {
Precision precision_of(const Context& ctx) {
  switch (ctx.act_dtype()) {
    case DType::bf16: return Precision::bf16;
    case DType::f32: return Precision::fp32;
    default: return Precision::fp64;
  }
}
}  // namespace

Trainer::Trainer(Drafter& drafter, TargetHead& target, const Dataset& data, const PackTarget& pack_target, const Objective& objective,
                 const OptimizerOptions& optimizer, const TrainerOptions& options)
    : drafter_(drafter), target_(target), data_(data), pack_target_(pack_target), objective_(objective), options_(options),
      optimizer_(drafter, optimizer) {
  options_.pack.gamma = objective.gamma;
  const Precision precision = precision_of(drafter.context());
  const BatchPlan largest = largest_row(drafter.config(), data, options_.pack);
  const StepPlan plan = plan_step(drafter.config(), objective, target.apply_norm, precision, largest);
  flops_ = std::make_unique<StepFlops>(drafter.config(), objective, target.apply_norm, precision);
  arena_bytes_ = plan.arena_bytes;
  step_ = std::make_unique<TrainStep>(drafter.context(), drafter, target, objective, arena_bytes_);
}

void Trainer::resume(const FoundCheckpoint& checkpoint) {
  load_checkpoint(checkpoint, drafter_, optimizer_);
  first_step_ = checkpoint.step;
}

StepBatch Trainer::read_step(int64_t step) const {
  std::vector<Dataset::Draw> documents;
  for (int64_t i = 0; i < options_.batch_docs; ++i) documents.push_back(data_.draw(step * options_.batch_docs + i));
  StepBatch batch = make_step_batch(documents, pack_target_, options_.pack);
  for (const auto& row : batch.rows)
    if (row->batch.plan.n_slots() > 0) batch.flops += flops_->of(row->batch.plan);
  return batch;
}

StepMetrics Trainer::validate() {
  StepMetrics total;
  const auto n = std::min<int64_t>(static_cast<int64_t>(data_.validation().size()), options_.max_validation_docs);
  for (int64_t i = 0; i < n; ++i) {
    // Epoch -1: the same anchors at every validation.
    const StepBatch batch = make_step_batch({{data_.validation()[static_cast<size_t>(i)], -1}}, pack_target_, options_.pack);
    for (const auto& row : batch.rows)
      if (row->batch.plan.n_slots() > 0) total.add(step_->run(row->batch, false, Write::overwrite));
  }
  return total;
}

void Trainer::save(int64_t step, const StepMetrics* validation) {
  Json state = parse_json(options_.config, "run configuration");
  if (validation && std::isfinite(validation->tau())) state["validation_tau"] = validation->tau();
  save_checkpoint(options_.out, step, drafter_, optimizer_, state, options_.write_drafter);
  prune_checkpoints(options_.out, options_.keep);
}

// A step that was enqueued: what its record needs, and the data that the device may still be reading.
struct Trainer::Enqueued {
  StepRecord record;
  StepBatch batch;
  std::vector<Readback> slots;  // a micro-step each; grows to the most there were
  Readback scalars;
  bool open = false;

  void enqueue(Trainer& t, int64_t step) {
    const double start = now_s();
    size_t micro_steps = 0;
    const auto rows = static_cast<size_t>(std::count_if(batch.rows.begin(), batch.rows.end(), has_slots));
    if (slots.size() < rows) slots.resize(rows);
    for (const auto& row : batch.rows)
      if (has_slots(row)) {
        t.step_->enqueue(row->batch, true, micro_steps == 0 ? Write::overwrite : Write::add, slots[micro_steps]);
        ++micro_steps;
      }
    const double middle = now_s();
    record.lr = t.options_.schedule.at(step);
    record.tokens = batch.tokens;
    record.flops = batch.flops;
    record.applied = micro_steps > 0;
    if (micro_steps > 0)
      t.optimizer_.enqueue(record.lr, t.objective_.denominator == Denominator::pooled ? 1.0 / batch.weight_sum : 1.0 / static_cast<double>(micro_steps),
                           scalars);
    const double end = now_s();
    record.compute_ms = 1e3 * (middle - start), record.optimizer_ms = 1e3 * (end - middle), record.step_ms = record.data_ms + 1e3 * (end - start);
    open = true;
  }

  // Waits for the device's results of this step.
  void finish(Trainer& t, TrainerResult& result) {
    if (!open) return;
    open = false;
    size_t i = 0;
    for (const auto& row : batch.rows)
      if (has_slots(row)) record.metrics.add(t.step_->metrics(row->batch, slots[i++]));
    if (record.applied) {
      const auto update = Optimizer::result(scalars);
      record.grad_norm = update.grad_norm;
      record.applied = update.applied;
      DS_REQUIRE(update.applied || !t.options_.stop_on_nonfinite,
                 "step {}: the gradient is not finite (its norm is {}); the last checkpoint is whole. Lower --lr, or go on without such steps with --on-nonfinite skip",
                 record.step, update.grad_norm);
    }
    record.loss = record.metrics.loss(t.objective_);
    result.skipped += record.applied ? 0 : 1;
    result.last_loss = record.loss;
    if (t.options_.on_step) t.options_.on_step(record);
  }

  static bool has_slots(const std::unique_ptr<HostRow>& row) { return row->batch.plan.n_slots() > 0; }
};

TrainerResult Trainer::run() {
  TrainerResult result;
  const double start = now_s();
  // Step s is finished after step s + 1 was enqueued: the device never waits for the host to read a loss.
  Enqueued enqueued[2];
  auto finish_all = [&](int64_t step) {
    for (const int64_t s : {step - 2, step - 1})
      if (s >= 0) enqueued[s % 2].finish(*this, result);
  };
  auto validation = [&](int64_t step) {
    if (data_.validation().empty()) return false;
    result.validation = validate();
    result.has_validation = true;
    StepRecord r;
    r.step = step, r.total = options_.steps, r.phase = "validation";
    r.metrics = result.validation;
    r.loss = r.metrics.loss(objective_);
    if (options_.on_step) options_.on_step(r);
    return true;
  };
  std::future<StepBatch> next;
  if (first_step_ < options_.steps) next = std::async(std::launch::async, [this, s = first_step_] { return read_step(s); });
  int64_t last_saved = first_step_;
  int64_t step = first_step_;
  while (step < options_.steps) {
    const bool out_of_time = options_.time_limit_s > 0 && now_s() - start > options_.time_limit_s;
    if (stop_requested() || out_of_time) {
      result.stopped = true;
      break;
    }
    Enqueued& now = enqueued[step % 2];
    now.record = {};
    now.record.step = step + 1, now.record.total = options_.steps;
    const double waiting = now_s();
    now.batch = next.get();
    now.record.data_ms = 1e3 * (now_s() - waiting);
    if (step + 1 < options_.steps) next = std::async(std::launch::async, [this, s = step + 1] { return read_step(s); });
    now.enqueue(*this, step);
    ++step;
    if (step - 2 >= first_step_) enqueued[(step - 2) % 2].finish(*this, result);
    const bool validate_now = options_.validate_every > 0 && step % options_.validate_every == 0 && step < options_.steps;
    const bool save_now = options_.save_every > 0 && step % options_.save_every == 0 && step < options_.steps;
    if (validate_now || save_now) finish_all(step);
    const bool validated = validate_now && validation(step);
    const auto best = validated ? best_checkpoint(options_.out) : std::nullopt;
    if (save_now || (validated && (!best || result.validation.tau() > best->tau))) {
      save(step, validated ? &result.validation : nullptr);
      last_saved = step;
    }
  }
  if (next.valid()) next.wait();
  finish_all(step);
  result.steps = step;
  DS_REQUIRE(result.stopped || step == first_step_ || result.skipped < step - first_step_,
             "none of {} steps changed the drafter: their gradients were not finite, or no slot was supervised; look at --loss, --tap-noise and --lr", step - first_step_);
  DS_REQUIRE(result.stopped || std::isfinite(result.last_loss), "the loss of step {} is {}: the run diverged, and its drafter is not written; lower --lr or --clip", step, result.last_loss);
  const bool validated = !result.stopped && validation(step);
  if (step > last_saved || !has_checkpoint(options_.out)) save(step, validated ? &result.validation : nullptr);
  if (!result.stopped && options_.write_drafter) options_.write_drafter(options_.out);
  result.best = best_checkpoint(options_.out);
  result.seconds = now_s() - start;
  return result;
}

}  // namespace dspark::train
