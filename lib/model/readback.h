// A device value on its way to the host: how training reads losses and norms, one step late, without stopping the device.
//
//   Readback r;  r.start(ctx, tensor);  ... more work is enqueued ...;  for (double v : r.wait()) ...
#pragma once

#include <span>
#include <utility>
#include <vector>

#include "model/context.h"

namespace dspark::model {

class Readback {
 public:
  Readback() = default;
  Readback(Readback&& other) noexcept : device_(std::exchange(other.device_, nullptr)), event_(other.event_), values_(std::move(other.values_)) {}
  Readback& operator=(Readback&&) = delete;
  // Waits for a copy that nobody asked for, after a failure too: the device writes to this memory until then.
  ~Readback();

  // Enqueues the copy of a float matrix, behind everything that compute has been given. Before compute writes `src` again,
  // it must wait for event().
  void start(Context& ctx, const Tensor& src);
  Event event() const { return event_; }
  // The values, row-major; the host waits until they are here. Valid until the next start().
  std::span<const double> wait();

 private:
  Device* device_ = nullptr;  // of a copy that is not known to be over
  Event event_;
  std::vector<double> values_;
};

}  // namespace dspark::model
