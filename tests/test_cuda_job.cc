// What a subcommand does on a GPU, on the emulation: benchmarks, the kernels a run chooses and goes on with, and what is refused at once.
#include <catch2/catch.hpp>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "cli_bench.h"
#include "core/files.h"
#include "cuda/backend.h"
#include "cuda_emulation/block.h"
#include "cuda_emulation/fakes.h"
#include "cuda_emulation/memory.h"
#include "job/bench_loss.h"
#include "job/bench_optimizer.h"
#include "job/bench_products.h"
#include "job/bench_step.h"
#include "job/eval.h"
#include "job/extract.h"
#include "job/machines.h"
#include "job/train.h"

using namespace dspark;
using Catch::Contains;

namespace {

// A GPU to the jobs, whose devices are named cuda.
const std::string kGpu = "cuda-emulated";
const model::RegisteredBackend emulated(kGpu, [](const model::BackendOptions& options) {
  model::BackendOptions o = options;
  o.device = "cuda";
  return cuda::make_backend_on(o, emulation::fake_driver(), emulation::fake_blas());
});

void check_results(const std::vector<job::BenchResult>& results, const std::string& device) {
  for (const job::BenchResult& r : results) {
    INFO(device << ": " << r.what << " " << r.value << " of " << r.limit << " " << r.unit);
    CHECK_FALSE(r.samples.empty());
    CHECK((r.value > 0 && std::isfinite(r.value)));
    CHECK((r.limit > 0 && std::isfinite(r.limit)));
    CHECK(r.share_of_limit == Approx(r.value / r.limit));
    CHECK(r.kernel.empty() == (device == kGpu));
    CHECK((r.device == "cuda:0 bf16, emulated GPU, sm_90, 1.0 GiB") == (device == kGpu));
  }
}

bool has(const std::vector<job::BenchResult>& results, const std::string& begin) {
  return std::any_of(results.begin(), results.end(), [&](const auto& r) { return r.what.starts_with(begin); });
}

job::TrainOptions tiny_run(const Bench& b, const fs::path& store, const fs::path& out) {
  job::TrainOptions o;
  o.common.device = kGpu, o.common.threads = 1;
  o.stores = {store}, o.target = b.target, o.out = out;
  o.layers = 1, o.block = 3, o.rank = 8, o.draft_vocab = 64, o.anchors = 3, o.batch_docs = 1, o.row_tokens = 64, o.steps = 2, o.save_every = 1, o.keep = 9, o.val_fraction = 0;
  o.optimizer = "muon";
  o.given = {"layers", "block", "rank", "draft-vocab", "anchors", "batch-docs", "row-tokens", "steps", "optimizer"};
  return o;
}

fs::path checkpoint(const fs::path& run, int step) { return run / "checkpoints" / ("step-0000000" + std::to_string(step)); }

// The run as it was after its first step.
void stop_at_one(const fs::path& whole, const fs::path& out) {
  fs::copy(whole, out, fs::copy_options::recursive);
  fs::remove_all(checkpoint(out, 2));
  for (const char* name : {"config.json", "model.safetensors"}) fs::remove(out / name);
}

}  // namespace

TEST_CASE("every benchmark measures the CPU and a GPU by the same code", "[cuda][bench]") {
  emulation::set_seed(31);
  const Bench b(4, 6);
  const std::string shape = b.make_drafter(b.make_store());
  for (const std::string& device : {std::string("cpu"), kGpu}) {
    const auto products = job::bench_products({shape, "bf16", "auto", device, 12, 2, 1, 1, 0});
    check_results(products, device);
    for (const char* what : {"gemm linear bf16", "gemm linear_dx bf16", "gemm linear_dw bf16", "gemm linear bf16 1x64x", "gemm linear bf16 8x64x"}) CHECK(has(products, what));
    check_results(job::bench_loss({shape, "bf16", "auto", device, 12, 2, 1, 1, {8}}), device);
    const auto optimizers = job::bench_optimizer({shape, "bf16", "auto", device, 1, 1});
    check_results(optimizers, device);
    CHECK((has(optimizers, "adamw") && has(optimizers, "muon")));
    job::BenchStepOptions step;
    step.shape = shape, step.device = device, step.tokens = 12, step.anchors = 2, step.threads = 1, step.steps = 1, step.parts = true, step.machine = "h200";
    const auto result = job::bench_step(step);
    check_results(result.results, device);
    CHECK(result.predicted_step_seconds > 0);
    CHECK_THAT(result.text, Contains("predicted from h200"));
    CHECK(result.parts.size() > 8);
    for (const job::PartTime& p : result.parts) {
      INFO(p.name);
      CHECK((p.predicted > 0) == !p.name.ends_with("packing"));  // which an H200 does not
      CHECK((p.at_limit > 0) == (p.name != "upload"));
      CHECK((p.measured > 0 || device == kGpu));  // the emulated clock stands still in copies
    }
    step.parts = false;
    const auto whole = job::bench_step(step);
    check_results(whole.results, device);
    CHECK((whole.host_seconds > 0) == (device == kGpu));
    CHECK((whole.text.find("the host enqueues a step in ") != std::string::npos) == (device == kGpu));
  }
  CHECK(emulation::live_objects() == 0);
  CHECK(emulation::global_allocations() == 0);
}

TEST_CASE("a GPU that is known by its name has its data sheet's limits", "[cuda][bench]") {
  using model::Precision;
  const auto h200 = job::machine_of_device("cuda:0 bf16, NVIDIA H200, sm_90, 139.8 GiB", Precision::bf16);
  REQUIRE(h200);
  CHECK(h200->name == "h200");
  CHECK(h200->peak_flops == 989.5e12);
  CHECK(h200->peak_bytes == 4800e9);
  CHECK(job::machine_of_device("cuda:0 fp32, NVIDIA H200, sm_90, 139.8 GiB", Precision::fp32)->peak_flops == 67e12);
  CHECK(job::machine_of_device("cuda:1 bf16, NVIDIA GB300, sm_103, 277.5 GiB", Precision::bf16)->name == "gb300");
  for (const char* other : {"cuda:0 bf16, NVIDIA H200 NVL, sm_90, 139.8 GiB", "cuda:0 bf16, NVIDIA GB200, sm_100, 184 GiB", "cuda:0 bf16, NVIDIA H200 MIG 1g.18gb, sm_90, 16.0 GiB", "cpu bf16, 2 threads"})
    CHECK_FALSE(job::machine_of_device(other, Precision::bf16));
}

TEST_CASE("a run on a GPU measures its kernels once, keeps them, and goes on with them", "[cuda][train]") {
  emulation::set_seed(32);
  const Bench b(4, 6);
  const fs::path store = b.make_store();
  job::run_train(tiny_run(b, store, b.at("whole")));
  const auto state_of = [&](const std::string& run, int step) { return read_json(checkpoint(b.at(run), step) / "state.json"); };
  Json state = state_of("whole", 1);
  const Json choices = state["kernels"]["choices"];
  CHECK(state["kernels"]["kernel"] == "");
  CHECK(choices.size() > 10);
  CHECK(state_of("whole", 2)["kernels"]["choices"] == choices);  // all were chosen before the first step
  // The second word of an algorithm is the fake's variant.
  const auto variant = [](const Json& choice) {
    const std::string kernel = choice["kernel"];
    return kernel.substr(kernel.find('.', kernel.rfind(' ')) + 1, 1);
  };
  const auto fast = std::count_if(choices.begin(), choices.end(), [&](const Json& c) { return variant(c) == std::to_string(emulation::kFast); });
  CHECK(fast > 5);  // without measuring it is what the heuristic offers first for as many rows as are usual
  for (const Json& c : choices) CHECK_THAT(c["kernel"].get<std::string>(), Catch::StartsWith("cublaslt 13.0.2 sm_90 "));

  // From the first step on: the same bits.
  stop_at_one(b.at("whole"), b.at("resumed"));
  emulation::set_seed(33);
  job::run_train(tiny_run(b, store, b.at("resumed")));
  const Json kept = state_of("resumed", 2)["kernels"]["choices"];
  REQUIRE(kept.size() >= choices.size());  // others for what a run measures of its machine
  CHECK(std::equal(choices.begin(), choices.end(), kept.begin()));
  CHECK(file_bytes(b.at("resumed") / "model.safetensors") == file_bytes(b.at("whole") / "model.safetensors"));

  // Nothing is measured again: with slower ones in the state, the fast ones are never met.
  stop_at_one(b.at("whole"), b.at("slow"));
  for (Json& c : state["kernels"]["choices"]) {
    std::string kernel = c["kernel"];
    if (variant(c) == std::to_string(emulation::kFast)) kernel[kernel.find('.', kernel.rfind(' ')) + 1] = static_cast<char>('0' + emulation::kSlow);
    c["kernel"] = kernel;
  }
  state.erase("crc32c");
  state["crc32c"] = json_checksum(state);
  write_bytes(checkpoint(b.at("slow"), 1) / "state.json", state.dump());
  static_cast<void>(emulation::blas_variants_used());
  job::run_train(tiny_run(b, store, b.at("slow")));
  const std::vector<int> used = emulation::blas_variants_used();
  CHECK(std::count(used.begin(), used.end(), emulation::kSlow) > 10);
  CHECK(std::count(used.begin(), used.end(), emulation::kFast) == 0);

  // Where they do not fit.
  stop_at_one(b.at("whole"), b.at("other"));
  emulation::set_devices(1, 10, 0);
  CHECK_THROWS_WITH(job::run_train(tiny_run(b, store, b.at("other"))), Contains("chosen by cuBLASLt 13.0.2 sm_90, and 13.0.2 sm_100 is here") && Contains("go on where that is, or begin anew"));
  emulation::set_devices(1, 9, 0);
  job::TrainOptions cpu = tiny_run(b, store, b.at("other"));
  cpu.common.device = "cpu";
  CHECK_THROWS_WITH(job::run_train(cpu), Contains("was begun with --device cuda"));
  CHECK(emulation::live_objects() == 0);
  CHECK(emulation::global_allocations() == 0);
}

TEST_CASE("heads that a GPU's attention cannot do are refused before anything is made", "[cuda][train]") {
  TinyTarget wide;
  wide.hidden = 640, wide.heads = 2, wide.kv_heads = 1;
  const Bench b(4, 6, wide);
  const fs::path store = b.make_store(), drafter = b.make_drafter(store);
  const std::string said = " has attention heads of 320 columns, cuda:0 bf16, emulated GPU, sm_90, 1.0 GiB can do up to 256; use --device cpu";
  CHECK_THROWS_WITH(job::run_train(tiny_run(b, store, b.at("run"))), "the drafter" + said);
  CHECK_FALSE(fs::exists(b.at("run")));
  job::ExtractOptions extract;
  extract.common.device = kGpu;
  extract.target = b.target, extract.data = {b.rows}, extract.out = b.at("extracted"), extract.taps = "1,2,3";
  CHECK_THROWS_WITH(job::run_extract(extract), Contains(said));
  CHECK_FALSE(fs::exists(b.at("extracted")));
  job::EvalOptions eval;
  eval.common.device = kGpu;
  eval.target = b.target, eval.drafters = {drafter}, eval.prompt = "x";
  CHECK_THROWS_WITH(job::run_eval(eval), "the target or a drafter" + said);
  CHECK(emulation::live_objects() == 0);
}
