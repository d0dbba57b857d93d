// Which algorithms of cuBLASLt the cuda backend takes, and how a choice is written down and comes back; graphs.
#include <catch2/catch.hpp>

#include <bit>
#include <cmath>
#include <functional>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "core/rng.h"
#include "cuda/backend.h"
#include "cuda_emulation/block.h"
#include "cuda_emulation/fakes.h"
#include "cuda_emulation/memory.h"

namespace dspark::test {
namespace {

using Catch::Contains;
using model::Context;
using model::GemmChoice;
using model::Tensor;

std::unique_ptr<model::Backend> backend_with(std::vector<GemmChoice> choices = {}, const std::string& kernel = "auto") {
  model::BackendOptions options;
  options.device = "cuda", options.gemm_choices = std::move(choices), options.cpu_kernel = kernel;
  return cuda::make_backend_on(options, emulation::fake_driver(), emulation::fake_blas());
}

constexpr int64_t kIn = 40, kOut = 24;

// y = 2 (rows of x) w^T by an overwrite and an add, and dw; whole: small whole numbers, which every order adds up to the same.
struct Products {
  std::vector<double> y, dw;
};
Products products(Context& ctx, int64_t rows, bool whole = false) {
  const Rng rng(7, RngStream::test);
  struct Owned : std::vector<Tensor> {
    explicit Owned(Context& c) : ctx(c) {}
    ~Owned() {
      for (const Tensor& t : *this) ctx.free(t);
    }
    Context& ctx;
  } owned(ctx);
  const auto put = [&](DType dtype, int64_t r, int64_t c, uint64_t first) {
    std::vector<double> v(static_cast<size_t>(r * c));
    for (size_t i = 0; i < v.size(); ++i) v[i] = whole ? std::round(2 * rng.normal(first + i)) : rng.normal(first + i);
    owned.push_back(ctx.allocate(dtype, r, c));
    ctx.upload_now(owned.back(), {v.data(), DType::f64, r, c, c});
    return owned.back();
  };
  const auto get = [&](const Tensor& t) {
    std::vector<double> v(static_cast<size_t>(t.size()));
    ctx.download_now({v.data(), DType::f64, t.rows, t.cols, t.cols}, t);
    return v;
  };
  model::Weight w;
  w.value = put(DType::bf16, kOut, kIn, 0);
  const Tensor x = put(DType::bf16, rows, kIn, 100000), y = put(DType::f32, rows, kOut, 200000), dy = put(DType::bf16, rows, kOut, 300000), dw = put(DType::f32, kOut, kIn, 400000);
  model::linear(ctx, {y, x, &w});
  model::linear(ctx, {y, x, &w, model::Write::add});
  model::linear_dw(ctx, {dw, dy, x});
  return {get(y), get(dw)};
}

}  // namespace

TEST_CASE("one algorithm makes all products of a kind, whatever the rows, and only one whose sums have an order", "[cuda]") {
  emulation::set_seed(21);
  static_cast<void>(emulation::blas_variants_used());
  const auto backend = backend_with();
  for (const int64_t rows : {300, 1, 7, 150}) static_cast<void>(products(backend->context(), rows));
  const std::vector<int> used = emulation::blas_variants_used();
  CHECK(used.size() == 12);
  const int usual = emulation::kSlow + cuda::Blas::kUsualRows / 100 % 3;  // what the heuristic gives first for these
  for (size_t i = 0; i < used.size(); ++i) CHECK(used[i] == (i % 3 == 2 ? emulation::kManyRowsOnly : usual));  // a gradient's rows are always the same
  REQUIRE(backend->gemm_choices().size() == 3);
  const GemmChoice& first = backend->gemm_choices().front();
  CHECK(first.form == "nt f32");
  CHECK(first.type == DType::bf16);
  CHECK(first.n == kOut);
  CHECK(first.k == kIn);
  CHECK(first.kernel.starts_with("cublaslt 13.0.2 sm_90 "));
  CHECK(backend->gemm_choices()[1].form == "nt f32 add");
  CHECK(backend->gemm_choices()[2].form == "tn f32");
  CHECK(backend->gemm_choices()[2].k == kOut);
}

TEST_CASE("measured algorithms are the fastest that take every number of rows, and change no result by being measured", "[cuda]") {
  emulation::set_seed(22);
  const auto usual = backend_with(), measured = backend_with();
  static_cast<void>(emulation::blas_variants_used());
  const Products want = products(usual->context(), 9, true);
  Products got;
  CHECK(measured->chooses_kernels());
  measured->choose_kernels([&] { got = products(measured->context(), 9, true); });
  CHECK(got.y == want.y);
  CHECK(got.dw == want.dw);
  // Each of the three that are left (of the gradient four): one run to warm up, three in time.
  const std::vector<int> used = emulation::blas_variants_used();
  CHECK(used.size() == 3 + 2 * (3 * 4 + 1) + 4 * 4 + 1);
  static_cast<void>(products(measured->context(), 30));
  const std::vector<int> later = emulation::blas_variants_used();
  CHECK(later == std::vector<int>{emulation::kFast, emulation::kFast, emulation::kManyRowsOnly});

  // The choices bring the bits to another run, which measures nothing.
  const auto again = backend_with(measured->gemm_choices());
  const Products a = products(measured->context(), 5);
  static_cast<void>(emulation::blas_variants_used());
  const Products b = products(again->context(), 5), other = products(usual->context(), 5);
  CHECK(emulation::blas_variants_used().size() == 6);
  CHECK(a.y == b.y);
  CHECK(a.dw == b.dw);
  CHECK(a.y != other.y);  // what they are for
  CHECK(again->gemm_choices() == measured->gemm_choices());
  CHECK(backend_with(measured->gemm_choices())->gemm_choices() == measured->gemm_choices());  // also those that it did not come to
}

TEST_CASE("choices of another library are refused", "[cuda]") {
  auto backend = backend_with();
  static_cast<void>(products(backend->context(), 3));
  std::vector<GemmChoice> choices = backend->gemm_choices();
  emulation::set_blas_version(13, 1, 0);
  CHECK_THROWS_WITH(backend_with(choices), Contains("chosen by cuBLASLt 13.0.2 sm_90, and 13.1.0 sm_90 is here"));
  emulation::set_blas_version(13, 0, 2);
  emulation::set_devices(1, 10, 0);
  CHECK_THROWS_WITH(backend_with(choices), Contains("chosen by cuBLASLt 13.0.2 sm_90, and 13.0.2 sm_100 is here"));
  emulation::set_devices(1, 9, 0);
  for (const char* kernel : {"cublaslt 13.0.2 sm_90", "cublaslt 13.0.2 sm_90 ", "cublaslt 13.0.2 sm_90 12.xy", "cublaslt 13.0.2 sm_90 1.2.3.4.5.6.7.8.9"}) {
    choices[0].kernel = kernel;
    CHECK_THROWS_WITH(backend_with(choices), Contains("is no algorithm of cuBLASLt"));
  }
  choices[0].kernel = "avx512";
  CHECK_THROWS_WITH(backend_with(choices), Contains("the matrix kernel 'avx512' of a given choice is not cuBLASLt's"));
  CHECK_THROWS_WITH(backend_with({}, "avx512"), Contains("--cpu-kernel avx512"));
  // One that was chosen for something else cannot make the product.
  choices = backend->gemm_choices();
  std::swap(choices[0].kernel, choices[2].kernel);
  auto wrong = backend_with(choices);
  CHECK_THROWS_WITH(products(wrong->context(), 3), Contains("cannot take 3 rows"));
  wrong.reset();
  backend.reset();
  CHECK(emulation::live_objects() == 0);
  CHECK(emulation::global_allocations() == 0);
}

TEST_CASE("a Muon step becomes a graph, and stays the same step", "[cuda]") {
  emulation::set_seed(23);
  constexpr int64_t kRows = 37, kCols = 20;
  constexpr int kSteps = 4;
  const Rng rng(9, RngStream::test);
  // In one place, so that the graph is used; or with work elsewhere each time, so that it cannot be.
  const auto run = [&](bool moving) {
    const auto backend = backend_with();
    Context& ctx = backend->context();
    std::vector<Tensor> owned;
    const auto make = [&](DType dtype, int64_t rows, int64_t cols) { return owned.emplace_back(ctx.allocate(dtype, rows, cols)); };
    const auto draw = [&](const Tensor& t, uint64_t first) {
      std::vector<double> v(static_cast<size_t>(t.size()));
      for (size_t i = 0; i < v.size(); ++i) v[i] = rng.normal(first + i);
      ctx.upload_now(t, {v.data(), DType::f64, t.rows, t.cols, t.cols});
    };
    const Tensor master = make(DType::f32, kRows, kCols), buf = make(DType::f32, kRows, kCols), grad = make(DType::f32, kRows, kCols), scalars = make(DType::f32, 1, model::kNumStepScalars);
    Tensor work = make(DType::u8, 1, model::muon_work(ctx, kRows, kCols));
    draw(master, 0);
    draw(buf, 1000);
    std::vector<double> all;
    for (int step = 0; step < kSteps; ++step) {
      draw(grad, 10000 + 1000 * static_cast<uint64_t>(step));
      std::vector<double> s(model::kNumStepScalars, 0.0);
      s[model::kLr] = 0.01 * (step + 1), s[model::kGradScale] = 0.5, s[model::kClip] = 1, s[model::kFinite] = 1;
      ctx.upload_now(scalars, {s.data(), DType::f64, 1, model::kNumStepScalars, model::kNumStepScalars});
      if (moving) work = make(DType::u8, 1, model::muon_work(ctx, kRows, kCols));
      model::muon(ctx, {.master = master, .buf = buf, .grad = grad, .scalars = scalars, .work = work, .weight_decay = 0.1});
      for (const Tensor& t : {master, buf}) {
        std::vector<double> v(static_cast<size_t>(t.size()));
        ctx.download_now({v.data(), DType::f64, t.rows, t.cols, t.cols}, t);
        all.insert(all.end(), v.begin(), v.end());
      }
    }
    for (const Tensor& t : owned) ctx.free(t);
    return all;
  };
  const int64_t before = emulation::graph_launches();
  const std::vector<double> moving = run(true);
  CHECK(emulation::graph_launches() == before);
  const std::vector<double> standing = run(false);
  CHECK(emulation::graph_launches() == before + kSteps - 1);
  CHECK(standing == moving);
  CHECK(emulation::live_objects() == 0);
  CHECK(emulation::global_allocations() == 0);
}

TEST_CASE("what a graph cannot hold is refused while it is captured, and the stream goes on", "[cuda]") {
  const cuda::Driver& driver = emulation::fake_driver();
  cuda::CudaDevice device(driver, 0, DType::bf16);
  cuda::Stream stream = device.stream(model::Queue::compute);
  cuda::Graphs graphs(driver, stream);
  auto* p = static_cast<float*>(emulation::allocate_global(4 * 8));
  const auto fill = [&](float v) { cuda::fill(stream, p, 1, 8, 8, 4, std::bit_cast<uint32_t>(v)); };
  const std::vector<std::function<void()>> bad = {[&] { static_cast<void>(device.allocate(8)); }, [&] { driver.cuMemFree_v2(reinterpret_cast<cuda::DevicePointer>(p)); },
                                                  [&] { driver.cuStreamSynchronize(stream); }, [] { throw std::runtime_error("while it is captured"); }};
  for (size_t i = 0; i < bad.size(); ++i) {
    bool armed = false;
    const auto work = [&] {
      fill(static_cast<float>(i));
      if (armed) bad[i]();
    };
    graphs.run({static_cast<int64_t>(i)}, work);
    armed = true;
    CHECK_THROWS_WITH(graphs.run({static_cast<int64_t>(i)}, work), Contains("while"));
    armed = false;
    graphs.run({static_cast<int64_t>(i)}, work);
  }
  fill(9);
  graphs.run({0}, [] { FAIL("a graph that is there is launched, and its work left alone"); });
  driver.cuStreamSynchronize(stream);
  CHECK(*p == 0);
  emulation::free_global(p);
}

}  // namespace dspark::test
