// Learning-rate schedules in closed form (DESIGN 4). Steps count from 0.
#pragma once

#include <cstdint>
#include <string>

namespace dspark::train {

struct Schedule {
  enum class Kind : uint8_t { constant, cosine /* deepspec */, linear, half_cosine /* speculators */ };
  Kind kind = Kind::cosine;
  double lr = 6e-4;
  int64_t total = 1;
  int64_t warmup = 0;      // W steps
  double cycles = 0.5;     // half_cosine

  double at(int64_t step) const;
};

// deepspec: W = int(ratio * total).
int64_t deepspec_warmup(double ratio, int64_t total);

}  // namespace dspark::train
