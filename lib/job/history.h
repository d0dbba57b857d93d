// OUT/history.jsonl: the records of all steps and validations of a run, whoever stopped and resumed it in between.
//
// A line a record, appended as it is made. Every checkpoint makes the lines before it final: a run that goes on from step s cuts off what
// is behind, since those steps are done again. It is a record of the work and not the work: a line that cannot be read (a machine that
// lost power) is left out and counted, and a line that cannot be written is said once, and training goes on.
#pragma once

#include <functional>

#include "core/files.h"
#include "core/json.h"

namespace dspark::job {

class History {
 public:
  // For a run of `total` steps that goes on after `step` (0: it begins). Nothing is created before the first append.
  History(const fs::path& path, int64_t step, int64_t total);
  ~History();
  History(const History&) = delete;
  History& operator=(const History&) = delete;

  // Every readable record that is there, in order; returns the number of lines that are none.
  int64_t read(const std::function<void(const OrderedJson&)>& each) const;
  void append(const OrderedJson& record);

 private:
  fs::path path_;
  int fd_ = -1;
  bool failed_ = false;
};

}  // namespace dspark::job
