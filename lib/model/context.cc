#include "model/context.h"

#include <algorithm>

#include "core/log.h"

namespace dspark::model {
namespace {
constexpr int64_t kAlign = 64;
int64_t aligned(int64_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }
}  // namespace

double Device::time(const std::function<void()>& work) {
  synchronize(record(Queue::compute));
  const double start = now_s();
  work();
  synchronize(record(Queue::compute));
  return now_s() - start;
}

Arena::Arena(Device& device, int64_t capacity_bytes) : device_(device), capacity_(capacity_bytes) {
  // A planning arena still needs distinct, aligned addresses: the plan backend hands them out without memory behind.
  base_ = device_.allocate(capacity_ > 0 ? capacity_ : kAlign);
}

Arena::~Arena() { device_.free(base_); }

Tensor Arena::matrix(DType dtype, int64_t rows, int64_t cols) {
  const int64_t bytes = std::max(aligned(rows * cols * dtype_bytes(dtype)), kAlign);
  DS_ASSERT(capacity_ == 0 || top_ + bytes <= capacity_, "the arena was planned with {} bytes, {} are needed",
            capacity_, top_ + bytes);
  Tensor t{base_ + top_, dtype, rows, cols, cols};
  top_ += bytes;
  peak_ = std::max(peak_, top_);
  return t;
}

Tensor Context::allocate(DType dtype, int64_t rows, int64_t cols) {
  return {device_.allocate(std::max(aligned(rows * cols * dtype_bytes(dtype)), kAlign)), dtype, rows, cols, cols};
}

void Context::upload_now(const Tensor& dst, const ConstHostMatrix& src) {
  device_.synchronize(device_.upload(Queue::compute, dst, src));
}

void Context::download_now(const HostMatrix& dst, const Tensor& src) {
  device_.synchronize(device_.download(Queue::compute, dst, src));
}

}  // namespace dspark::model
