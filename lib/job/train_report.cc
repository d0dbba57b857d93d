#include "job/train_report.h"

#include <algorithm>
#include <cmath>
#include <ctime>
#include <limits>
#include <nlohmann/json.hpp>

#include "core/log.h"

namespace dspark::job {

using formats::Curve;
using formats::HtmlReport;
using formats::Mark;
using formats::Plot;
using formats::Series;

namespace {

constexpr size_t kRecent = 100;
constexpr double kNone = std::numeric_limits<double>::quiet_NaN();

// kTermNames in words.
constexpr const char* kTermTitles[] = {"Cross-entropy", "Total variation", "KL of target to draft", "KL of draft to target", "Jensen-Shannon divergence", "Negative log acceptance",
                                       "Hybrid of KL and total variation", "Confidence"};

void flatten(const OrderedJson& value, const std::string& key, std::map<std::string, double>& out) {
  if (value.is_number()) out[key] = value.get<double>();
  else if (value.is_null()) out[key] = kNone;  // what JSON makes of a number that is none
  else if (value.is_object())
    for (const auto& [name, inner] : value.items()) flatten(inner, key.empty() ? name : key + "/" + name, out);
  else if (value.is_array())
    for (size_t i = 0; i < value.size(); ++i) flatten(value[i], fmt::format("{}/{}", key, i), out);
}

std::string number(double v, int decimals = 4) { return std::isfinite(v) ? fmt::format("{:.{}f}", v, decimals) : std::string(); }
std::string whole(double v) { return std::isfinite(v) ? fmt::format("{:.0f}", v) : std::string(); }

std::string time_text() {
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  ::gmtime_r(&now, &utc);
  char text[32];
  return {text, std::strftime(text, sizeof text, "%Y-%m-%d %H:%M UTC", &utc)};
}

const double* find(const std::map<std::string, double>& values, const std::string& key) {
  const auto it = values.find(key);
  return it == values.end() ? nullptr : &it->second;
}

// Expected calibration error: mean distance of acceptance from confidence over bins, by their slots.
double calibration_error(const Series& s) {
  double sum = 0, total = 0;
  for (size_t i = 0; i < s.x.size(); ++i) sum += s.weight[i] * std::abs(s.x[i] - s.y[i]), total += s.weight[i];
  return total > 0 ? sum / total : kNone;
}

}  // namespace

TrainReport::Values TrainReport::values_of(const OrderedJson& record) {
  Values values;
  flatten(record, "", values);
  return values;
}

void TrainReport::add(const OrderedJson& record) {
  Values values = values_of(record);
  const auto step = record.at("step").get<int64_t>();
  const bool train = record.at("phase") == "train";
  int64_t& last = train ? last_step_ : last_validated_;
  if (!train) last_validation_ = values;
  if (step <= last) return;  // a damaged history
  last = step;
  if (train) {
    ++steps_;
    if (const double* ms = find(values, "ms/step")) seconds_ += *ms / 1e3;
    if (!record.value("applied", true)) ++skipped_;
    // A step without a supervised slot measured nothing: its zeros are no values.
    const double* rate = find(values, "slots_per_s");
    if (rate && *rate == 0) std::erase_if(values, [](const auto& v) { return v.first != "lr" && !v.first.starts_with("ms/"); });
    recent_.push_back(values);
    if (recent_.size() > kRecent) recent_.pop_front();
  }
  for (const auto& [key, value] : values)
    if (key != "step" && !key.starts_with("calibration/")) (train ? training_ : validation_)[key].add(static_cast<double>(step), value);
}

size_t TrainReport::window() const { return std::min(recent_.size(), std::clamp<size_t>(static_cast<size_t>(steps_) / 10, 1, kRecent)); }

double TrainReport::trained(const std::string& key) const {
  double sum = 0, n = 0;
  for (size_t i = recent_.size() - window(); i < recent_.size(); ++i)
    if (const double* v = find(recent_[i], key); v && std::isfinite(*v)) sum += *v, ++n;
  return n > 0 ? sum / n : kNone;
}

double TrainReport::validated(const std::string& key) const {
  const double* v = find(last_validation_, key);
  return v ? *v : kNone;
}

size_t TrainReport::positions() const {
  size_t slots = 0;
  while (training_.count(fmt::format("accept_rate/{}", slots)) || last_validation_.count(fmt::format("accept_rate/{}", slots))) ++slots;
  return slots - std::min(slots, facts_.first_slot);
}

// ---- plots

Plot TrainReport::step_plot(const std::string& title, const std::string& key) const {
  Plot p{.title = title, .x = {.label = "step", .tight = true}};
  if (const auto it = training_.find(key); it != training_.end()) p.series.push_back(curve_series("training", it->second));
  if (const auto it = validation_.find(key); it != validation_.end()) p.series.push_back(curve_series("validation", it->second, Mark::points));
  return p;
}

Plot TrainReport::position_plot(const std::string& title, const std::string& key) const {
  Plot p{.title = title, .x = {.label = "step", .tight = true}, .y = {.from = 0.0}, .ordered = true};
  for (size_t k = 0; k < positions(); ++k)
    if (const auto it = training_.find(fmt::format("{}/{}", key, k + facts_.first_slot)); it != training_.end()) {
      p.series.push_back(curve_series(std::to_string(k + 1), it->second));
      p.series.back().smooth = Series::Smooth::alone;  // so many curves would hide each other
    }
  return p;
}

void TrainReport::add_loss(HtmlReport& page) const {
  page.section("Loss");
  Plot total = step_plot("Loss", "loss");
  const auto it = training_.find("loss");
  const int64_t bucket = it == training_.end() ? 1 : it->second.points_per_bucket();
  if (bucket > 1) total.note = fmt::format("Line: moving mean; band: least and greatest of {} steps each; circles: validation. Point at a plot to read its values.", bucket);
  else total.note = "Strong: moving mean; faint: every step; circles: validation. Point at a plot to read its values.";
  page.plot(total);
  for (size_t t = 0; t < train::kTermNames.size(); ++t)
    if (facts_.objective.coef[t] != 0) page.plot(step_plot(fmt::format("{} ({}), coefficient {}", kTermTitles[t], train::kTermNames[t], facts_.objective.coef[t]), train::kTermNames[t]));
}

void TrainReport::add_acceptance(HtmlReport& page) const {
  page.section("Acceptance");
  Plot tau = step_plot("Expected accepted length", "tau");
  tau.note = "Tokens a round: 1 + the products of acceptance along a block, mean over blocks.";
  page.plot(tau);
  Plot by_position = position_plot("Acceptance by position", "accept_rate");
  by_position.note = "Training: the probability that the target accepts the token proposed here after the text before it (1 - total variation); moving means.";
  page.plot(by_position);
  const bool has_validation = !last_validation_.empty();
  Plot bars{.title = has_validation ? fmt::format("Last validation, step {}", last_validated_) : fmt::format("Training, mean of the last {} steps", window()),
            .x = {.label = ""}, .y = {.from = 0.0}};
  for (const auto& [name, key] : {std::pair{"acceptance", "accept_rate"}, std::pair{"top-1 agreement", "top1"}}) {
    Series s{.name = name, .mark = Mark::bars};
    for (size_t k = 0; k < positions(); ++k) {
      const std::string slot = fmt::format("{}/{}", key, k + facts_.first_slot);
      s.x.push_back(static_cast<double>(k));
      s.y.push_back(has_validation ? validated(slot) : trained(slot));
    }
    bars.series.push_back(s);
  }
  for (size_t k = 0; k < positions(); ++k) bars.x.names.push_back(std::to_string(k + 1));
  bars.note = "By position in the block.";
  page.plot(bars);
  Plot top1 = position_plot("Top-1 agreement by position", "top1");
  top1.note = "Training: how often drafter and target find the same token most likely.";
  page.plot(top1);
}

TrainReport::Values TrainReport::trained_calibration() const {
  // Bins hold means: they add up by their slots.
  Values sums;
  for (size_t i = recent_.size() - window(); i < recent_.size(); ++i)
    for (int bin = 0;; ++bin) {
      const double* slots = find(recent_[i], fmt::format("calibration/slots/{}", bin));
      if (!slots) break;
      sums[fmt::format("calibration/slots/{}", bin)] += *slots;
      for (const char* what : {"confidence", "acceptance"}) {
        const std::string key = fmt::format("calibration/{}/{}", what, bin);
        if (const double* v = find(recent_[i], key)) sums[key] += *v * *slots;
      }
    }
  for (auto& [key, value] : sums)
    if (!key.starts_with("calibration/slots/")) value /= std::max(1.0, sums.at("calibration/slots/" + key.substr(key.rfind('/') + 1)));
  return sums;
}

Series TrainReport::reliability(const std::string& name, const Values& values) {
  Series s{.name = name, .mark = Mark::points};
  double total = 0;
  for (int bin = 0;; ++bin) {
    const double* slots = find(values, fmt::format("calibration/slots/{}", bin));
    if (!slots) break;
    if (!(*slots > 0)) continue;
    const double *x = find(values, fmt::format("calibration/confidence/{}", bin)), *y = find(values, fmt::format("calibration/acceptance/{}", bin));
    if (!x || !y) continue;
    s.x.push_back(*x), s.y.push_back(*y), s.weight.push_back(*slots);
    total += *slots;
  }
  for (double& w : s.weight) w /= total;
  if (!s.x.empty()) s.name += fmt::format(", calibration error {:.3f}", calibration_error(s));
  return s;
}

void TrainReport::add_confidence(HtmlReport& page) const {
  if (!training_.count("confidence_bias") && !validation_.count("confidence_bias")) return;
  page.section("Confidence");
  Plot reliable{.title = "Reliability of the confidence", .x = {.label = "predicted confidence", .from = 0.0, .to = 1.0}, .y = {.from = 0.0, .to = 1.0}, .diagonal = true, .height = 320};
  for (const Series& s : {reliability(fmt::format("training, last {} steps", window()), trained_calibration()), reliability("last validation", last_validation_)})
    if (!s.x.empty()) reliable.series.push_back(s);
  reliable.note = "Measured acceptance of the slots in each tenth of predicted confidence; a circle's area is its share of the slots. On the broken line confidence is right.";
  page.plot(reliable);
  Plot error{.title = "Confidence minus acceptance", .x = {.label = "step", .tight = true}, .height = 320};
  for (const auto& [name, key] : {std::pair{"bias", "confidence_bias"}, std::pair{"absolute error", "confidence_abs_error"}}) {
    const int colour = error.series.empty() ? 0 : 2;
    if (const auto it = training_.find(key); it != training_.end()) error.series.push_back(curve_series(name, it->second));
    if (const auto it = validation_.find(key); it != validation_.end()) error.series.push_back(curve_series(std::string(name) + ", validation", it->second, Mark::points));
    for (Series& s : error.series)
      if (s.colour < 0) s.colour = colour;
  }
  error.levels = {{0, ""}};
  page.plot(error);
}

void TrainReport::add_run(HtmlReport& page) const {
  page.section("Optimizer and speed");
  Plot lr = step_plot("Learning rate", "lr");
  for (Series& s : lr.series) s.smooth = Series::Smooth::none;
  page.plot(lr);
  Plot norm = step_plot("Gradient norm", "grad_norm");
  norm.y.log = true;
  if (facts_.clip > 0) norm.levels = {{facts_.clip, "clipped above"}}, norm.note = "Logarithmic; before clipping.";
  page.plot(norm);
  Plot time{.title = "Time of a step, ms", .x = {.label = "step", .tight = true}};
  for (const auto& [name, key] : {std::pair{"forward and backward", "ms/forward_backward"}, std::pair{"optimizer", "ms/optimizer"}, std::pair{"waiting for data", "ms/data"}})
    if (const auto it = training_.find(key); it != training_.end()) time.series.push_back(curve_series(name, it->second, Mark::area));
  time.note = "Stacked; moving means.";
  page.plot(time);
  Plot rate = step_plot("Supervised slots a second", "slots_per_s");
  rate.y.from = 0.0;
  page.plot(rate);
}

// ---- numbers

void TrainReport::add_tiles(HtmlReport& page) const {
  const bool has_validation = !last_validation_.empty();
  const std::string from_training = fmt::format("training, last {} steps", window());
  auto best = [&](const char* name, const char* key, int decimals) {
    return HtmlReport::Tile{name, number(has_validation ? validated(key) : trained(key), decimals),
                            has_validation ? fmt::format("validation, step {}; training {}", last_validated_, number(trained(key), decimals)) : from_training};
  };
  std::vector<HtmlReport::Tile> tiles{best("Expected accepted length", "tau", 3), best("Loss", "loss", 4)};
  tiles.push_back({"Steps", std::to_string(last_step_), fmt::format("of {}, {} skipped", facts_.total_steps, skipped_ > 0 ? std::to_string(skipped_) : "none")});
  tiles.push_back({"Time in steps", format_seconds(seconds_), steps_ > 0 ? fmt::format("{:.4g} s a step", seconds_ / static_cast<double>(steps_)) : ""});
  tiles.push_back({"Slots a second", whole(trained("slots_per_s")), whole(trained("tokens_per_s")) + " tokens/s"});
  if (facts_.limit > 0) tiles.push_back({"FLOP utilisation", number(100 * trained("mfu"), 1) + " %", fmt::format("of {:.0f} GFLOP/s measured", facts_.limit * 1e-9)});
  page.tiles(tiles);
}

void TrainReport::add_tables(HtmlReport& page) const {
  page.section("Last numbers");
  HtmlReport::Rows rows;
  auto row = [&](const std::string& name, const std::string& key, int decimals) {
    const std::string a = number(trained(key), decimals), b = number(validated(key), decimals);
    if (!a.empty() || !b.empty()) rows.push_back({name, a, b});
  };
  row("loss", "loss", 4);
  for (size_t t = 0; t < train::kTermNames.size(); ++t)
    if (facts_.objective.coef[t] != 0) row(fmt::format("{} ({})", kTermTitles[t], train::kTermNames[t]), train::kTermNames[t], 4);
  row("expected accepted length", "tau", 3);
  row("confidence bias", "confidence_bias", 4);
  row("confidence absolute error", "confidence_abs_error", 4);
  row("gradient norm", "grad_norm", 3);
  if (!recent_.empty()) rows.push_back({"learning rate, last step", fmt::format("{:.3g}", recent_.back().count("lr") ? recent_.back().at("lr") : kNone), ""});
  row("supervised slots a second", "slots_per_s", 0);
  row("tokens a second", "tokens_per_s", 0);
  for (const auto& [name, key] : {std::pair{"forward and backward, ms a step", "ms/forward_backward"}, std::pair{"optimizer, ms a step", "ms/optimizer"}, std::pair{"waiting for data, ms a step", "ms/data"}})
    row(name, key, 1);
  if (facts_.limit > 0) rows.push_back({"FLOP utilisation", number(100 * trained("mfu"), 1) + " %", ""});
  page.table({"", fmt::format("training, mean of the last {} steps", window()), last_validation_.empty() ? "no validation" : fmt::format("validation, step {}", last_validated_)}, rows);

  std::vector<std::string> header{"position"};
  for (size_t k = 0; k < positions(); ++k) header.push_back(std::to_string(k + 1));
  HtmlReport::Rows by_position;
  for (const auto& [name, key] : {std::pair{"acceptance", "accept_rate"}, std::pair{"top-1 agreement", "top1"}})
    for (const bool validation : {false, true}) {
      if (validation && last_validation_.empty()) continue;
      by_position.push_back({fmt::format("{}, {}", name, validation ? "validation" : "training")});
      for (size_t k = 0; k < positions(); ++k) {
        const std::string slot = fmt::format("{}/{}", key, k + facts_.first_slot);
        by_position.back().push_back(number(validation ? validated(slot) : trained(slot), 3));
      }
    }
  page.table(header, by_position);

  page.section("Run and machine");
  HtmlReport::Rows facts;
  for (const auto* list : {&facts_.run, &facts_.machine})
    for (const auto& [name, value] : *list) facts.push_back({name, value});
  facts.push_back({"peak memory", format_bytes(static_cast<double>(peak_rss_bytes()))});
  page.table({"", "value"}, facts);

  page.section("Configuration");
  HtmlReport::Rows settings;
  for (const Setting& s : facts_.settings) settings.push_back({s.name, s.value.empty() ? "-" : s.value, s.source});
  page.table({"option", "value", "from"}, settings, 2);
}

std::string TrainReport::html(const std::string& status) const {
  HtmlReport page(facts_.title, fmt::format("{} · {} · written {}", facts_.out, status, time_text()));
  add_tiles(page);
  if (steps_ < last_step_) page.text(fmt::format("Only {} of {} steps are in the run's history; the curves have gaps.", steps_, last_step_));
  if (steps_ > 0 || !last_validation_.empty()) {
    add_loss(page);
    add_acceptance(page);
    add_confidence(page);
    add_run(page);
  }
  add_tables(page);
  return page.html();
}

}  // namespace dspark::job
