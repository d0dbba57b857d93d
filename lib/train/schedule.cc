#include "train/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace dspark::train {

double Schedule::at(int64_t step) const {
  const auto t = static_cast<double>(step), w = static_cast<double>(warmup), n = static_cast<double>(total);
  const double left = std::max(n - w, 1.0);
  switch (kind) {
    case Kind::constant: return step < warmup ? lr * (t + 1) / w : lr;
    case Kind::cosine:
      if (step < warmup) return lr * (t + 1) / w;
      return lr * 0.5 * (1 + std::cos(std::numbers::pi * (t - w) / left));
    case Kind::linear:
      if (step < warmup) return lr * t / std::max(w, 1.0);
      return lr * std::max(0.0, (n - t) / left);
    case Kind::half_cosine:
      if (step < warmup) return lr * t / std::max(w, 1.0);
      return lr * std::max(0.0, 0.5 * (1 + std::cos(std::numbers::pi * cycles * 2 * (t - w) / left)));
  }
  return lr;
}

int64_t deepspec_warmup(double ratio, int64_t total) { return static_cast<int64_t>(ratio * static_cast<double>(total)); }

}  // namespace dspark::train
