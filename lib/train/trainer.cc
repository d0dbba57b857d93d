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
      ranks_(*options.sharing.ranks), optimizer_(drafter, optimizer, options.sharing) {
  options_.pack.gamma = objective.gamma;
  const Precision precision = precision_of(drafter.context());
  const BatchPlan largest = largest_row(drafter.config(), data, options_.pack);
  const StepPlan plan = plan_step(drafter.config(), objective, target.apply_norm, precision, largest);
  flops_ = std::make_unique<StepFlops>(drafter.config(), objective, target.apply_norm, precision);
  arena_bytes_ = plan.memory.total();
  step_ = std::make_unique<TrainStep>(drafter.context(), drafter, target, objective, plan.memory);
}

void Trainer::resume(const FoundCheckpoint& checkpoint) {
  load_checkpoint(checkpoint, drafter_, optimizer_);
  first_step_ = checkpoint.step;
  skipped_before_ = read_checkpoint_state(checkpoint).value("skipped", int64_t{0});
}

void Trainer::rehearse() {
  const DrafterConfig& c = drafter_.config();
  MicroBatch batch;
  batch.plan = largest_row(c, data_, options_.pack);
  const int64_t rows = batch.plan.n_context, tap_cols = c.n_taps() * c.target_hidden, width = tap_cols + c.target_hidden;
  const std::vector<bf16> states(static_cast<size_t>(rows * width));
  batch.taps = {states.data(), DType::bf16, rows, tap_cols, width};
  batch.last = {states.data() + tap_cols, DType::bf16, rows, c.target_hidden, width};
  for (const Write write : {Write::overwrite, Write::add}) step_->run(batch, true, write);
  // The device has not seen a finite gradient yet: these change nothing.
  for (size_t i = 0; i < optimizer_.states().size(); ++i)
    if (optimizer_.states()[i].m) optimizer_.enqueue_update(i);
  Context& ctx = drafter_.context();
  ctx.device().synchronize(ctx.device().record(Queue::compute));
}

StepBatch Trainer::read_step(int64_t step) const {
  std::vector<Dataset::Draw> documents;
  for (int64_t i = 0; i < options_.batch_docs; ++i) documents.push_back(data_.draw(step * options_.batch_docs + i));
  const std::vector<RowDocuments> rows = pack_documents(documents, options_.pack.row_tokens);
  const auto dealt = deal_rows(rows, ranks_.size());
  std::vector<RowDocuments> own;
  for (const size_t i : dealt[static_cast<size_t>(ranks_.rank())]) own.push_back(rows[i]);
  StepBatch batch = make_rows(own, pack_target_, options_.pack);
  batch.micro_steps = static_cast<int64_t>(std::max_element(dealt.begin(), dealt.end(), [](const auto& a, const auto& b) { return a.size() < b.size(); })->size());
  for (const auto& row : batch.rows)
    if (row->batch.plan.n_slots() > 0) batch.flops += flops_->of(row->batch.plan);
  return batch;
}

StepMetrics Trainer::validate() {
  StepMetrics total;
  const auto n = std::min<int64_t>(static_cast<int64_t>(data_.validation().size()), options_.max_validation_docs);
  for (int64_t i = ranks_.rank(); i < n; i += ranks_.size()) {
    // Epoch -1: the same anchors at every validation.
    const StepBatch batch = make_step_batch({{data_.validation()[static_cast<size_t>(i)], -1}}, pack_target_, options_.pack);
    for (const auto& row : batch.rows)
      if (row->batch.plan.n_slots() > 0) total.add(step_->run(row->batch, false, Write::overwrite));
  }
  return sum(total);
}

bool Trainer::any(bool here) {
  double votes = here ? 1 : 0;
  ranks_.sum({&votes, 1});
  return votes > 0;
}

bool Trainer::decide(const std::function<bool()>& question) { return any(ranks_.rank() == 0 && question()); }

StepMetrics Trainer::sum(const StepMetrics& here) {
  if (ranks_.size() == 1) return here;
  const int64_t block = drafter_.config().block;
  std::vector<double> sums = metric_sums(here, block);
  ranks_.sum(sums);
  return metrics_from_sums(sums, block);
}

void Trainer::save(int64_t step, int64_t skipped, const StepMetrics* validation) {
  Json state = parse_json(options_.config(), "run configuration");
  state["skipped"] = skipped;
  if (validation && std::isfinite(validation->tau())) state["validation_tau"] = validation->tau();
  save_checkpoint(options_.out, step, drafter_, optimizer_, state, options_.write_drafter);
  if (ranks_.rank() == 0) prune_checkpoints(options_.out, options_.keep);
}

// What the ranks must know of each other's rows before a step.
struct AllRows {
  double weight_sum = 0, tokens = 0, flops = 0;
  double micro_steps = 0;                // with a supervised slot on some rank
  std::vector<double> micro_weight_sum;  // of each micro-step

  AllRows(const StepBatch& batch, Collectives& ranks) {
    std::vector<double> sums{batch.weight_sum, static_cast<double>(batch.tokens), batch.flops};
    const size_t n = static_cast<size_t>(batch.micro_steps), first = sums.size();
    sums.resize(first + 2 * n, 0);
    for (size_t i = 0; i < batch.rows.size(); ++i) {
      sums[first + i] = batch.rows[i]->batch.plan.weight_sum;
      sums[first + n + i] = static_cast<double>(batch.rows[i]->batch.plan.n_slots());
    }
    ranks.sum(sums);
    weight_sum = sums[0], tokens = sums[1], flops = sums[2];
    micro_weight_sum.assign(sums.begin() + static_cast<std::ptrdiff_t>(first), sums.begin() + static_cast<std::ptrdiff_t>(first + n));
    micro_steps = static_cast<double>(std::count_if(sums.begin() + static_cast<std::ptrdiff_t>(first + n), sums.end(), [](double slots) { return slots > 0; }));
  }
  // What the optimizer multiplies the sum of all ranks' gradients with.
  double gradient_scale(Denominator denominator, int64_t ranks) const {
    switch (denominator) {
      case Denominator::pooled: return 1 / weight_sum;
      case Denominator::micro: return 1 / micro_steps;
      case Denominator::count: return 1 / (micro_steps * static_cast<double>(ranks));
    }
    return 1;
  }
};

// A step that was enqueued: what its record needs, and the data that the device may still be reading, after a failure too: the
// readbacks, which go first, wait for it.
struct Trainer::Enqueued {
  StepRecord record;
  StepBatch batch;
  std::vector<Readback> slots;  // a micro-step each; grows to the most there were
  Readback scalars;
  bool open = false;

  void enqueue(Trainer& t, int64_t step) {
    const double start = now_s();
    open = true;
    const AllRows all(batch, t.ranks_);
    size_t micro_steps = 0;
    const auto rows = static_cast<size_t>(std::count_if(batch.rows.begin(), batch.rows.end(), has_slots));
    if (slots.size() < rows) slots.resize(rows);
    for (size_t i = 0; i < batch.rows.size(); ++i)
      if (has_slots(batch.rows[i])) {
        batch.rows[i]->batch.weight_sum = all.micro_weight_sum[i];
        const bool last = micro_steps + 1 == rows;  // after it gradients are final
        t.step_->enqueue(batch.rows[i]->batch, true, micro_steps == 0 ? Write::overwrite : Write::add, slots[micro_steps],
                         last && t.ranks_.size() > 1 ? [&t](int64_t bucket) { t.optimizer_.share_gradients(bucket); } : GradientsReady{});
        ++micro_steps;
      }
    const double middle = now_s();
    record.lr = t.options_.schedule.at(step);
    record.tokens = static_cast<int64_t>(all.tokens);
    record.flops = all.flops / static_cast<double>(t.ranks_.size());
    record.applied = all.micro_steps > 0;
    if (record.applied) {
      if (micro_steps == 0) t.optimizer_.zero_gradients();
      t.optimizer_.enqueue(record.lr, all.gradient_scale(t.objective_.denominator, t.ranks_.size()), scalars);
    }
    const double end = now_s();
    record.compute_ms = 1e3 * (middle - start), record.optimizer_ms = 1e3 * (end - middle), record.step_ms = record.data_ms + 1e3 * (end - start);
  }

  // Waits for the device's results of this step.
  void finish(Trainer& t, TrainerResult& result) {
    if (!open) return;
    size_t i = 0;
    for (const auto& row : batch.rows)
      if (has_slots(row)) record.metrics.add(t.step_->metrics(row->batch, slots[i++]));
    if (record.applied) scalars.wait();
    open = false;
    record.metrics = t.sum(record.metrics);
    if (record.applied) {
      const auto update = Optimizer::result(scalars);
      record.grad_norm = update.grad_norm;
      record.applied = update.applied;
      DS_REQUIRE(update.applied || !t.options_.stop_on_nonfinite,
                 "step {}: the gradient is not finite (its norm is {}){}. Lower --lr, or go on without such steps with --on-nonfinite skip",
                 record.step, update.grad_norm, has_checkpoint(t.options_.out) ? "; the last checkpoint is whole" : "");
    }
    record.loss = record.metrics.loss(t.objective_);
    result.skipped += record.applied ? 0 : 1;
    result.last_loss = record.loss;
    t.tell(record);
  }

  static bool has_slots(const std::unique_ptr<HostRow>& row) { return row->batch.plan.n_slots() > 0; }
};

void Trainer::tell(const StepRecord& record) {
  if (ranks_.rank() == 0 && options_.on_step) options_.on_step(record);
}

TrainerResult Trainer::run() {
  // Gone after the others were told: then nothing waits for them any more.
  Enqueued last_two[2];
  std::future<StepBatch> next;
  try {
    return train(last_two, next);
  } catch (const std::exception& e) {
    ranks_.abort(e.what());
    throw;
  }
}

TrainerResult Trainer::train(Enqueued* enqueued, std::future<StepBatch>& next) {
  TrainerResult result;
  result.skipped = skipped_before_;
  const double start = now_s();
  if (ranks_.size() > 1) {  // a warm start may differ in its last bits from one machine to another
    optimizer_.gather_weights();
    drafter_.refresh();
  }
  // Step s is finished after step s + 1 was enqueued: the device never waits for the host to read a loss.
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
    tell(r);
    return true;
  };
  if (first_step_ < options_.steps) next = std::async(std::launch::async, [this, s = first_step_] { return read_step(s); });
  int64_t last_saved = first_step_;
  int64_t step = first_step_;
  while (step < options_.steps) {
    const bool out_of_time = options_.time_limit_s > 0 && now_s() - start > options_.time_limit_s;
    if (any(stop_requested() || out_of_time)) {
      result.stopped = true, result.out_of_time = out_of_time && !stop_requested();
      break;
    }
    Enqueued& now = enqueued[step % 2];
    now.record = {};
    now.record.step = step + 1, now.record.total = options_.steps;
    const double waiting = now_s();
    try {
      now.batch = next.get();
    } catch (const Error& e) {
      if (ranks_.size() > 1 || step == last_saved) throw;
      finish_all(step);  // the steps so far are no worse for it
      save(step, result.skipped);
      throw Error(fmt::format("{}; a checkpoint of step {} was written", e.what(), step), e.code());
    }
    now.record.data_ms = 1e3 * (now_s() - waiting);
    if (step + 1 < options_.steps) next = std::async(std::launch::async, [this, s = step + 1] { return read_step(s); });
    now.enqueue(*this, step);
    ++step;
    if (step - 2 >= first_step_) enqueued[(step - 2) % 2].finish(*this, result);
    const bool validate_now = options_.validate_every > 0 && step % options_.validate_every == 0 && step < options_.steps;
    const bool save_now = options_.save_every > 0 && step % options_.save_every == 0 && step < options_.steps;
    if (validate_now || save_now) finish_all(step);
    const bool validated = validate_now && validation(step);
    const auto better = [&] {
      const auto best = best_checkpoint(options_.out);
      return !best || result.validation.tau() > best->tau;
    };
    if (save_now || (validated && decide(better))) {
      save(step, result.skipped, validated ? &result.validation : nullptr);
      last_saved = step;
    }
  }
  if (next.valid()) next.wait();
  finish_all(step);
  result.steps = step;
  DS_REQUIRE(result.stopped || step == first_step_ || result.skipped < step,
             "none of {} steps changed the drafter: their gradients were not finite, or no slot was supervised; look at --loss, --tap-noise and --lr", step);
  DS_REQUIRE(result.stopped || step == first_step_ || std::isfinite(result.last_loss), "the loss of step {} is {}: the run diverged, and its drafter is not written; lower --lr or --clip", step, result.last_loss);
  const bool validated = !result.stopped && validation(step);
  if (step > last_saved || decide([&] { return !has_checkpoint(options_.out); })) save(step, result.skipped, validated ? &result.validation : nullptr);
  if (ranks_.rank() == 0) {
    if (!result.stopped && options_.write_drafter) options_.write_drafter(options_.out);
    result.best = best_checkpoint(options_.out);
  }
  ranks_.barrier();  // nobody's end is taken for a failure
  result.seconds = now_s() - start;
  return result;
}

}  // namespace dspark::train
