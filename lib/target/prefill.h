// Prefill: one document through the target, its tapped states out (bf16, as stores hold them).
#pragma once

#include <span>
#include <vector>

#include "target/target_model.h"

namespace dspark::target {

class Prefill {
 public:
  // Documents of up to max_length tokens; taps n = after n layers, ascending.
  Prefill(TargetModel& target, std::vector<int> taps, int64_t max_length);
  ~Prefill();
  Prefill(const Prefill&) = delete;
  Prefill& operator=(const Prefill&) = delete;

  // [T, (L+1)*E]: the taps side by side, then the last layer's state before the final norm.
  std::vector<bf16> run(std::span<const int32_t> ids);

 private:
  TargetModel& target_;
  std::vector<int> taps_;
  KvCache cache_;
  int64_t width_;
  model::Arena arena_;
};

}  // namespace dspark::target
