// AdamW over a drafter's trainable tensors, with clipping by the norm over all of them. All of a step's scalars live on the
// device; a step whose gradients are not finite changes nothing.
#pragma once

#include <memory>
#include <vector>

#include "model/drafter.h"

namespace dspark::train {

struct AdamWOptions {
  double beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0.0;
  double clip = 1.0;  // maximal norm; 0: none
};

// One tensor's optimizer state, [rows, cols] acc, under the parameter's name.
struct OptimizerState {
  std::string name;
  model::Tensor m, v;
};

class AdamWOptimizer {
 public:
  AdamWOptimizer(model::Drafter& drafter, const AdamWOptions& options);
  ~AdamWOptimizer();
  AdamWOptimizer(const AdamWOptimizer&) = delete;
  AdamWOptimizer& operator=(const AdamWOptimizer&) = delete;

  struct Result {
    double grad_norm = 0;
    bool applied = true;  // false: the gradient was not finite, nothing changed
  };
  // One step with `lr`; gradients are multiplied by grad_scale first. Refreshes the drafter's weights.
  Result step(double lr, double grad_scale);

  int64_t steps() const { return steps_; }        // applied so far; part of a checkpoint
  void set_steps(int64_t n) { steps_ = n; }
  std::vector<OptimizerState>& states() { return states_; }

 private:
  model::Drafter& drafter_;
  model::Context& ctx_;
  AdamWOptions options_;
  std::vector<OptimizerState> states_;
  std::vector<size_t> parameter_;  // index into drafter.parameters() of each state
  model::Tensor scalars_, sums_;
  int64_t steps_ = 0;
};

}  // namespace dspark::train
