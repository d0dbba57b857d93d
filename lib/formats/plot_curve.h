// A curve of any length in bounded memory, for plots a few hundred pixels wide.
//
// Points come with ascending x. When there would be more than kMost, every two neighbours become one bucket that keeps their mean, least
// and greatest value: 100,000 steps cost what 600 do, and no spike is lost.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace dspark::formats {

class Curve {
 public:
  static constexpr size_t kMost = 600;

  // A y that is not finite takes part in nothing; a bucket without a finite y is a gap (NaN).
  void add(double x, double y);

  struct Bucket {
    double x_sum = 0, y_sum = 0, low = 0, high = 0;
    int64_t points = 0, finite = 0;
    double x() const { return x_sum / static_cast<double>(points); }
    double mean() const;
  };
  const std::vector<Bucket>& buckets() const { return buckets_; }
  bool empty() const { return buckets_.empty(); }
  int64_t points_per_bucket() const { return width_; }

 private:
  std::vector<Bucket> buckets_;
  int64_t width_ = 1;
};

}  // namespace dspark::formats
