// Everything that shows a training run while it runs and afterwards: console lines, --json, OUT/history.jsonl, --tensorboard, --report.
//
// Made when the run is sure to start (its folder locked, its checkpoint found) and told of every record. An output that cannot be made is
// one error before the first step; later ones (a full disk) are said once and do not stop the training. A --json that lacks lines fails
// the run when its drafter is written.
#pragma once

#include <memory>
#include <string>

#include "job/common.h"
#include "job/history.h"
#include "job/train.h"
#include "job/train_record.h"
#include "job/train_report.h"

namespace dspark::job {

// Before anything is read: whether --report and --tensorboard can be written at all.
void check_watch_paths(const TrainOptions& options);

class TrainWatch {
 public:
  // The run goes on after `first_step`. What the options say, and the machine's limit, is put into the facts here.
  TrainWatch(const TrainOptions& options, model::Backend& backend, JsonLines& json, ReportFacts facts, int64_t first_step);

  void step(const train::StepRecord& record);  // TrainerOptions::on_step
  void write_json(const OrderedJson& record);  // until --json cannot be written
  // Runs the trainer; when that throws, the page of what there was is written before the error goes on.
  train::TrainerResult run(train::Trainer& trainer);
  void finish(const train::TrainerResult& result);  // the page; a stopped run is not failed here

 private:
  void say_last();  // the last step's line, unless it was said
  void write_page(const std::string& status);  // nothing without --report
  void write_events(const OrderedJson& record);
  void write_page_or_warn(const std::string& status);

  const TrainOptions& options_;
  JsonLines& json_;
  train::Objective objective_;
  size_t first_slot_;
  double limit_ = 0;
  History history_;
  std::unique_ptr<formats::EventWriter> events_;
  std::unique_ptr<TrainReport> report_;
  std::string json_lost_;  // why, if it ended early
  std::string unsaid_;     // the last step's line, left out since steps are fast
  int64_t first_step_;
  double start_, last_line_ = 0;
};

}  // namespace dspark::job
