#include "train/optimizer.h"

#include <algorithm>
#include <numeric>

namespace dspark::train {

using namespace model;

bool takes_muon(const Parameter& p) {
  const auto ends = [&](const char* tail) { return p.name.ends_with(tail); };
  return !p.is_vector && p.value.rows > 1 && p.value.cols > 1 && !ends("embed_tokens.weight") && !ends("lm_head.weight") &&
         !ends("markov_w1.weight") && !ends("markov_w2.weight");
}

Optimizer::Optimizer(Drafter& drafter, const OptimizerOptions& options, const Sharing& sharing)
    : drafter_(drafter), ctx_(drafter.context()), options_(options), sharing_(sharing) {
  const auto& parameters = drafter_.parameters();
  for (size_t i = 0; i < parameters.size(); ++i)
    if (parameters[i].trainable) parameter_.push_back(i);
  // Norms are summed per tensor in name order, whoever owns the tensor.
  std::sort(parameter_.begin(), parameter_.end(), [&](size_t a, size_t b) { return parameters[a].name < parameters[b].name; });
  int64_t work = 0;
  buckets_.resize(static_cast<size_t>(drafter_.buckets()));
  for (size_t i : parameter_) {
    const Parameter& p = parameters[i];
    DS_ASSERT(p.owned == sharing_.owns(p.name), "{}: the drafter and the optimizer disagree on who owns it", p.name);
    OptimizerState s{p.name, {}, {}, options_.muon && takes_muon(p)};
    if (p.owned) {
      s.m = ctx_.allocate(ctx_.acc_dtype(), p.grad.rows, p.grad.cols);
      fill(ctx_, {s.m, 0});
      if (s.muon) {
        work = std::max(work, muon_work(ctx_, p.grad.rows, p.grad.cols));
      } else {
        s.v = ctx_.allocate(ctx_.acc_dtype(), p.grad.rows, p.grad.cols);
        fill(ctx_, {s.v, 0});
      }
    }
    Bucket& bucket = buckets_[static_cast<size_t>(p.bucket)];
    bucket.states.push_back(states_.size());
    states_.push_back(s);
    if (!sharing_.several()) continue;
    bucket.gradient_pieces.push_back(add_wire(bucket.gradients, p, p.grad, sharing_.bf16_wire ? DType::bf16 : p.grad.dtype));
    bucket.weight_pieces.push_back(add_wire(bucket.weights, p, p.value, p.value.dtype));
  }
  scalars_ = ctx_.allocate(ctx_.acc_dtype(), 1, kNumStepScalars);
  fill(ctx_, {scalars_, 0});
  if (work > 0) work_ = ctx_.allocate(DType::u8, 1, work);
  sums_ = ctx_.allocate(ctx_.acc_dtype(), 1, static_cast<int64_t>(states_.size()));
}

Optimizer::~Optimizer() {
  for (const auto& s : states_)
    for (const Tensor& t : {s.m, s.v})
      if (t) ctx_.free(t);
  for (const Bucket& b : buckets_)
    for (const auto* wires : {&b.gradients, &b.weights})
      for (const Wire& w : *wires)
        if (w.copy) ctx_.free(w.copy);
  if (work_) ctx_.free(work_);
  ctx_.free(scalars_);
  ctx_.free(sums_);
}

Collectives::Piece Optimizer::add_wire(std::vector<Wire>& wires, const Parameter& p, const Tensor& t, DType dtype) {
  Wire w{t, {}, p.owned};
  if (t.dtype != dtype || (t.stride != t.cols && t.rows > 1)) w.copy = ctx_.allocate(dtype, t.rows, t.cols);
  wires.push_back(w);
  return {w.copy ? w.copy : t, sharing_.owner(p.name)};
}

void Optimizer::zero_gradients() {
  for (const size_t i : parameter_) fill(ctx_, {drafter_.parameters()[i].grad, 0});
}

void Optimizer::share_gradients(int64_t bucket) {
  DS_ASSERT(bucket == shared_, "the gradients of bucket {} are shared after those of {} buckets", bucket, shared_);
  ++shared_;
  const Bucket& b = buckets_[static_cast<size_t>(bucket)];
  if (b.gradient_pieces.empty()) return;
  for (const Wire& w : b.gradients)
    if (w.copy) copy(ctx_, {w.copy, w.tensor});
  sharing_.ranks->start_reduce(b.gradient_pieces);
}

// The sums are at their owners.
void Optimizer::finish_gradients() {
  while (shared_ < drafter_.buckets()) share_gradients(shared_);
  shared_ = 0;
  sharing_.ranks->finish();
  for (const Bucket& b : buckets_)
    for (const Wire& w : b.gradients)
      if (w.copy && w.owned) copy(ctx_, {w.tensor, w.copy});
}

void Optimizer::send_weights(const Bucket& b) {
  if (b.weight_pieces.empty()) return;
  for (const Wire& w : b.weights)
    if (w.copy && w.owned) copy(ctx_, {w.copy, w.tensor});
  sharing_.ranks->start_gather(b.weight_pieces);
}

void Optimizer::finish_weights() {
  sharing_.ranks->finish();
  for (const Bucket& b : buckets_)
    for (const Wire& w : b.weights)
      if (w.copy && !w.owned) copy(ctx_, {w.tensor, w.copy});
}

void Optimizer::gather_weights() {
  for (const Bucket& b : buckets_) send_weights(b);
  finish_weights();
}

void Optimizer::enqueue_norm(size_t state) {
  sum_squares(ctx_, {sums_.col_range(static_cast<int64_t>(state), 1), drafter_.parameters()[parameter_[state]].grad});
}

void Optimizer::enqueue_update(size_t state) {
  const Parameter& p = drafter_.parameters()[parameter_[state]];
  const OptimizerState& s = states_[state];
  const Tensor value = p.cast_on_update() ? p.value : Tensor{};
  if (!s.muon)
    adamw(ctx_, {p.master, s.m, s.v, p.grad, value, scalars_, options_.beta1, options_.beta2, options_.eps, options_.weight_decay});
  else
    muon(ctx_, {p.master, s.m, p.grad, value, scalars_, work_, muon_size(p.grad.rows, p.grad.cols), options_.muon_momentum, options_.muon_weight_decay, options_.muon_lr_factor});
}

void Optimizer::enqueue(double lr, double grad_scale, Readback& scalars) {
  double* host = host_[enqueued_++ % 2];
  host[kLr] = lr;
  host[kGradScale] = grad_scale;
  host[kMaxNorm] = options_.clip;
  ctx_.device().upload(Queue::compute, scalars_.col_range(0, kNumHostScalars), {host, DType::f64, 1, kNumHostScalars, kNumHostScalars});

  if (sharing_.several()) {
    finish_gradients();
    fill(ctx_, {sums_, 0});
  }
  const auto owned = [&](size_t j) { return drafter_.parameters()[parameter_[j]].owned; };
  for (size_t j = 0; j < states_.size(); ++j)
    if (owned(j)) enqueue_norm(j);
  if (sharing_.several()) sharing_.ranks->sum_in_group(sums_);  // of each, all but one rank's are zero: exact in any order
  finish_norm(ctx_, {scalars_, sums_, options_.beta1, options_.beta2});
  for (const Bucket& b : buckets_) {
    for (const size_t j : b.states)
      if (owned(j)) enqueue_update(j);
    send_weights(b);
  }
  finish_weights();
  drafter_.refresh_trainable();
  scalars.start(ctx_, scalars_);
  ctx_.device().wait(Queue::compute, scalars.event());
}

Optimizer::Result Optimizer::result(Readback& scalars) {
  const auto values = scalars.wait();
  return {values[kGradNorm], values[kFinite] != 0};
}

Optimizer::Result Optimizer::step(double lr, double grad_scale) {
  Readback scalars;
  enqueue(lr, grad_scale, scalars);
  return result(scalars);
}

int64_t Optimizer::steps() const {
  double steps = 0;
  ctx_.download_now({&steps, DType::f64, 1, 1, 1}, scalars_.col_range(kSteps, 1));
  return static_cast<int64_t>(steps);
}

void Optimizer::set_steps(int64_t n) {
  const auto steps = static_cast<double>(n);
  ctx_.upload_now(scalars_.col_range(kSteps, 1), {&steps, DType::f64, 1, 1, 1});
}

}  // namespace dspark::train
