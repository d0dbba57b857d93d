// Tensors for one measurement on one backend, real or planned: made, filled, and freed together.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "model/ops.h"

namespace dspark::job {

class Probe {
 public:
  explicit Probe(model::Context& ctx);
  ~Probe();
  Probe(const Probe&) = delete;
  Probe& operator=(const Probe&) = delete;

  model::Tensor empty(DType type, int64_t rows, int64_t cols);
  // Normal numbers times `scale`; the planner's tensors hold nothing. Rows are one row turned by a column each, since drawing all of
  // them would take longer than the measurement.
  model::Tensor random(DType type, int64_t rows, int64_t cols, float scale = 1);
  model::Tensor act(int64_t rows, int64_t cols, float scale = 1) { return random(ctx.act_dtype(), rows, cols, scale); }
  model::Tensor acc(int64_t rows, int64_t cols, float scale = 1) { return random(ctx.acc_dtype(), rows, cols, scale); }
  model::Tensor ints(int64_t n, const std::function<int32_t(int64_t)>& value);
  // [out, in], packed for the forward and the input gradient.
  model::Weight* weight(int64_t out, int64_t in);
  model::Weight* weight(const model::Tensor& value, bool input_gradient);

  model::Context& ctx;
  std::function<void()> run, without;  // what is timed; and what is timed alone and taken off it

 private:
  bool planned_;
  std::vector<model::Tensor> owned_;
  std::vector<std::unique_ptr<model::Weight>> weights_;
};

// Seconds of each call by the device's clock, after one to warm up: at least `seconds` in all and `repeats` of them. Calls that are shorter
// than `least` are timed several at once.
std::vector<double> times(model::Context& ctx, const std::function<void()>& body, double seconds, int repeats, double least = 0);
double median(std::vector<double> v);

}  // namespace dspark::job
