// The cuda backend on the emulation: the operator table, and what the device and cuBLASLt are asked for.
#include <catch2/catch.hpp>

#include <cmath>
#include <memory>
#include <set>

#include "core/rng.h"
#include "cuda/backend.h"
#include "cuda/library.h"
#include "cuda_cases.h"
#include "cuda_emulation/block.h"
#include "cuda_emulation/fakes.h"
#include "cuda_emulation/memory.h"
#include "cuda_emulation/streams.h"
#include "op_check.h"

namespace dspark::test {
namespace {

using Catch::Contains;
using model::Context;
using model::Precision;
using model::Queue;
using model::Tensor;

std::unique_ptr<model::Backend> cuda_backend(Precision precision = Precision::bf16, const std::string& device = "cuda") {
  model::BackendOptions options;
  options.device = device;
  options.precision = precision;
  return cuda::make_backend_on(options, emulation::fake_driver(), emulation::fake_blas());
}

}  // namespace

TEST_CASE("the cuda backend agrees with the reference in fp32 and bf16", "[cuda][ops]") {
  for (const Precision precision : {Precision::fp32, Precision::bf16}) {
    emulation::set_seed(precision == Precision::fp32 ? 1 : 2);
    run_table(*cuda_backend(precision));
    run_table(*cuda_backend(precision), wide_cases());
  }
  CHECK(emulation::live_objects() == 0);
  CHECK(emulation::global_allocations() == 0);
}

TEST_CASE("on the cuda backend a row's bits depend on nothing but the row", "[cuda][ops]") {
  const auto first = cuda_backend(), second = cuda_backend();
  same_bits_on(first->context(), second->context());  // and not on the order of blocks, threads and streams
  rows_alone(first->context());
}

TEST_CASE("the cuda backend keeps, draws and accepts the tokens the cpu backend does", "[cuda][ops]") {
  emulation::set_seed(5);
  check_choices(cuda_backend(Precision::fp32)->context());
}

TEST_CASE("transfers of the cuda backend convert, keep strides and happen in the order of events", "[cuda]") {
  for (uint64_t seed = 0; seed < 16; ++seed) {
    emulation::set_seed(seed);
    const auto backend = cuda_backend();
    Context& ctx = backend->context();
    model::Device& device = ctx.device();
    const Tensor whole = ctx.allocate(DType::bf16, 3, 8), part = whole.col_range(2, 4);
    std::vector<double> ones(24, 1.0), values = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 1.00390625}, back(24, -1.0);
    // Filled by one queue, overwritten in part by another, copied by the first again: only the events hold them together.
    model::fill(ctx, {whole, 1});
    const model::Event filled = device.record(Queue::compute);
    device.wait(Queue::upload, filled);
    const model::Event uploaded = device.upload(Queue::upload, part, {values.data(), DType::f64, 3, 4, 4});
    device.wait(Queue::compute, uploaded);
    const Tensor copied = ctx.allocate(DType::f32, 3, 8);
    model::copy(ctx, {copied, whole});
    const model::Event downloaded = device.download(Queue::compute, {back.data(), DType::f64, 3, 8, 8}, copied);
    device.synchronize(downloaded);
    values.back() = 1.0;  // halfway between two bf16: to even
    for (size_t i = 0; i < 24; ++i) CHECK(back[i] == (i % 8 < 2 || i % 8 >= 6 ? 1.0 : values[i / 8 * 4 + i % 8 - 2]));
    device.synchronize(downloaded);  // again: it has happened
    device.synchronize({});
    std::vector<int64_t> ids = {3, int64_t{1} << 40};
    const Tensor index = ctx.allocate(DType::i32, 1, 2);
    CHECK_THROWS_WITH(ctx.upload_now(index, {ids.data(), DType::i64, 1, 2, 2}), Contains("32 bits"));
    for (const Tensor& t : {whole, copied, index}) ctx.free(t);
  }
  CHECK(emulation::live_objects() == 0);
}

TEST_CASE("the cuda backend refuses what cannot work, in one line", "[cuda]") {
  CHECK(cuda_backend()->describe() == "cuda:0 bf16, emulated GPU, sm_90, 1.0 GiB");
  CHECK_THROWS_WITH(cuda_backend(Precision::fp64), Contains("the cuda backend computes in bf16 or fp32"));
  CHECK_THROWS_WITH(cuda_backend(Precision::bf16, "cuda:1"), Contains("cuda:1: this machine has 1 usable GPU (CUDA"));
  CHECK_THROWS_WITH(cuda_backend(Precision::bf16, "cuda:x"), Contains("'x' is not the number of a GPU"));
  emulation::set_devices(0, 0, 0);
  CHECK_THROWS_WITH(cuda_backend(), Contains("0 usable GPUs"));
  emulation::set_devices(2, 7, 5);
  CHECK_THROWS_WITH(cuda_backend(Precision::bf16, "cuda:1"), Contains("sm_75; sm_80 (A100) or newer"));
  emulation::set_devices(1, 9, 0);
  emulation::set_driver_version(12080);
  CHECK_THROWS_WITH(cuda_backend(), Catch::Equals("libcuda.so.1: it is for CUDA 12.8, too old; wanted: an NVIDIA driver for CUDA 13 (580 or newer)"));
  emulation::set_driver_version(13000);
  const auto backend = cuda_backend();
  CHECK_THROWS_WITH(backend->context().device().allocate(int64_t{1} << 42), Contains("cannot get 4398046511104 bytes of memory on cuda:0") && Contains("out of memory"));
}

// The fake cuBLASLt must find wrong calls, or its silence about cuda/blas.cc would mean nothing.
TEST_CASE("the fake cuBLASLt finds wrong layouts, alignment and workspace", "[cuda]") {
  const cuda::BlasApi& api = emulation::fake_blas();
  const auto memory = [](int64_t bytes) { return static_cast<char*>(emulation::allocate_global(bytes)); };
  char *a = memory(4 * 64), *workspace = memory(1 << 16);
  emulation::StreamState* stream = emulation::create_stream();
  void *handle, *desc, *layout, *wide, *preference;
  api.cublasLtCreate(&handle);
  api.cublasLtMatmulDescCreate(&desc, cuda::kCompute32, cuda::kReal32);
  api.cublasLtMatrixLayoutCreate(&layout, cuda::kReal32, 8, 8, 8);
  api.cublasLtMatrixLayoutCreate(&wide, cuda::kReal32, 8, 9, 8);
  api.cublasLtMatmulPreferenceCreate(&preference);
  CHECK_THROWS_WITH(api.cublasLtMatrixLayoutCreate(&desc, cuda::kReal32, 8, 8, 7), Contains("leading dimension 7"));
  CHECK_THROWS_WITH(api.cublasLtMatrixLayoutCreate(&desc, 5, 8, 8, 8), Contains("type 5"));
  cuda::BlasHeuristic result;
  int found = 0;
  const auto ask = [&](void* b) { return api.cublasLtMatmulAlgoGetHeuristic(handle, desc, layout, b, layout, layout, preference, 1, &result, &found); };
  CHECK_THROWS_WITH(ask(layout), Contains("split sums"));
  const uint32_t none = 0, four = 4;
  const uint64_t bytes = 1 << 16;
  api.cublasLtMatmulPreferenceSetAttribute(preference, cuda::kPreferReductions, &none, 4);
  CHECK_THROWS_WITH(ask(layout), Contains("an alignment of 256"));
  for (int i = cuda::kPreferAlignA; i <= cuda::kPreferAlignD; ++i) api.cublasLtMatmulPreferenceSetAttribute(preference, i, &four, 4);
  api.cublasLtMatmulPreferenceSetAttribute(preference, cuda::kPreferWorkspace, &bytes, 8);
  CHECK_THROWS_WITH(ask(wide), Contains("do not fit"));
  CHECK_THROWS_WITH(ask(preference), Contains("something else where a layout belongs"));
  REQUIRE(ask(layout) == 0);
  const float one = 1, zero = 0;
  const auto multiply = [&](const char* x, char* d, void* space, size_t space_bytes) {
    return api.cublasLtMatmul(handle, desc, &one, a, layout, x, layout, &zero, d, layout, d, layout, &result.algorithm, space, space_bytes, stream);
  };
  char* d = memory(4 * 64);
  CHECK_THROWS_WITH(multiply(a + 2, d, workspace, 1 << 16), Contains("B is not aligned to the 4 bytes"));
  CHECK_THROWS_WITH(multiply(a + 4, d, workspace, 1 << 16), Contains("outside every allocation"));
  CHECK_THROWS_WITH(multiply(a, d, workspace, 64), Contains("a workspace of 64 bytes"));
  result.algorithm.data[1] = emulation::kSplitSums;
  CHECK_THROWS_WITH(multiply(a, d, workspace, 1 << 16), Contains("no fixed order"));
  result.algorithm.data[1] = emulation::kSlow;
  CHECK_THROWS_WITH(multiply(a, d, workspace + 16, 32768), Contains("a workspace of 32768 bytes at"));
  CHECK(multiply(a, d, workspace, 1 << 16) == 0);
  emulation::synchronize(stream);
  emulation::destroy_stream(stream);
  for (void* p : {desc, layout, wide, preference, handle}) api.cublasLtDestroy(p);
  CHECK_THROWS_WITH(api.cublasLtDestroy(handle), Contains("was not made"));
  for (char* p : {a, d, workspace}) emulation::free_global(p);
}

TEST_CASE("the cuda backend is found by its name, and NVIDIA's libraries by theirs", "[cuda]") {
  CHECK(model::is_registered_backend("cuda"));
  CHECK(model::is_registered_backend("cuda:3"));
  CHECK_FALSE(model::is_registered_backend("cudax"));
  model::BackendOptions options;
  options.device = "vulkan";
  CHECK_THROWS_WITH(model::make_backend(options), Contains("there is no device 'vulkan': expected cpu, ref, cuda, cuda-emulated, emulated, emulated-rank or plan"));
  CHECK_THROWS_WITH(cuda::Library({"libnothing.so.7", "libnothing.so.6"}, "nothing 7"),
                    Contains("libnothing.so.7: cannot be loaded (") && Contains("libnothing.so.6") && Contains("wanted: nothing 7"));
  CHECK_THROWS_WITH(cuda::Library({"libc.so.6"}, "a newer one").symbol("cuInit"), Catch::Equals("libc.so.6: has no cuInit, so it is too old; wanted: a newer one"));
}

}  // namespace dspark::test
