// Times every operator call of real steps and predicts it from a machine's rates: what each part takes beside what was expected.
//
//   TimedBackend timed(backend, machine);   build the model on timed.context() and run a step;   timed.rows();
// Each call is timed by the device's clock and waited for, so on a device with queues the step itself is slower than usual.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "job/predict.h"
#include "model/ops.h"

namespace dspark::job {

struct PartTime {
  std::string name;
  double measured = 0, predicted = 0;  // seconds
  double at_limit = 0;                 // seconds at the device's matrix and memory limits, whichever takes longer; of transfers 0
};

class TimedBackend {
 public:
  // The machine's rates predict, its peaks are the limits.
  TimedBackend(model::Context& inner, const Machine& machine);
  ~TimedBackend();
  model::Context& context();
  void reset();
  // By part and direction, the optimizer by kind of work; the loss head is one operator and one line.
  std::vector<PartTime> rows() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace dspark::job
