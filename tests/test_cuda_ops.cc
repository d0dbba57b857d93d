// The cuda backend on the emulation: the operator table, and what the device and cuBLASLt are asked for.
#include <catch2/catch.hpp>

#include <cmath>
#include <memory>
#include <set>

#include "core/rng.h"
#include "cuda/backend.h"
#include "cuda/library.h"
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

// What the table's small and odd shapes do not reach: rows of whole 16-byte accesses, several of a thread's chunks in a row, more
// rows than a block sums at once, heads that fill more than one block.
OpCases wide_cases() {
  OpCases cases;
  const auto add = [&](const char* op, std::function<void(OpRun&)> run) { cases.push_back({op, "wide", std::move(run)}); };
  add("copy", [](OpRun& run) {
    const Tensor x = run.input("x", Kind::acc, 70, 264);
    const Tensor y = run.output("y", Kind::act, 70, 264, true);
    model::copy(run.ctx(), {y, x});
    model::copy(run.ctx(), {run.output("z", Kind::acc, 70, 264, true), y});
    model::fill(run.ctx(), {run.output("filled", Kind::act, 70, 264, true), -3});
  });
  add("rmsnorm", [](OpRun& run) {
    const Tensor x = run.input("x", Kind::acc, 67, 2064), w = run.input("w", Kind::acc, 1, 2064), delta = run.input("delta", Kind::act, 67, 2064);
    const Tensor sum = run.output("sum", Kind::acc, 67, 2064), inv_rms = run.output("inv_rms", Kind::acc, 1, 67);
    model::add_rmsnorm(run.ctx(), {.y = run.output("y", Kind::act, 67, 2064), .x_out = sum, .x = x, .delta = delta, .weight = w, .inv_rms = inv_rms});
    const Tensor dy = run.input("dy", Kind::act, 67, 2064);
    model::rmsnorm_backward(run.ctx(), {.d_x = run.output("gradient", Kind::acc, 67, 2064), .d_weight = run.output("weight gradient", Kind::acc, 1, 2064), .dy = dy, .x = sum, .weight = w, .inv_rms = inv_rms});
    const Tensor biased = run.inout("biased", Kind::act, 67, 2064);
    model::add_bias(run.ctx(), {biased, w});
  });
  add("qk_norm_rope", [](OpRun& run) {
    const int64_t n = 3, heads = 40, hd = 128;
    std::vector<double> frequencies;
    for (int i = 0; i < 64; ++i) frequencies.push_back(static_cast<double>(static_cast<float>(std::pow(1e6, -i / 64.0))));
    const Tensor x = run.input("x", Kind::act, n, heads * hd), w = run.input("w", Kind::acc, 1, hd), inv_rms = run.output("inv_rms", Kind::acc, n, heads);
    const Tensor position = run.ints("position", {0, 777, 1000003});
    const model::Rope rope{run.given("inv_freq", Kind::acc, 1, 64, frequencies), hd, 1.25};
    model::qk_norm_rope(run.ctx(), {.y = run.output("y", Kind::act, n, heads * hd), .x = x, .weight = w, .position = position, .inv_rms = inv_rms, .rope = rope, .head_dim = hd});
    model::qk_norm_rope_backward(run.ctx(), {.d_x = run.output("gradient", Kind::act, n, heads * hd), .d_weight = run.output("weight gradient", Kind::acc, 1, hd),
                                             .dy = run.input("dy", Kind::act, n, heads * hd), .x = x, .weight = w, .position = position, .inv_rms = inv_rms, .rope = rope, .head_dim = hd});
  });
  add("swiglu", [](OpRun& run) {
    const Tensor gate_up = run.input("gate_up", Kind::act, 5, 2 * 1032), dy = run.input("dy", Kind::act, 5, 1032);
    model::swiglu(run.ctx(), {run.output("y", Kind::act, 5, 1032), gate_up});
    model::swiglu_backward(run.ctx(), {run.output("gradient", Kind::act, 5, 2 * 1032), dy, gate_up});
  });
  add("scatter_add_rows", [](OpRun& run) {
    const Tensor table = run.written("table", Kind::acc, 4, 264, model::Write::overwrite), rows = run.input("rows", Kind::act, 5, 264);
    model::scatter_add_rows(run.ctx(), {table, rows, run.ints("row_of", {3, 1}), run.ints("begin", {0, 2, 5}), run.ints("source", {4, 0, 1, 2, 3}), model::Write::overwrite});
    model::gather_rows(run.ctx(), {run.output("gathered", Kind::act, 3, 264), table, run.ints("index", {1, -1, 3})});
  });
  add("adamw", [](OpRun& run) {
    const Tensor grad = run.input("grad", Kind::acc, 33, 4104);
    model::sum_squares(run.ctx(), {run.output("sum", Kind::acc, 1, 1), grad});
    std::vector<double> scalars(model::kNumStepScalars, 0.0);
    scalars[model::kLr] = 0.0078125, scalars[model::kGradScale] = 0.5, scalars[model::kClip] = 0.25, scalars[model::kFinite] = 1;
    scalars[model::kBias1] = 0.125, scalars[model::kBias2] = 0.0009765625;
    const Tensor v = run.output("v", Kind::acc, 33, 4104);
    model::fill(run.ctx(), {v, 0.0625});
    model::adamw(run.ctx(), {run.inout("master", Kind::acc, 33, 4104), run.inout("m", Kind::acc, 33, 4104, 0.1), v, grad, run.output("value", Kind::act, 33, 4104),
                             run.given("scalars", Kind::acc, 1, model::kNumStepScalars, scalars)});
  });
  add("linear", [](OpRun& run) {
    model::Weight* w = run.weight("w", 24, 40);
    const Tensor x = run.input("x", Kind::act, 8, 40), dy = run.input("dy", Kind::act, 8, 24);
    model::linear(run.ctx(), {run.output("y", Kind::act, 8, 24), x, w});
    model::linear_dx(run.ctx(), {run.output("dx", Kind::acc, 8, 40), dy, w});
    model::linear_dw(run.ctx(), {run.output("dw", Kind::acc, 24, 40), dy, x});
    model::linear_dw(run.ctx(), {run.output("nothing", Kind::acc, 24, 40), dy.row_range(0, 0), x.row_range(0, 0)});
  });
  return cases;
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

// Every choice that sampling makes, with the numbers a run draws: ids and decisions must be the cpu backend's, not only close.
TEST_CASE("the cuda backend keeps, draws and accepts the tokens the cpu backend does", "[cuda][ops]") {
  emulation::set_seed(5);
  const auto cuda = cuda_backend(Precision::fp32), cpu = model::make_cpu_backend({.precision = Precision::fp32, .threads = 1});
  constexpr int64_t kVocab = 3001, kDrafted = 5, kMapped = 700;
  const Rng values(3, RngStream::test), uniforms(4, RngStream::sampling);
  std::vector<double> logits(static_cast<size_t>((2 * kDrafted + 1) * kVocab));
  for (size_t i = 0; i < logits.size(); ++i) logits[i] = std::round(6 * values.normal(i)) / 4;  // many ties
  std::vector<int32_t> map(kMapped);
  for (size_t j = 0; j < map.size(); ++j) map[j] = static_cast<int32_t>((j * 1009 + 17) % kVocab);

  struct Outcome {
    std::vector<double> draft, target;
    std::vector<int32_t> ids, raw, result;
  };
  const auto run = [&](Context& ctx, const model::SamplingParams& params, bool mapped, uint64_t round) {
    std::vector<Tensor> owned;
    const auto put = [&](DType dtype, int64_t rows, int64_t cols, const void* p, DType from) {
      owned.push_back(ctx.allocate(dtype, rows, cols));
      if (p != nullptr) ctx.upload_now(owned.back(), {p, from, rows, cols, cols});
      return owned.back();
    };
    const int64_t draft_vocab = mapped ? kMapped : kVocab;
    const Tensor draft = put(DType::f32, kDrafted, draft_vocab, logits.data(), DType::f64), target = put(DType::f32, kDrafted + 1, kVocab, logits.data() + kDrafted * kVocab, DType::f64);
    const Tensor draft_probs = put(DType::f32, kDrafted, draft_vocab, nullptr, DType::f32), target_probs = put(DType::f32, kDrafted + 1, kVocab, nullptr, DType::f32);
    model::token_probs(ctx, {draft_probs, draft, params});
    model::token_probs(ctx, {target_probs, target, params});
    std::vector<double> u;
    for (uint64_t i = 0; i < 2 * kDrafted + 1; ++i) u.push_back(uniforms.uniform(round * 100 + i));
    const Tensor draws = put(DType::f64, 1, kDrafted, u.data(), DType::f64), accepts = put(DType::f64, 1, kDrafted + 1, u.data() + kDrafted, DType::f64);
    const Tensor ids = put(DType::i32, 1, kDrafted, nullptr, DType::i32), raw = put(DType::i32, 1, kDrafted, nullptr, DType::i32), result = put(DType::i32, 1, 2, nullptr, DType::i32);
    const Tensor ids_of = mapped ? put(DType::i32, 1, kMapped, map.data(), DType::i32) : Tensor{};
    model::sample_tokens(ctx, {ids, draft_probs, draws, ids_of, raw});
    model::verify_block(ctx, {result, ids, draft_probs, ids_of, target_probs, accepts, put(DType::f32, 1, kVocab, nullptr, DType::f32)});
    const auto floats = [&](const Tensor& t) {
      std::vector<double> v(static_cast<size_t>(t.size()));
      ctx.download_now({v.data(), DType::f64, t.rows, t.cols, t.cols}, t);
      return v;
    };
    const auto ints = [&](const Tensor& t) {
      std::vector<int32_t> v(static_cast<size_t>(t.size()));
      ctx.download_now({v.data(), DType::i32, t.rows, t.cols, t.cols}, t);
      return v;
    };
    const Outcome o{floats(draft_probs), floats(target_probs), ints(ids), ints(raw), ints(result)};
    for (const Tensor& t : owned) ctx.free(t);
    return o;
  };
  const model::SamplingParams settings[] = {{}, {.temperature = 0}, {.temperature = 0.7, .top_k = 50, .top_p = 0.9}, {.top_p = 0.95, .min_p = 0.01}};
  std::set<int32_t> accepted;
  uint64_t round = 0;
  for (const model::SamplingParams& params : settings)
    for (const bool mapped : {false, true})
      for (int repeat = 0; repeat < 4; ++repeat, ++round) {
        INFO("temperature " << params.temperature << " top_k " << params.top_k << " top_p " << params.top_p << (mapped ? ", mapped" : "") << ", round " << round);
        const Outcome got = run(cuda->context(), params, mapped, round), want = run(cpu->context(), params, mapped, round);
        for (const auto& [g, w] : {std::pair{&got.draft, &want.draft}, std::pair{&got.target, &want.target}})
          for (size_t i = 0; i < w->size(); ++i) {
            const bool same = ((*g)[i] > 0) == ((*w)[i] > 0) && std::fabs((*g)[i] - (*w)[i]) <= 1e-6 * (*w)[i];
            if (!same) FAIL("probability " << i << ": " << (*g)[i] << " for " << (*w)[i]);
          }
        CHECK(got.ids == want.ids);
        CHECK(got.raw == want.raw);
        CHECK(got.result == want.result);
        accepted.insert(want.result[0]);
      }
  CHECK(accepted.size() >= 3);  // rounds of several lengths
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
    device.wait(Queue::copy, filled);
    const model::Event uploaded = device.upload(Queue::copy, part, {values.data(), DType::f64, 3, 4, 4});
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
  CHECK_THROWS_WITH(model::make_backend(options), Contains("there is no device 'vulkan': expected cpu, ref, cuda, emulated, emulated-rank or plan"));
  CHECK_THROWS_WITH(cuda::Library({"libnothing.so.7", "libnothing.so.6"}, "nothing 7"),
                    Contains("libnothing.so.7: cannot be loaded (") && Contains("libnothing.so.6") && Contains("wanted: nothing 7"));
  CHECK_THROWS_WITH(cuda::Library({"libc.so.6"}, "a newer one").symbol("cuInit"), Catch::Equals("libc.so.6: has no cuInit, so it is too old; wanted: a newer one"));
}

}  // namespace dspark::test
