#include "job/train_record.h"

#include <cmath>
#include <nlohmann/json.hpp>

#include "core/log.h"

namespace dspark::job {

using train::StepRecord;

namespace {

double ratio(double sum, double count) { return count > 0 ? sum / count : 0.0; }

// A number of at most 8 characters.
std::string short_number(double v, int decimals) {
  return std::isfinite(v) && std::abs(v) >= 9999.5 ? fmt::format("{:.2g}", v) : fmt::format("{:.{}f}", v, std::abs(v) < 100 ? decimals : 1);
}

}  // namespace

OrderedJson record_json(const StepRecord& r, const train::Objective& objective, double limit) {
  const auto& m = r.metrics;
  OrderedJson j{{"phase", r.phase}, {"step", r.step}, {"loss", r.loss}};
  for (int t = 0; t < model::kNumTerms; ++t) {
    const bool always = t == model::kCe || t == model::kTv || t == model::kKl || t == model::kConf;
    if (always || objective.coef[static_cast<size_t>(t)] != 0) j[train::kTermNames[static_cast<size_t>(t)]] = m.term(objective, t);
  }
  auto rates = OrderedJson::array(), top1 = OrderedJson::array();
  for (size_t k = 0; k < m.accept_sum.size(); ++k) {
    rates.push_back(ratio(m.accept_sum[k], m.slot_count[k]));
    top1.push_back(ratio(m.top1_sum[k], m.slot_count[k]));
  }
  j["accept_rate"] = rates, j["top1"] = top1, j["tau"] = m.tau();
  if (objective.coef[model::kConf] != 0 && m.conf_sum > 0) {
    j["confidence_bias"] = m.conf_bias_sum / m.conf_sum, j["confidence_abs_error"] = m.conf_abs_sum / m.conf_sum;
    auto slots = OrderedJson::array(), confidence = OrderedJson::array(), acceptance = OrderedJson::array();
    for (const auto& bin : m.calibration) {
      slots.push_back(bin.slots);
      confidence.push_back(ratio(bin.confidence_sum, bin.slots));
      acceptance.push_back(ratio(bin.accept_sum, bin.slots));
    }
    j["calibration"] = OrderedJson{{"slots", slots}, {"confidence", confidence}, {"acceptance", acceptance}};
  }
  if (r.phase != "train") {
    j["blocks"] = m.blocks;
    return j;
  }
  const double s = r.step_ms / 1e3;
  j["grad_norm"] = r.grad_norm, j["lr"] = r.lr, j["applied"] = r.applied;
  j["tokens_per_s"] = static_cast<double>(r.tokens) / s, j["slots_per_s"] = m.slots / s;
  if (limit > 0) j["mfu"] = r.flops / s / limit;
  j["ms"] = OrderedJson{{"data", r.data_ms}, {"forward_backward", r.compute_ms}, {"optimizer", r.optimizer_ms}, {"step", r.step_ms}};
  return j;
}

std::string record_line(const StepRecord& r, double seconds_left) {
  const auto& m = r.metrics;
  if (r.phase != "train") return fmt::format("{:>6} validation loss {} tau {} ({} blocks)", r.step, short_number(r.loss, 4), short_number(m.tau(), 3), m.blocks);
  size_t first = 0;  // the first slot that can be supervised
  while (first + 1 < m.slot_count.size() && m.slot_count[first] == 0) ++first;
  std::string line = fmt::format("{:>6}/{} loss {} tau {} acc1 {:.3f} norm {} lr {:.1e} ", r.step, r.total, short_number(r.loss, 4), short_number(m.tau(), 3),
                                 first < m.slot_count.size() ? ratio(m.accept_sum[first], m.slot_count[first]) : 0.0, short_number(r.grad_norm, 2), r.lr);
  const double rate = m.slots / (r.step_ms / 1e3);
  line += !r.applied ? "SKIPPED" : rate < 1e7 ? fmt::format("{:.0f} slots/s", rate) : fmt::format("{:.2g} slots/s", rate);
  if (r.step == r.total || seconds_left < 0) return line;
  const std::string left = fmt::format(", {} left", format_seconds(seconds_left));
  return line.size() + left.size() <= 100 ? line + left : line;
}

std::vector<formats::Scalar> record_scalars(const OrderedJson& record, const train::Objective& objective, size_t first_slot) {
  const std::string prefix = record.at("phase") == "train" ? "" : "validation/";
  std::vector<formats::Scalar> scalars;
  auto add = [&](const std::string& tag, const OrderedJson& value) { scalars.push_back({prefix + tag, value.get<double>()}); };
  auto add_slots = [&](const std::string& tag, const OrderedJson& values) {
    for (size_t k = first_slot; k < values.size(); ++k) add(fmt::format("{}/position_{}", tag, k - first_slot + 1), values[k]);
  };
  add("loss/total", record.at("loss"));
  for (size_t t = 0; t < train::kTermNames.size(); ++t)
    if (objective.coef[t] != 0) add(std::string("loss/") + train::kTermNames[t], record.at(train::kTermNames[t]));
  add("acceptance/tau", record.at("tau"));
  add_slots("acceptance", record.at("accept_rate"));
  add_slots("top1", record.at("top1"));
  const std::pair<const char*, const char*> rest[] = {{"confidence_bias", "confidence/bias"}, {"confidence_abs_error", "confidence/abs_error"}, {"grad_norm", "optimizer/grad_norm"},
                                                      {"lr", "optimizer/lr"}, {"tokens_per_s", "speed/tokens_per_s"}, {"slots_per_s", "speed/slots_per_s"}, {"mfu", "speed/mfu"}};
  for (const auto& [key, tag] : rest)
    if (record.contains(key)) add(tag, record.at(key));
  if (record.contains("ms"))
    for (const auto& [key, value] : record.at("ms").items()) add("time/" + key + "_ms", value);
  return scalars;
}

}  // namespace dspark::job
