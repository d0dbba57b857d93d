#include "model/readback.h"

#include <exception>

namespace dspark::model {

Readback::~Readback() {
  try {
    wait();
  } catch (const std::exception&) {
    // The copy has happened all the same; what went wrong ends the run already.
  }
}

void Readback::start(Context& ctx, const Tensor& src) {
  wait();
  device_ = &ctx.device();
  values_.resize(static_cast<size_t>(src.size()));
  device_->wait(Queue::download, device_->record(Queue::compute));
  event_ = device_->download(Queue::download, {values_.data(), DType::f64, src.rows, src.cols, src.cols}, src);
}

std::span<const double> Readback::wait() {
  if (device_ != nullptr) device_->synchronize(event_);
  device_ = nullptr;
  return values_;
}

}  // namespace dspark::model
