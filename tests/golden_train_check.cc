#include "golden_train_check.h"

#include <catch2/catch.hpp>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "train/optimizer.h"

namespace dspark::golden {

using namespace model;

namespace {

std::vector<double> rows_of(const std::vector<double>& v, const std::vector<int64_t>& rows, int64_t cols) {
  std::vector<double> out;
  for (int64_t r : rows) out.insert(out.end(), v.begin() + r * cols, v.begin() + (r + 1) * cols);
  return out;
}

// Relative to the distance travelled, as the fixtures' README measures it.
void check_final(Report& report, Harness& h, const formats::SafetensorsFile& file, const std::string& prefix, double tolerance) {
  for (const Parameter& q : h.drafter->parameters()) {
    if (!q.trainable) continue;
    const auto got = h.download(q.master), want = values(file, prefix + "final." + q.name), first = values(file, q.name);
    double difference = 0, distance = 0;
    for (size_t i = 0; i < got.size(); ++i) {
      difference += (got[i] - want[i]) * (got[i] - want[i]);
      distance += (want[i] - first[i]) * (want[i] - first[i]);
    }
    report.check(prefix + "final." + q.name, std::sqrt(difference / distance), tolerance);
  }
}

}  // namespace

void check_step(const Case& c, const Tolerance& tol) {
  const Json d = description(c);
  const formats::SafetensorsFile file(c.folder / "tensors.safetensors");
  Harness h(tol.options, d, file);
  const auto packed = pack_case(file, "in.", h.config, h.objective);
  const PackedCase& p = *packed;
  Report report(fmt::format("drafter_step {}", tol.label), c.name);
  std::vector<double> slot_out;
  const train::StepMetrics m = h.step->run(p.batch, true, Write::overwrite, &slot_out);
  const auto& plan = p.batch.plan;
  const int64_t b = h.config.block, cols = h.config.hidden;

  report.check("out.context", relative_2norm(h.download(h.step->state().context), rows_of(values(file, "out.context"), p.context_rows, cols)), tol.outputs);
  std::vector<int64_t> block_rows, slots;  // fixture rows of packed block rows and of supervised slots
  for (int64_t a : p.anchor_slots)
    for (int64_t k = 0; k < b; ++k) block_rows.push_back(a * b + k);
  for (int32_t row : plan.slot_row) slots.push_back(block_rows[static_cast<size_t>(row)]);
  report.check("out.hidden", relative_2norm(h.download(h.step->state().hidden), rows_of(values(file, "out.hidden"), block_rows, cols)), tol.outputs);

  // The supervised slots are exactly the reference's.
  const auto mask = formats::read_i64(file.get("out.slot_mask"));
  std::vector<int64_t> wanted;
  for (size_t i = 0; i < mask.size(); ++i)
    if (mask[i] != 0) wanted.push_back(static_cast<int64_t>(i));
  CHECK(slots == wanted);
  auto column = [&](int out) {
    std::vector<double> v;
    for (int64_t s = 0; s < plan.n_slots(); ++s) v.push_back(slot_out[static_cast<size_t>(s * kSlotOutCols + out)]);
    return v;
  };
  auto per_slot = [&](const std::string& name, std::vector<double> got) {
    if (file.find(name)) report.check(name, relative_2norm(got, rows_of(values(file, name), slots, 1)), tol.outputs);
  };
  per_slot("out.weight.all", column(kWeight));
  const std::pair<const char*, int> terms[] = {{"ce", kCe}, {"tv", kTv}, {"kl_div", kKl}, {"rkl", kRkl}, {"jsd", kJsd}, {"nla", kNla}, {"lk_hybrid", kLk}};
  for (const auto& [name, t] : terms) {
    per_slot(fmt::format("out.weight.{}", name), column(kWeight));
    if (h.objective.coef[static_cast<size_t>(t)] != 0) per_slot(fmt::format("out.term.{}", name), column(t));
  }
  per_slot("out.weight.conf", column(kConfWeight));
  std::vector<double> l1 = column(kTv);
  for (double& v : l1) v *= 2;
  per_slot("out.term.l1", l1);
  per_slot("out.accept_rate", column(kAccept));
  if (h.config.confidence) {
    per_slot("out.confidence_logits", column(kConfLogit));
    per_slot("out.term.conf", column(kConf));
  }
  const Json& expected = d.at("expected");
  double loss = 0;
  for (int t = 0; t < kNumTerms; ++t) loss += h.objective.coef[static_cast<size_t>(t)] * m.term_sum[static_cast<size_t>(t)] * h.objective.scale(t, plan);
  report.check("loss", relative_2norm({loss}, {expected.at("loss").get<double>()}), tol.outputs);
  int gradients = 0;
  for (const Parameter& q : h.drafter->parameters())
    if (q.trainable && (tol.vectors || !q.is_vector) && d.at("tensors").contains("grad." + q.name))  // one case stores only those that differ from another's
      report.check("grad." + q.name, relative_2norm(h.download(q.grad), values(file, "grad." + q.name), tol.absolute), tol.gradients), ++gradients;
  CHECK(gradients >= 3);
  if (!expected.contains("metrics")) {  // speculators: sums and what they are divided by
    const Json& sums = expected.at("metrics_sum_and_total");
    double accept = 0;
    for (const double a : column(kAccept)) accept += a;
    if (sums.contains("accept_rate")) report.check("accept_rate", relative_2norm({accept, m.slots}, sums.at("accept_rate").get<std::vector<double>>()), tol.outputs);
    if (sums.contains("accept_len")) report.check("accept_len", relative_2norm({m.tau_sum, m.blocks}, sums.at("accept_len").get<std::vector<double>>()), tol.outputs);
    if (h.config.confidence)
      report.check("confidence_abs_error", relative_2norm({m.conf_abs_sum, m.conf_sum}, sums.at("confidence_abs_error").get<std::vector<double>>()), tol.outputs);
    return;
  }
  const Json& metrics = expected.at("metrics");
  report.check("tau", relative_2norm({m.tau()}, {metrics.at("tau_probabilistic").get<double>()}), tol.outputs);
  for (int64_t k = 0; k < b; ++k) {
    const auto i = static_cast<size_t>(k);
    if (m.slot_count[i] > 0)
      report.check(fmt::format("accept_rate@{}", k),
                   relative_2norm({m.accept_sum[i] / m.slot_count[i]}, {metrics.at(fmt::format("accept_rate@{}", k)).get<double>()}), tol.outputs);
  }
  if (h.config.confidence) {
    report.check("confidence bias", relative_2norm({m.conf_bias_sum / m.conf_sum}, {metrics.at("confidence_bias").get<double>()}, 1e-7), tol.outputs);
    report.check("confidence abs error", relative_2norm({m.conf_abs_sum / m.conf_sum}, {metrics.at("confidence_abs_error").get<double>()}, 1e-7), tol.outputs);
  }
}

void check_trajectory(const Case& c, const Tolerance& tol, int64_t steps) {
  const Json d = description(c);
  const formats::SafetensorsFile file(c.folder / "tensors.safetensors");
  const Json& config = d.at("config");
  const bool exact = tol.exact(), whole = steps < 0;
  if (whole) steps = config.at("steps");
  const int64_t accumulation = config.at("accumulation");
  const auto loss = values(file, "loss"), lr = values(file, "lr"), norm = values(file, "grad_norm");
  Harness h(tol.options, d, file);
  Report report(fmt::format("trajectory {}", tol.label), c.name);
  std::vector<std::unique_ptr<PackedCase>> micro;
  for (int i = 0; file.find(fmt::format("micro{}.input_ids", i)); ++i)
    micro.push_back(pack_case(file, fmt::format("micro{}.", i), h.config, h.objective));
  train::OptimizerOptions options;
  options.clip = config.at("clip");
  options.weight_decay = config.at("weight_decay");
  train::Optimizer optimizer(*h.drafter, options);
  for (int64_t s = 0; s < steps; ++s) {
    for (int64_t a = 0; a < accumulation; ++a) {
      const auto i = static_cast<size_t>(s * accumulation + a);
      const auto m = h.step->run(micro[i % micro.size()]->batch, true, a == 0 ? Write::overwrite : Write::add);
      double got = 0;
      for (size_t t = 0; t < kNumTerms; ++t) got += h.objective.coef[t] * m.term_sum[t];
      got /= m.weight_sum + 1e-6;
      report.check(fmt::format("loss of step {}.{}", s, a), relative_2norm({got}, {loss[i]}), exact ? 1e-9 : 2e-6);
    }
    const auto r = optimizer.step(lr[static_cast<size_t>(s)], 1.0 / static_cast<double>(accumulation));
    report.check(fmt::format("gradient norm {}", s), relative_2norm({r.grad_norm}, {norm[static_cast<size_t>(s)]}), exact ? 1e-9 : 2e-5);
  }
  if (whole) check_final(report, h, file, "", exact ? 1e-8 : 2e-5);
}

void check_trajectory(const Case& c, const Tolerance& tol, const std::string& run, int64_t steps) {
  const Json d = description(c);
  const formats::SafetensorsFile file(c.folder / "tensors.safetensors");
  const Json& config = d.at("config");
  const bool exact = tol.exact(), muon = run == "muon", whole = steps < 0;
  if (whole) steps = config.at("total_steps");
  Harness h(tol.options, d, file);
  Report report(fmt::format("trajectory {}", tol.label), fmt::format("{} {}", c.name, run));
  train::OptimizerOptions options;
  options.clip = config.at("clip");
  options.weight_decay = config.at("weight_decay");
  options.muon = muon;
  options.muon_momentum = config.at("muon_momentum");
  options.muon_weight_decay = config.at("muon_weight_decay");
  train::Optimizer optimizer(*h.drafter, options);
  const auto loss = values(file, run + ".loss"), lr = values(file, run + ".lr"), norm = values(file, run + ".grad_norm");
  for (int64_t s = 0; s < steps; ++s) {
    const auto p = pack_case(file, "in.", h.config, h.objective, s % 3, s);
    const auto m = h.step->run(p->batch, true, Write::overwrite);
    const double tolerance = exact ? 1e-9 : muon ? 5e-4 : 2e-6;
    report.check(fmt::format("loss of step {}", s), relative_2norm({m.loss(h.objective)}, {loss[static_cast<size_t>(s)]}), tolerance);
    const auto r = optimizer.step(lr[static_cast<size_t>(s * (muon ? 2 : 1))], 1.0);
    report.check(fmt::format("gradient norm {}", s), relative_2norm({r.grad_norm}, {norm[static_cast<size_t>(s)]}), exact ? 1e-9 : muon ? 5e-3 : 2e-5);
  }
  if (whole) check_final(report, h, file, run + ".", exact ? 1e-8 : muon ? 2e-2 : 2e-5);
}

}  // namespace dspark::golden
