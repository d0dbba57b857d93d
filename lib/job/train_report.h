// `train --report`: what the page of a training run shows. It is fed the run's records (record_json's, live or from OUT/history.jsonl) one
// by one and keeps them in bounded memory, so that a run of 100,000 steps has a page like one of a hundred.
#pragma once

#include <deque>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "core/json.h"
#include "formats/html_report.h"
#include "job/recipe.h"
#include "train/objective.h"

namespace dspark::job {

struct ReportFacts {
  std::string title, out;
  train::Objective objective;
  size_t first_slot = 0;     // record_scalars'
  int64_t total_steps = 0;
  double clip = 0;           // 0: none
  double limit = 0;          // record_json's
  std::vector<std::pair<std::string, std::string>> run, machine;  // name, value
  std::vector<Setting> settings;
};

class TrainReport {
 public:
  explicit TrainReport(ReportFacts facts) : facts_(std::move(facts)) {}

  void add(const OrderedJson& record);
  // `status`: "complete", "stopped; the same command goes on".
  std::string html(const std::string& status) const;

 private:
  // A record's numbers by key: "loss", "accept_rate/0", "ms/data", "calibration/slots/3".
  using Values = std::map<std::string, double>;
  static Values values_of(const OrderedJson& record);

  size_t window() const;                           // training steps that make the last numbers
  double trained(const std::string& key) const;    // mean over them; NaN where there is none
  double validated(const std::string& key) const;  // of the last validation; NaN without
  size_t positions() const;                        // proposals of a block
  formats::Plot step_plot(const std::string& title, const std::string& key) const;
  formats::Plot position_plot(const std::string& title, const std::string& key) const;
  static formats::Series reliability(const std::string& name, const Values& values);
  Values trained_calibration() const;

  void add_tiles(formats::HtmlReport& page) const;
  void add_loss(formats::HtmlReport& page) const;
  void add_acceptance(formats::HtmlReport& page) const;
  void add_confidence(formats::HtmlReport& page) const;
  void add_run(formats::HtmlReport& page) const;
  void add_tables(formats::HtmlReport& page) const;

  ReportFacts facts_;
  std::map<std::string, formats::Curve> training_, validation_;
  std::deque<Values> recent_;  // the last training records
  Values last_validation_;     // empty: none
  int64_t steps_ = 0, skipped_ = 0, last_step_ = 0, last_validated_ = -1;
  double seconds_ = 0;
};

}  // namespace dspark::job
