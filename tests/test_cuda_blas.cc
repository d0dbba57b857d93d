// Which algorithms of cuBLASLt the cuda backend takes, and how a choice is written down and comes back.
#include <catch2/catch.hpp>

#include <cmath>
#include <memory>
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
  CHECK(first.kernel.starts_with("cublaslt 13.0.2 "));
  CHECK(backend->gemm_choices()[1].form == "nt f32 add");
  CHECK(backend->gemm_choices()[2].form == "tn f32");
  CHECK(backend->gemm_choices()[2].k == kOut);
}

TEST_CASE("measured algorithms are the fastest that take every number of rows, and change no result by being measured", "[cuda]") {
  emulation::set_seed(22);
  const auto usual = backend_with(), measured = backend_with({}, "measure");
  static_cast<void>(emulation::blas_variants_used());
  const Products want = products(usual->context(), 9, true), got = products(measured->context(), 9, true);
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
}

TEST_CASE("choices of another library are refused", "[cuda]") {
  auto backend = backend_with();
  static_cast<void>(products(backend->context(), 3));
  std::vector<GemmChoice> choices = backend->gemm_choices();
  emulation::set_blas_version(13, 1, 0);
  CHECK_THROWS_WITH(backend_with(choices), Contains("chosen with cuBLASLt 13.0.2, and 13.1.0 is here"));
  emulation::set_blas_version(13, 0, 2);
  for (const char* kernel : {"cublaslt 13.0.2", "cublaslt 13.0.2 ", "cublaslt 13.0.2 12.xy", "cublaslt 13.0.2 1.2.3.4.5.6.7.8.9"}) {
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

}  // namespace dspark::test
