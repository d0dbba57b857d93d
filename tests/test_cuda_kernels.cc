// Kernels of the cuda backend called directly on the emulation: what the operator table cannot ask.
#include <catch2/catch.hpp>

#include <cmath>
#include <cstring>
#include <vector>

#include "core/rng.h"
#include "cuda/kernels.h"
#include "core/dtype.h"
#include "cuda_emulation/block.h"
#include "cuda_emulation/memory.h"
#include "cuda_emulation/streams.h"

namespace dspark::test {
namespace {

// Device memory that lives as long as this, in fp32 or bf16.
class Memory {
 public:
  Memory() : stream_(emulation::create_stream()) {}
  ~Memory() {
    emulation::synchronize(stream_);
    for (void* p : owned_) emulation::free_global(p);
    emulation::destroy_stream(stream_);
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  emulation::StreamState* stream() const { return stream_; }
  void* bytes(int64_t n) { return owned_.emplace_back(emulation::allocate_global(n)); }
  template <typename Value>
  cuda::Matrix matrix(bool half, int64_t rows, int64_t cols, int64_t stride, const Value& value) {
    void* p = bytes(rows * stride * (half ? 2 : 4));
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < cols; ++c) {
        const auto v = static_cast<float>(value(r, c));
        if (half) static_cast<bf16*>(p)[r * stride + c] = to_bf16(v);
        else static_cast<float*>(p)[r * stride + c] = v;
      }
    return {p, rows, cols, stride, half, stride * (half ? 2 : 4) % 16 == 0};
  }

 private:
  emulation::StreamState* stream_;
  std::vector<void*> owned_;
};

}  // namespace

// The old weight times (1 - lr wd), less the update, would be rounded twice, and 1 - lr wd once more.
TEST_CASE("AdamW on the cuda backend rounds a decayed weight once", "[cuda]") {
  emulation::set_seed(32);
  const Rng rng(32, RngStream::test);
  Memory memory;
  constexpr int64_t kCols = 4096;
  const auto constant = [&](double v) { return memory.matrix(false, 1, kCols, kCols, [v](int64_t, int64_t) { return v; }); };
  cuda::AdamWStep a;
  a.master = memory.matrix(false, 1, kCols, kCols, [&](int64_t, int64_t c) { return rng.normal(static_cast<uint64_t>(c)); });
  a.grad = memory.matrix(false, 1, kCols, kCols, [&](int64_t, int64_t c) { return rng.normal(static_cast<uint64_t>(kCols + c)); });
  a.m = constant(0), a.v = constant(0);
  const double lr = 0.0009765625, decay = 0.0123;
  std::vector<float> scalars(16, 0.0f), before(static_cast<const float*>(a.master.data), static_cast<const float*>(a.master.data) + kCols);
  scalars[cuda::kStepLr] = static_cast<float>(lr), scalars[cuda::kStepGradScale] = scalars[cuda::kStepClip] = scalars[cuda::kStepFinite] = 1;
  scalars[cuda::kStepBias1] = 0.125f, scalars[cuda::kStepBias2] = 0.0625f;
  a.scalars = static_cast<const float*>(memory.matrix(false, 1, 16, 16, [&](int64_t, int64_t c) { return scalars[static_cast<size_t>(c)]; }).data);
  a.weight_decay = decay, a.beta1 = 0.875f, a.one_minus_beta1 = 0.125f, a.beta2 = 0.9375f, a.one_minus_beta2 = 0.0625f, a.eps = 1e-8f;
  cuda::adamw(memory.stream(), a);
  emulation::synchronize(memory.stream());
  double worst = 0;
  for (int64_t c = 0; c < kCols; ++c) {
    const double p = before[static_cast<size_t>(c)], g = static_cast<const float*>(a.grad.data)[c];
    const double change = lr * decay * p + lr * g / (std::fabs(g) + 1e-8), want = p - change;  // first moments: g and g^2
    const double ulp = std::ldexp(1.0, std::ilogb(want) - 23);
    worst = std::max(worst, (std::fabs(static_cast<const float*>(a.master.data)[c] - want) - 1e-6 * std::fabs(change)) / ulp);
  }
  CHECK(worst <= 0.5);
}

}  // namespace dspark::test
