#include "train/objective.h"

#include <algorithm>
#include <cmath>

namespace dspark::train {

using namespace model;

Objective deepspec_objective(bool confidence) {
  Objective o;
  o.coef[kCe] = 0.1;
  o.coef[kTv] = 1.8;
  o.coef[kConf] = confidence ? 1.0 : 0.0;
  return o;
}

Objective dflash_objective() {
  Objective o;
  o.coef[kCe] = 1.0;
  return o;
}

double Objective::scale(int term, const BatchPlan& plan, double weight_sum) const {
  switch (denominator) {
    case Denominator::pooled: return 1;
    case Denominator::micro: return 1 / ((weight_sum < 0 ? plan.weight_sum : weight_sum) + 1e-6);
    case Denominator::count: return 1 / (static_cast<double>(plan.n_slots()) + (term == kConf ? 1e-8 : 1e-5));
  }
  return 1;
}

void StepMetrics::add(const StepMetrics& o) {
  for (size_t i = 0; i < term_sum.size(); ++i) term_sum[i] += o.term_sum[i];
  weight_sum += o.weight_sum, slots += o.slots, blocks += o.blocks, tau_sum += o.tau_sum;
  conf_sum += o.conf_sum, conf_bias_sum += o.conf_bias_sum, conf_abs_sum += o.conf_abs_sum;
  for (size_t i = 0; i < calibration.size(); ++i) {
    calibration[i].slots += o.calibration[i].slots;
    calibration[i].confidence_sum += o.calibration[i].confidence_sum;
    calibration[i].accept_sum += o.calibration[i].accept_sum;
  }
  auto add_to = [](std::vector<double>& a, const std::vector<double>& b) {
    if (a.size() < b.size()) a.resize(b.size());
    for (size_t i = 0; i < b.size(); ++i) a[i] += b[i];
  };
  add_to(accept_sum, o.accept_sum), add_to(top1_sum, o.top1_sum), add_to(slot_count, o.slot_count);
}

namespace {
// Calls `each` on every sum of `m`, in one order.
template <typename Each>
void each_sum(StepMetrics& m, const Each& each) {
  for (double& v : m.term_sum) each(v);
  for (double* v : {&m.weight_sum, &m.slots, &m.blocks, &m.tau_sum, &m.conf_bias_sum, &m.conf_abs_sum, &m.conf_sum}) each(*v);
  for (CalibrationBin& bin : m.calibration)
    for (double* v : {&bin.slots, &bin.confidence_sum, &bin.accept_sum}) each(*v);
  for (auto* list : {&m.accept_sum, &m.top1_sum, &m.slot_count})
    for (double& v : *list) each(v);
}

StepMetrics zero_metrics(int64_t block) {
  StepMetrics m;
  for (auto* list : {&m.accept_sum, &m.top1_sum, &m.slot_count}) list->assign(static_cast<size_t>(block), 0);
  return m;
}
}  // namespace

std::vector<double> metric_sums(const StepMetrics& m, int64_t block) {
  StepMetrics all = zero_metrics(block);
  all.add(m);
  std::vector<double> sums;
  each_sum(all, [&](double v) { sums.push_back(v); });
  return sums;
}

StepMetrics metrics_from_sums(std::span<const double> sums, int64_t block) {
  StepMetrics m = zero_metrics(block);
  size_t i = 0;
  each_sum(m, [&](double& v) { v = sums[i++]; });
  return m;
}

double StepMetrics::term(const Objective& o, int t) const {
  if (slots == 0) return 0;
  const double denominator = o.denominator == Denominator::count ? slots + (t == kConf ? 1e-8 : 1e-5) : weight_sum;
  return term_sum[static_cast<size_t>(t)] / denominator;
}

double StepMetrics::loss(const Objective& o) const {
  double sum = 0;
  for (int t = 0; t < kNumTerms; ++t) sum += o.coef[static_cast<size_t>(t)] * term(o, t);
  return sum;
}

StepMetrics reduce_metrics(const BatchPlan& plan, std::span<const double> slot_out, const Objective& objective, bool confidence) {
  StepMetrics m;
  const auto b = static_cast<size_t>(plan.block);
  m.accept_sum.assign(b, 0), m.top1_sum.assign(b, 0), m.slot_count.assign(b, 0);
  double prefix = 1;
  int64_t anchor = -1;
  for (int64_t s = 0; s < plan.n_slots(); ++s) {
    const double* out = slot_out.data() + s * kSlotOutCols;
    const auto i = static_cast<size_t>(s);
    const double w = plan.weight[i], accept = out[kAccept];
    for (size_t t = 0; t < kNumTerms; ++t) m.term_sum[t] += out[t == kConf ? kConfWeight : kWeight] * out[t];
    m.weight_sum += w;
    m.slots += 1;
    // Slots of one anchor follow each other; a new anchor starts a new product, and a slot left out ends it (acceptance 0).
    if (plan.slot_row[i] / plan.block != anchor) {
      anchor = plan.slot_row[i] / plan.block;
      prefix = 1;
      m.blocks += 1;
      m.tau_sum += 1;
    } else if (plan.slot_row[i] != plan.slot_row[i - 1] + 1) {
      prefix = 0;
    }
    prefix *= accept;
    m.tau_sum += prefix;
    const auto k = static_cast<size_t>(plan.slot_index[i]);
    m.accept_sum[k] += accept;
    m.top1_sum[k] += out[kDraftTop] == out[kTargetTop] ? 1 : 0;
    m.slot_count[k] += 1;
    if (confidence) {
      const double predicted = 1 / (1 + std::exp(-out[kConfLogit])), error = predicted - accept;
      const double conf_w = objective.denominator == Denominator::count ? 1 : w;
      m.conf_bias_sum += conf_w * error;
      m.conf_abs_sum += conf_w * std::abs(error);
      m.conf_sum += conf_w;
      if (!(predicted >= 0)) continue;  // not a number: no bin
      CalibrationBin& bin = m.calibration[std::min(m.calibration.size() - 1, static_cast<size_t>(predicted * static_cast<double>(m.calibration.size())))];
      bin.slots += 1, bin.confidence_sum += predicted, bin.accept_sum += accept;
    }
  }
  return m;
}

}  // namespace dspark::train
