// Measures what this machine reaches at each kind of a training step's work, in a second or two, for predicting steps of any shape.
//
// Protocol: each kind runs as operators of the backend in use on normal random values at one middling shape, once to warm up and then
// for at least 60 ms and three times; its rate is what the planner counts for the same operators over the median time. Nothing here
// knows the drafter that is planned, so a prediction is a check of the model, not of itself.
#pragma once

#include <vector>

#include "job/common.h"
#include "job/machines.h"

namespace dspark::job {

struct WorkRate {
  model::Work work;
  bool by_bytes = false;       // bytes limit this kind, not operations
  double rate = 0;             // FLOP/s or bytes/s
  std::vector<double> samples;
};
std::vector<WorkRate> measure_work(model::Backend& backend, model::Precision precision);
const char* work_name(model::Work work);

// As a Machine: "this". The scalar reference is not one: fp64 is refused.
Machine measure_machine(const CommonOptions& options);
Machine measure_machine(model::Backend& backend, const CommonOptions& options);

}  // namespace dspark::job
