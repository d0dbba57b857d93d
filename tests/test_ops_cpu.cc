// What the table of operator cases (test_ops.cc) does not reach on the CPU backend: shapes large enough to be shared
// among threads, every ISA level this machine has, the accuracy of exp and of rotary angles over their range,
// transfers.
#include <catch2/catch.hpp>

#include <cmath>
#include <cstring>
#include <vector>

#include "core/rng.h"
#include "model/backends.h"
#include "model/ops_cpu/gemm.h"

using namespace dspark;
using namespace dspark::model;
using Catch::Contains;

namespace {

struct Cpu {
  std::unique_ptr<Backend> backend;
  Context& ctx;
  std::vector<Tensor> owned;
  std::vector<std::unique_ptr<Weight>> weights;

  Cpu(Precision precision, int threads, std::string kernel = "auto")
      : backend(make_cpu_backend({.precision = precision, .threads = threads, .cpu_kernel = kernel})),
        ctx(backend->context()) {}
  ~Cpu() {
    weights.clear();
    for (const Tensor& t : owned) ctx.free(t);
  }
  Tensor make(DType dtype, int64_t rows, int64_t cols) {
    owned.push_back(ctx.allocate(dtype, rows, cols));
    return owned.back();
  }
  Tensor put(DType dtype, int64_t rows, int64_t cols, const std::vector<double>& v) {
    const Tensor t = make(dtype, rows, cols);
    ctx.upload_now(t, {v.data(), DType::f64, rows, cols, cols});
    return t;
  }
  Tensor random(DType dtype, int64_t rows, int64_t cols, uint64_t seed, double scale = 1) {
    const Rng rng(seed, RngStream::test);
    std::vector<double> v(static_cast<size_t>(rows * cols));
    for (size_t i = 0; i < v.size(); ++i) v[i] = scale * rng.normal(i);
    return put(dtype, rows, cols, v);
  }
  Tensor ids(const std::vector<int64_t>& v) {
    const Tensor t = make(DType::i32, 1, static_cast<int64_t>(v.size()));
    ctx.upload_now(t, {v.data(), DType::i64, 1, t.cols, t.cols});
    return t;
  }
  std::vector<double> get(const Tensor& t) {
    std::vector<double> v(static_cast<size_t>(t.size()));
    ctx.download_now({v.data(), DType::f64, t.rows, t.cols, t.cols}, t);
    return v;
  }
};

// Every operator of this backend at a size that is worth several threads; the results one after another.
std::vector<double> run_everything(Cpu& c, bool in_bf16) {
  const DType act = in_bf16 ? DType::bf16 : DType::f32, acc = DType::f32;
  const int64_t n = 301, d = 520, heads = 4, hd = 64, wide = 40000;
  std::vector<double> all;
  const auto keep = [&](const Tensor& t) {
    const std::vector<double> v = c.get(t);
    all.insert(all.end(), v.begin(), v.end());
  };
  const Tensor x = c.random(acc, n, d, 1), delta = c.random(act, n, d, 2), w = c.random(acc, 1, d, 3);
  const Tensor y = c.make(act, n, d), sum = c.make(acc, n, d), inv = c.make(acc, 1, n);
  add_rmsnorm(c.ctx, {.y = y, .x_out = sum, .x = x, .delta = delta, .weight = w, .inv_rms = inv});
  const Tensor d_x = c.make(acc, n, d), d_w = c.make(acc, 1, d), bias = c.make(acc, 1, d);
  rmsnorm_backward(c.ctx, {.d_x = d_x, .d_weight = d_w, .dy = delta, .x = sum, .weight = w, .inv_rms = inv});
  bias_grad(c.ctx, {.d_bias = bias, .dy = delta});
  for (const Tensor& t : {y, sum, inv, d_x, d_w, bias}) keep(t);

  std::vector<int64_t> positions, rows;
  for (int64_t i = 0; i < n; ++i) {
    positions.push_back(i * 977 % 100003);
    rows.push_back(i * 7 % n);
  }
  const Tensor q = c.random(act, n, heads * hd, 4), dq = c.random(act, n, heads * hd, 5),
               qy = c.make(act, n, heads * hd);
  const Tensor qw = c.random(acc, 1, hd, 6), qi = c.make(acc, n, heads), d_q = c.make(act, n, heads * hd);
  std::vector<double> frequencies;
  for (int i = 0; i < hd / 2; ++i) frequencies.push_back(std::pow(1e4, -i / 32.0));
  const Rope rope{c.put(acc, 1, hd / 2, frequencies), hd, 1.25};
  const Tensor at = c.ids(positions), d_qw = c.make(acc, 1, hd);
  qk_norm_rope(c.ctx, {.y = qy, .x = q, .weight = qw, .position = at, .inv_rms = qi, .rope = rope, .head_dim = hd});
  qk_norm_rope_backward(c.ctx, {.d_x = d_q,
                                .d_weight = d_qw,
                                .dy = dq,
                                .x = q,
                                .weight = qw,
                                .position = at,
                                .inv_rms = qi,
                                .rope = rope,
                                .head_dim = hd});
  for (const Tensor& t : {qy, qi, d_q, d_qw}) keep(t);

  // Rows longer than one piece.
  const Tensor gu = c.random(act, 3, 2 * wide, 7), dy = c.random(act, 3, wide, 8), s = c.make(act, 3, wide);
  const Tensor d_gu = c.make(act, 3, 2 * wide), copied = c.make(acc, 3, wide), squares = c.make(acc, 1, 1);
  swiglu(c.ctx, {s, gu});
  swiglu_backward(c.ctx, {d_gu, dy, gu});
  copy(c.ctx, {copied, s});
  add_bias(c.ctx, {copied, c.random(acc, 1, wide, 9)});
  sum_squares(c.ctx, {squares, copied});
  for (const Tensor& t : {s, d_gu, copied, squares}) keep(t);

  const Tensor gathered = c.make(act, n, d), scattered = c.make(acc, n, d), index = c.ids(rows);
  gather_rows(c.ctx, {gathered, sum, index});
  fill(c.ctx, {scattered, 0.5});
  scatter_rows(c.ctx, {scattered, gathered, index});
  for (const Tensor& t : {gathered, scattered}) keep(t);

  auto& weight = *c.weights.emplace_back(std::make_unique<Weight>());
  weight.value = c.random(act, 200, d, 10);
  weight.needs_input_gradient = true;
  refresh(c.ctx, {&weight});
  const Tensor a = c.random(act, n, d, 11), out = c.make(acc, n, 200), back = c.make(acc, n, d),
               dw = c.make(acc, 200, d);
  const Tensor d_out = c.random(act, n, 200, 12);
  linear(c.ctx, {out, a, &weight});
  linear_dx(c.ctx, {back, d_out, &weight});
  linear_dw(c.ctx, {dw, d_out, a});
  for (const Tensor& t : {out, back, dw}) keep(t);

  const Tensor m = c.random(acc, 200, d, 13, 0.01), v = c.make(acc, 200, d), master = c.random(acc, 200, d, 14);
  fill(c.ctx, {v, 0.25});
  const Tensor scalars = c.put(acc, 1, kNumStepScalars, {1e-3, 0.5, 1, 1, 0.1, 0.001, 0, 1, 1});
  const Tensor value = c.make(act, 200, d);
  adamw(c.ctx, {.master = master, .m = m, .v = v, .grad = dw, .value = value, .scalars = scalars, .weight_decay = 0.1});
  for (const Tensor& t : {m, v, master, value}) keep(t);
  return all;
}

bool same_bits(const std::vector<double>& a, const std::vector<double>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(double)) == 0;
}

}  // namespace

TEST_CASE("the number of threads changes no bit", "[ops_cpu]") {
  for (const bool half : {false, true}) {
    const Precision precision = half ? Precision::bf16 : Precision::fp32;
    Cpu one(precision, 1), three(precision, 3), seven(precision, 7);
    const std::vector<double> want = run_everything(one, half);
    CHECK(same_bits(want, run_everything(three, half)));
    CHECK(same_bits(want, run_everything(seven, half)));
    for (const double v : want)
      if (!std::isfinite(v)) FAIL("a result is not finite");
  }
}

TEST_CASE("every ISA level computes the same up to rounding", "[ops_cpu]") {
  // fp32 throughout. Levels differ by fused or separate multiply-adds, so by a rounding a term: 5e-6 is 42 ulp, for
  // sums of up to 520 terms whose errors grow like sqrt(n); values below 4 are sums of terms of that size that
  // cancelled.
  Cpu first(Precision::fp32, 2, "base");
  const std::vector<double> want = run_everything(first, false);
  for (const cpu::Kernel* kernel : cpu::available_kernels()) {
    Cpu c(Precision::fp32, 2, std::string(kernel->name()));
    const std::vector<double> got = run_everything(c, false);
    REQUIRE(got.size() == want.size());
    double worst = 0;
    for (size_t i = 0; i < want.size(); ++i)
      worst = std::max(worst, std::fabs(got[i] - want[i]) / std::max(4.0, std::fabs(want[i])));
    INFO(kernel->name());
    CHECK(worst <= 5e-6);
  }
}

TEST_CASE("silu is accurate from underflow to overflow", "[ops_cpu]") {
  // silu is exp in disguise: x / (1 + e^-x). Three roundings after an exp of about 1 ulp: 4 ulp.
  for (const cpu::Kernel* kernel : cpu::available_kernels()) {
    Cpu c(Precision::fp32, 1, std::string(kernel->name()));
    std::vector<double> v;
    for (int i = -5000; i <= 5000; ++i) v.push_back(static_cast<float>(i * 0.02137));
    const int64_t n = static_cast<int64_t>(v.size());
    std::vector<double> gate_up = v;
    gate_up.resize(v.size() * 2, 1.0);
    const Tensor y = c.make(DType::f32, 1, n);
    swiglu(c.ctx, {y, c.put(DType::f32, 1, 2 * n, gate_up)});
    const std::vector<double> got = c.get(y);
    double worst = 0;
    for (size_t i = 0; i < v.size(); ++i) {
      const double want = v[i] / (1 + std::exp(-v[i]));
      if (v[i] == 0) continue;
      if (v[i] > -86)
        worst = std::max(worst, std::fabs(got[i] - want) / std::fabs(want));
      else  // the exponential leaves fp32's normal range: 0 to 35 digits
        CHECK(std::fabs(got[i] - want) < 1e-35);
    }
    INFO(kernel->name());
    CHECK(got[5000] == 0);  // of 0
    CHECK(worst <= 4 * 0x1p-23);
  }
}

TEST_CASE("rotary angles stay accurate at large positions", "[ops_cpu]") {
  for (const cpu::Kernel* kernel : cpu::available_kernels()) {
    Cpu c(Precision::fp32, 1, std::string(kernel->name()));
    const std::vector<int64_t> positions = {0, 1, 2, 3, 5, 100, 4095, 131071, 1000003, 16777213};
    const int64_t half = 19, n = static_cast<int64_t>(positions.size());
    std::vector<double> frequencies, x;
    for (int i = 0; i < half; ++i) frequencies.push_back(static_cast<float>(std::pow(1e6, -i / 19.0)));
    for (int64_t r = 0; r < n; ++r)
      for (int64_t i = 0; i < 2 * half; ++i) x.push_back(i < half ? 1 : 0);  // rotated: (cos, sin)
    const Tensor y = c.make(DType::f32, n, 2 * half);
    qk_norm_rope(c.ctx, {.y = y,
                         .x = c.put(DType::f32, n, 2 * half, x),
                         .position = c.ids(positions),
                         .rope = {c.put(DType::f32, 1, half, frequencies), 2 * half, 1},
                         .head_dim = 2 * half});
    const std::vector<double> got = c.get(y);
    double worst = 0;
    for (size_t r = 0; r < positions.size(); ++r)
      for (size_t i = 0; i < 19; ++i) {
        const double angle = static_cast<double>(positions[r]) * frequencies[i];
        worst = std::max(worst, std::fabs(got[r * 38 + i] - std::cos(angle)));
        worst = std::max(worst, std::fabs(got[r * 38 + 19 + i] - std::sin(angle)));
      }
    INFO(kernel->name());
    CHECK(worst <= 1.5 * 0x1p-24);  // of values up to 1: one rounding is 2^-25 to 2^-24
  }
}

TEST_CASE("transfers convert with one rounding and check ranges", "[ops_cpu]") {
  Cpu c(Precision::bf16, 2);
  // 1 + 2^-8 lies in the middle of two bf16 numbers (even: 1); a little more must go up although fp32 does not see it.
  const Tensor t =
      c.put(DType::bf16, 1, 4, {1 + 0x1p-8, 1 + 0x1p-8 + 0x1p-40, -(1 + 0x1p-8 + 0x1p-40), 1 + 3 * 0x1p-8 - 0x1p-40});
  CHECK(c.get(t) == std::vector<double>{1, 1 + 0x1p-7, -(1 + 0x1p-7), 1 + 0x1p-7});

  const Tensor i = c.make(DType::i32, 1, 2);
  const std::vector<int64_t> large = {1, int64_t{1} << 31};
  CHECK_THROWS_WITH(c.ctx.upload_now(i, {large.data(), DType::i64, 1, 2, 2}), Contains("32 bits"));

  // Through strides on both sides.
  const Tensor wide = c.make(DType::f32, 3, 7);
  fill(c.ctx, {wide, -1});
  const std::vector<float> host = {1, 2, 0, 3, 4, 0, 5, 6, 0};
  c.ctx.upload_now(wide.col_range(2, 2), {host.data(), DType::f32, 3, 2, 3});
  CHECK(c.get(wide) ==
        std::vector<double>{-1, -1, 1, 2, -1, -1, -1, -1, -1, 3, 4, -1, -1, -1, -1, -1, 5, 6, -1, -1, -1});
}

TEST_CASE("the cpu backend says what it was given", "[ops_cpu]") {
  CHECK_THAT(Cpu(Precision::bf16, 2).backend->describe(), Contains("cpu bf16, 2 threads, gemm "));
  CHECK_THROWS_WITH(make_cpu_backend({.precision = Precision::fp64}), Contains("bf16 or fp32"));
}
