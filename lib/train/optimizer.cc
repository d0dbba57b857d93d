#include "train/optimizer.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace dspark::train {

using namespace model;

AdamWOptimizer::AdamWOptimizer(Drafter& drafter, const AdamWOptions& options)
    : drafter_(drafter), ctx_(drafter.context()), options_(options) {
  const auto& parameters = drafter_.parameters();
  for (size_t i = 0; i < parameters.size(); ++i)
    if (parameters[i].trainable) parameter_.push_back(i);
  // Norms are summed per tensor in name order, whoever owns the tensor.
  std::sort(parameter_.begin(), parameter_.end(), [&](size_t a, size_t b) { return parameters[a].name < parameters[b].name; });
  for (size_t i : parameter_) {
    const Parameter& p = parameters[i];
    OptimizerState s{p.name, ctx_.allocate(ctx_.acc_dtype(), p.grad.rows, p.grad.cols),
                     ctx_.allocate(ctx_.acc_dtype(), p.grad.rows, p.grad.cols)};
    fill(ctx_, {s.m, 0});
    fill(ctx_, {s.v, 0});
    states_.push_back(s);
  }
  scalars_ = ctx_.allocate(ctx_.acc_dtype(), 1, kNumStepScalars);
  sums_ = ctx_.allocate(ctx_.acc_dtype(), 1, static_cast<int64_t>(states_.size()));
}

AdamWOptimizer::~AdamWOptimizer() {
  for (const auto& s : states_) {
    ctx_.free(s.m);
    ctx_.free(s.v);
  }
  ctx_.free(scalars_);
  ctx_.free(sums_);
}

AdamWOptimizer::Result AdamWOptimizer::step(double lr, double grad_scale) {
  const auto t = static_cast<double>(steps_ + 1);
  double host[kNumStepScalars] = {};
  host[kLr] = lr;
  host[kGradScale] = grad_scale;
  host[kMaxNorm] = options_.clip;
  host[kBias1] = 1 - std::pow(options_.beta1, t);
  host[kBias2] = 1 - std::pow(options_.beta2, t);
  ctx_.upload_now(scalars_, {host, DType::f64, 1, kNumStepScalars, kNumStepScalars});

  const auto& parameters = drafter_.parameters();
  for (size_t j = 0; j < states_.size(); ++j)
    sum_squares(ctx_, {sums_.col_range(static_cast<int64_t>(j), 1), parameters[parameter_[j]].grad});
  finish_norm(ctx_, {scalars_, sums_});
  for (size_t j = 0; j < states_.size(); ++j) {
    const Parameter& p = parameters[parameter_[j]];
    adamw(ctx_, {p.master, states_[j].m, states_[j].v, p.grad, p.cast_on_update() ? p.value : Tensor{}, scalars_, options_.beta1,
                 options_.beta2, options_.eps, options_.weight_decay});
  }
  drafter_.refresh_trainable();
  ctx_.download_now({host, DType::f64, 1, kNumStepScalars, kNumStepScalars}, scalars_);
  const Result result{host[kGradNorm], host[kFinite] != 0};
  if (result.applied) ++steps_;
  return result;
}

}  // namespace dspark::train
