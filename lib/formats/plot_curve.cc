#include "formats/plot_curve.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace dspark::formats {

namespace {

void merge(Curve::Bucket& to, const Curve::Bucket& from) {
  if (from.finite > 0) {
    to.low = to.finite > 0 ? std::min(to.low, from.low) : from.low;
    to.high = to.finite > 0 ? std::max(to.high, from.high) : from.high;
  }
  to.x_sum += from.x_sum, to.y_sum += from.y_sum, to.points += from.points, to.finite += from.finite;
}

}  // namespace

double Curve::Bucket::mean() const { return finite > 0 ? y_sum / static_cast<double>(finite) : std::numeric_limits<double>::quiet_NaN(); }

void Curve::add(double x, double y) {
  const bool finite = std::isfinite(y);
  const Bucket one{x, finite ? y : 0, y, y, 1, finite ? 1 : 0};
  if (!buckets_.empty() && buckets_.back().points < width_) return merge(buckets_.back(), one);
  if (buckets_.size() == kMost) {
    static_assert(kMost % 2 == 0);
    for (size_t i = 0; i < kMost / 2; ++i) {
      Bucket both = buckets_[2 * i];
      merge(both, buckets_[2 * i + 1]);
      buckets_[i] = both;
    }
    buckets_.resize(kMost / 2);
    width_ *= 2;
  }
  buckets_.push_back(one);
}

}  // namespace dspark::formats
