#include "job/train_watch.h"

#include <unistd.h>

#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/log.h"
#include "job/bench_limit.h"

namespace dspark::job {

void check_watch_paths(const TrainOptions& o) {
  std::vector<fs::path> inputs = o.stores;
  for (const fs::path& p : {o.target, o.init}) inputs.push_back(p);
  require_apart("--json", o.common.json, inputs);
  require_apart("--tensorboard", o.tensorboard, inputs);
  if (!o.report.empty()) {
    require_apart("--report", o.report, inputs);
    DS_REQUIRE(!fs::is_directory(o.report), "--report {}: it is a folder; name a file", o.report.string());
    const AtomicFile probe(o.report);  // gone again: it is not committed
  }
  DS_REQUIRE(o.tensorboard.empty() || !fs::exists(o.tensorboard) || fs::is_directory(o.tensorboard), "--tensorboard {}: it is a file; name a folder", o.tensorboard.string());
}

TrainWatch::TrainWatch(const TrainOptions& o, model::Backend& backend, JsonLines& json, ReportFacts facts, int64_t first_step)
    : options_(o), json_(json), objective_(facts.objective), first_slot_(facts.first_slot), history_(o.out / "history.jsonl", first_step, facts.total_steps),
      first_step_(first_step), start_(now_s()) {
  std::string stores;
  for (const auto& path : o.stores) stores += (stores.empty() ? "" : ", ") + path.string();
  facts.out = o.out.string(), facts.clip = o.clip;
  facts.run.insert(facts.run.begin(), {{"target", o.target.string()}, {"stores", stores}});
  // The scalar reference has no limit worth a name.
  if (o.common.precision != "fp64") {
    const MatrixLimit limit = measure_matrix_limit(backend, o.common.cpu_kernel, o.common.threads);
    limit_ = facts.limit = limit.flops;
    facts.machine.push_back({is_cpu(backend) ? "CPU" : "GPU", device_text(backend, o.common.threads)});
    facts.machine.push_back({"matrix limit", fmt::format("{:.0f} GFLOP/s: {}", limit.flops * 1e-9, limit.how)});
  }
  char host[256] = "";
  if (::gethostname(host, sizeof host - 1) == 0) facts.machine.push_back({"host", host});
  const int64_t total = facts.total_steps;
  if (!o.report.empty()) {
    report_ = std::make_unique<TrainReport>(std::move(facts));
    const int64_t unread = history_.read([&](const OrderedJson& record) { report_->add(record); });
    if (unread > 0) log_warn("{}: {} lines are damaged and left out of {}", (o.out / "history.jsonl").string(), unread, o.report.string());
  }
  if (!o.tensorboard.empty() && first_step < total) events_ = std::make_unique<formats::EventWriter>(o.tensorboard, first_step + 1);
}

void TrainWatch::step(const train::StepRecord& r) {
  const OrderedJson record = record_json(r, objective_, limit_);
  write_json(record);
  history_.append(record);
  write_events(record);
  if (report_) report_->add(record);
  const bool train = r.phase == "train";
  if (!train && r.step < r.total) write_page_or_warn(fmt::format("running, step {} of {}", r.step, r.total));
  // A line a step; fewer when steps are fast and nobody watches.
  const double a_step = (now_s() - start_) / static_cast<double>(std::max<int64_t>(1, r.step - first_step_));
  unsaid_ = record_line(r, a_step * static_cast<double>(r.total - r.step));
  if (train && r.step != 1 && r.step != r.total && now_s() - last_line_ <= 1) return;
  say_last();
}

void TrainWatch::say_last() {
  if (!unsaid_.empty()) log_info("{}", unsaid_);
  unsaid_.clear();
  last_line_ = now_s();
}

void TrainWatch::write_json(const OrderedJson& record) {
  if (!json_lost_.empty()) return;
  try {
    json_.write(record);
  } catch (const Error& e) {
    json_lost_ = e.what();
    log_warn("{}; training goes on, --json ends here", json_lost_);
  }
}

void TrainWatch::write_events(const OrderedJson& record) {
  if (!events_) return;
  try {
    events_->write(record.at("step").get<int64_t>(), record_scalars(record, objective_, first_slot_));
  } catch (const Error& e) {
    log_warn("{}; training goes on, TensorBoard's curves end here", e.what());
    events_.reset();
  }
}

train::TrainerResult TrainWatch::run(train::Trainer& trainer) {
  start_ = now_s();
  try {
    return trainer.run();
  } catch (const Error& e) {
    write_page_or_warn(fmt::format("failed: {}", e.what()));
    throw;
  }
}

void TrainWatch::finish(const train::TrainerResult& result) {
  say_last();
  if (result.stopped) write_page_or_warn(fmt::format("stopped after step {}; the same command goes on", result.steps));
  else write_page("complete");
  if (report_) log_info("report in {}", options_.report.string());
  if (result.stopped) return;
  DS_REQUIRE(json_lost_.empty(), "the drafter in {} is complete, its --json is not: {}; all steps are in {}", options_.out.string(), json_lost_, (options_.out / "history.jsonl").string());
}

void TrainWatch::write_page(const std::string& status) {
  if (report_) write_text_atomic(options_.report, report_->html(status));
}

void TrainWatch::write_page_or_warn(const std::string& status) {
  try {
    write_page(status);
  } catch (const Error& e) {
    log_warn("{}", e.what());
  }
}

}  // namespace dspark::job
