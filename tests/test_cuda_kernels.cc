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

TEST_CASE("cache attention joins the parts of a long cache to the same bits wherever they were worked out", "[cuda]") {
  emulation::set_seed(31);
  const Rng rng(31, RngStream::test);
  struct Shape {
    int64_t n, first;
    int window, heads, kv_heads, head_dim;
  };
  for (const Shape& s : {Shape{3, 1030, 0, 4, 2, 16}, {2, 511, 0, 2, 1, 8}, {5, 1022, 600, 3, 3, 10}, {2, 1200, 30, 1, 1, 8}, {1, 600, 0, 1, 1, 200}})
    for (const bool half : {true, false}) {
      INFO(s.n << " rows after " << s.first << ", window " << s.window << ", heads of " << s.head_dim << (half ? ", bf16" : ", fp32"));
      Memory memory;
      const int64_t filled = s.first + s.n, q_cols = s.heads * s.head_dim, kv_cols = s.kv_heads * s.head_dim;
      const auto random = [&](uint64_t base) { return [&rng, base](int64_t r, int64_t c) { return 1.5 * rng.normal(base + static_cast<uint64_t>(r * 1000 + c)); }; };
      cuda::CacheArgs a;
      a.q = memory.matrix(half, s.n, q_cols, q_cols, random(0)), a.k = memory.matrix(half, filled, kv_cols, kv_cols, random(10000000)), a.v = memory.matrix(half, filled, kv_cols, kv_cols, random(20000000));
      a.first = s.first, a.window = s.window, a.heads = s.heads, a.kv_heads = s.kv_heads, a.head_dim = s.head_dim, a.in_bf16 = half, a.scale = 0.3f;
      for (cuda::Matrix* m : {&a.q, &a.k, &a.v}) m->vector = m->vector && s.head_dim % 8 == 0;
      const auto run = [&](cuda::Scratch scratch) {
        a.out = memory.matrix(false, s.n, q_cols, q_cols, [](int64_t, int64_t) { return std::nanf(""); });
        cuda::cache_attention(memory.stream(), a, scratch);
        emulation::synchronize(memory.stream());
        const auto* p = static_cast<const float*>(a.out.data);
        return std::vector<float>(p, p + s.n * q_cols);
      };
      const std::vector<float> apart = run({memory.bytes(1 << 20), 1 << 20}), together = run({});
      CHECK(std::memcmp(apart.data(), together.data(), apart.size() * 4) == 0);
      // And the right ones: all in fp64.
      double worst = 0;
      for (int64_t i = 0; i < s.n; ++i)
        for (int h = 0; h < s.heads; ++h) {
          const auto value = [&](const cuda::Matrix& m, int64_t r, int64_t c) {
            return static_cast<double>(half ? to_float(static_cast<const bf16*>(m.data)[r * m.stride + c]) : static_cast<const float*>(m.data)[r * m.stride + c]);
          };
          const int64_t kv = h / (s.heads / s.kv_heads) * s.head_dim, begin = s.window > 0 ? std::max<int64_t>(0, s.first + i - s.window + 1) : 0;
          std::vector<double> out(static_cast<size_t>(s.head_dim)), scores;
          double top = -1e300, sum = 0;
          for (int64_t t = begin; t <= s.first + i; ++t) {
            double dot = 0;
            for (int c = 0; c < s.head_dim; ++c) dot += value(a.q, i, h * s.head_dim + c) * value(a.k, t, kv + c);
            scores.push_back(dot * static_cast<double>(a.scale));
            top = std::max(top, scores.back());
          }
          for (int64_t t = begin; t <= s.first + i; ++t) {
            const double e = std::exp(scores[static_cast<size_t>(t - begin)] - top);
            sum += e;
            for (int c = 0; c < s.head_dim; ++c) out[static_cast<size_t>(c)] += e * value(a.v, t, kv + c);
          }
          for (int c = 0; c < s.head_dim; ++c) worst = std::max(worst, std::fabs(together[static_cast<size_t>(i * q_cols + h * s.head_dim + c)] - out[static_cast<size_t>(c)] / sum));
        }
      // Values are about 1.5; bf16 rounds each weight by at most 2^-9 of itself, fp32 sums and exponents of some hundred terms by 1e-6.
      CHECK(worst < (half ? 1.5 / 128 : 5e-6));
    }
  CHECK(emulation::global_allocations() == 0);
}

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

TEST_CASE("noise made on the device is the noise the host makes", "[cuda]") {
  emulation::set_seed(33);
  for (const bool half : {true, false})
    for (const auto& [rows, cols, stride] : {std::tuple<int64_t, int64_t, int64_t>{37, 24, 24}, {5, 11, 13}, {1, 1, 1}, {300, 8, 8}}) {
      const Rng values(1, RngStream::test), rng(0x123456789abcdef0u, RngStream::noise, 0xfedcba9876543211u);
      Memory memory;
      const cuda::Matrix x = memory.matrix(half, rows, cols, stride, [&](int64_t r, int64_t c) { return values.normal(static_cast<uint64_t>(r * 100 + c)); });
      const double amount = 0.05;
      std::vector<float> want;
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t c = 0; c < cols; ++c) {
          const float before = half ? to_float(static_cast<const bf16*>(x.data)[r * stride + c]) : static_cast<const float*>(x.data)[r * stride + c];
          want.push_back(before + static_cast<float>(amount * (2 * rng.uniform(static_cast<uint64_t>(r * cols + c)) - 1)));  // lib/train/data.cc
        }
      cuda::add_noise(memory.stream(), x, amount, {0x123456789abcdef0u, static_cast<uint32_t>(RngStream::noise), 0xfedcba9876543211u});
      emulation::synchronize(memory.stream());
      int64_t wrong = 0;
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t c = 0; c < cols; ++c) {
          const float w = want[static_cast<size_t>(r * cols + c)];
          wrong += half ? static_cast<const bf16*>(x.data)[r * stride + c].bits != to_bf16(w).bits : static_cast<const float*>(x.data)[r * stride + c] != w;
        }
      CHECK(wrong == 0);
    }
}

}  // namespace dspark::test
