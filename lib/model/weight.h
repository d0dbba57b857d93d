// Weight: what `linear` multiplies with.
//
// `value` is the canonical row-major matrix in the device's act dtype: it is what files and ranks exchange. A backend
// may keep packings of it for the forward product and for the input gradient (opaque here); `refresh` rebuilds them and
// must follow every change of `value`. Masters, gradients and optimizer states belong to the trainer
// (train/parameters.h).
#pragma once

#include <memory>

#include "model/tensor.h"

namespace dspark::model {

// A backend's own copies of a weight. Destroyed with the weight.
class WeightPacking {
 public:
  virtual ~WeightPacking() = default;
};

// What the cpu backend packs besides every weight's forward product: weights of at most this many elements for their input gradient
// too. Larger ones (heads) are multiplied with many rows at once in a backward, so packing them on the way costs little there, and a
// copy of them much memory.
inline constexpr int64_t kPackedForGradient = 16 << 20;

struct Weight {
  Tensor value;  // [out, in] act dtype
  std::shared_ptr<WeightPacking> packing;
  bool needs_input_gradient = false;  // set before the first refresh: also pack for linear_dx
  // `value` is the first columns of this weight's, which lives longer and was refreshed: its packing may serve both.
  const Weight* first_columns_of = nullptr;

  int64_t out() const { return value.rows; }
  int64_t in() const { return value.cols; }
};

}  // namespace dspark::model
