#include "train/trainer.h"

#include <algorithm>
#include <cmath>
#include <future>
#include <nlohmann/json.hpp>

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
  const int64_t context = std::max(options_.pack.row_tokens, data.longest());
  const StepPlan plan = plan_step(drafter.config(), objective, target.apply_norm, precision_of(drafter.context()), context, context,
                                  options_.pack.chunk_slots);
  arena_bytes_ = plan.arena_bytes;
  step_ = std::make_unique<TrainStep>(drafter.context(), drafter, target, objective, arena_bytes_);
}

int64_t Trainer::prepare(bool resume) {
  const auto found = newest_checkpoint(options_.out);
  if (!resume || !found) return 0;
  load_checkpoint(*found, drafter_, optimizer_);
  first_step_ = found->step;
  return first_step_;
}

StepBatch Trainer::read_step(int64_t step) const {
  std::vector<Dataset::Draw> documents;
  for (int64_t i = 0; i < options_.batch_docs; ++i) documents.push_back(data_.draw(step * options_.batch_docs + i));
  return make_step_batch(documents, pack_target_, options_.pack);
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

void Trainer::save(int64_t step) {
  save_checkpoint(options_.out, step, drafter_, optimizer_, parse_json(options_.config, "run configuration"), options_.write_drafter);
  prune_checkpoints(options_.out, options_.keep);
}

TrainerResult Trainer::run() {
  TrainerResult result;
  const double start = now_s();
  auto validation = [&](int64_t step) {
    if (data_.validation().empty()) return;
    result.validation = validate();
    result.has_validation = true;
    StepRecord r;
    r.step = step, r.total = options_.steps, r.phase = "validation";
    r.metrics = result.validation;
    r.loss = r.metrics.loss(objective_);
    if (options_.on_step) options_.on_step(r);
  };
  std::future<StepBatch> next;
  if (first_step_ < options_.steps) next = std::async(std::launch::async, [this, s = first_step_] { return read_step(s); });
  int64_t last_saved = first_step_;
  int64_t step = first_step_;
  for (; step < options_.steps; ++step) {
    const bool out_of_time = options_.time_limit_s > 0 && now_s() - start > options_.time_limit_s;
    if (stop_requested() || out_of_time) {
      result.stopped = true;
      break;
    }
    StepRecord r;
    r.step = step + 1, r.total = options_.steps;
    const double t0 = now_s();
    const StepBatch batch = next.get();
    if (step + 1 < options_.steps) next = std::async(std::launch::async, [this, s = step + 1] { return read_step(s); });
    const double t1 = now_s();

    int64_t micro_steps = 0;
    for (const auto& row : batch.rows) {
      if (row->batch.plan.n_slots() == 0) continue;
      r.metrics.add(step_->run(row->batch, true, micro_steps == 0 ? Write::overwrite : Write::add));
      ++micro_steps;
    }
    const double t2 = now_s();
    r.lr = options_.schedule.at(step);
    r.tokens = batch.tokens;
    if (micro_steps == 0) {
      r.applied = false;
    } else {
      const double scale = objective_.denominator == Denominator::pooled ? 1.0 / batch.weight_sum : 1.0 / static_cast<double>(micro_steps);
      const auto update = optimizer_.step(r.lr, scale);
      r.grad_norm = update.grad_norm;
      r.applied = update.applied;
    }
    const double t3 = now_s();
    r.loss = r.metrics.loss(objective_);
    r.data_ms = 1e3 * (t1 - t0), r.compute_ms = 1e3 * (t2 - t1), r.optimizer_ms = 1e3 * (t3 - t2), r.step_ms = 1e3 * (t3 - t0);
    result.skipped += r.applied ? 0 : 1;
    if (options_.on_step) options_.on_step(r);
    if (options_.validate_every > 0 && (step + 1) % options_.validate_every == 0 && step + 1 < options_.steps) validation(step + 1);
    if (options_.save_every > 0 && (step + 1) % options_.save_every == 0) {
      save(step + 1);
      last_saved = step + 1;
    }
  }
  if (next.valid()) next.wait();
  result.steps = step;
  if (step > last_saved || !newest_checkpoint(options_.out)) save(step);
  if (!result.stopped) {
    validation(step);
    if (options_.write_drafter) options_.write_drafter(options_.out);
  }
  result.seconds = now_s() - start;
  return result;
}

}  // namespace dspark::train
