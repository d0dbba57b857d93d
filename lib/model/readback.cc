#include "model/readback.h"

namespace dspark::model {

void Readback::start(Context& ctx, const Tensor& src) {
  device_ = &ctx.device();
  values_.resize(static_cast<size_t>(src.size()));
  device_->wait(Queue::copy, device_->record(Queue::compute));
  event_ = device_->download(Queue::copy, {values_.data(), DType::f64, src.rows, src.cols, src.cols}, src);
}

std::span<const double> Readback::wait() {
  if (device_ != nullptr) device_->synchronize(event_);
  return values_;
}

}  // namespace dspark::model
