// Ranks on emulated GPUs over the fake NCCL: threads that share the emulated machine, one at work at a time.
#include <catch2/catch.hpp>

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>
#include <thread>

#include "core/log.h"
#include "cuda/backend.h"
#include "cuda/nccl.h"
#include "cuda_emulation/block.h"
#include "cuda_emulation/fakes.h"
#include "cuda_emulation/memory.h"
#include "cuda_emulation/streams.h"
#include "rank_run.h"

namespace dspark::emulation {
int64_t live_communicators();  // fake_nccl.cc
}

using namespace dspark;
using namespace dspark::model;
using ranks::Outcome;
using ranks::RunOptions;
using ranks::TinyRuns;

namespace {

// The cuda backend on the emulation, under a name of its own.
const RegisteredBackend emulated("emulated-rank", [](const BackendOptions& options) {
  BackendOptions o = options;
  o.device = "cuda";
  return cuda::make_backend_on(o, emulation::fake_driver(), emulation::fake_blas());
});

class Machine {
 public:
  Machine() {
    emulation::set_give_way([this] {
      mutex_.unlock();
      std::this_thread::sleep_for(std::chrono::microseconds(100));
      mutex_.lock();
    });
  }
  ~Machine() {
    emulation::set_give_way({});
    emulation::fail_nccl(-1);
    emulation::set_nccl_version(22800);
  }
  RunOptions options(Precision precision = Precision::fp32) {
    RunOptions o;
    o.backend = {.device = "emulated-rank", .precision = precision};
    o.steps = 2, o.batch_docs = 2;
    o.machine = &mutex_;
    o.collectives = [this](Context& ctx, net::Mesh& mesh, const CollectiveOptions& group) { return collectives(ctx, mesh, group, false); };
    return o;
  }
  std::unique_ptr<Collectives> collectives(Context& ctx, net::Mesh& mesh, const CollectiveOptions& group, bool watchdog) {
    cuda::NcclOptions n{group, watchdog, {}};
    // A look that finds the machine busy for long comes again later: the rank at work may be waiting for the watchdog's end.
    n.around_watchdog = [this](const std::function<void()>& look) {
      for (int i = 0; i < 500; ++i) {
        if (const std::unique_lock at_work(mutex_, std::try_to_lock); at_work) return look();
        std::this_thread::sleep_for(std::chrono::microseconds(100));
      }
    };
    return cuda::make_nccl_collectives(ctx, mesh, n, emulation::fake_nccl());
  }
  std::mutex& mutex() { return mutex_; }

 private:
  std::mutex mutex_;
};

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

void check_nothing_left() {
  CHECK(emulation::live_objects() == 0);
  CHECK(emulation::global_allocations() == 0);
}

}  // namespace

namespace {

// fp32: gradients differ by their order of adding, some 1e-7 of the largest; AdamW moves a weight whose gradient is of that size by up to lr
// either way, so losses and norms are compared closely and weights by lr a step.
void check_alike(const std::vector<Outcome>& all, const Outcome& one) {
  for (const Outcome& outcome : all) {
    CHECK(outcome.error == "");
    CHECK((outcome.weights == all[0].weights));
  }
  REQUIRE(all[0].steps.size() == one.steps.size());
  for (size_t i = 0; i < one.steps.size(); ++i)
    for (size_t k = 0; k < 3; ++k) CHECK(all[0].steps[i][k] == Approx(one.steps[i][k]).epsilon(i == 0 ? 1e-5 : 1e-3));
  CHECK(ranks::difference(all[0], one) < 2e-2 * static_cast<double>(one.steps.size()));
}

}  // namespace

TEST_CASE("two ranks on GPUs train as one does, to the bit when repeated", "[cuda][ranks]") {
  const TinyRuns runs;
  Machine machine;
  emulation::set_seed(21);
  RunOptions o = machine.options();
  o.own_width = true, o.val_fraction = 0.2;
  const Outcome one = runs.run(o, 1).front();
  REQUIRE(one.error == "");
  o.out = "two";
  const auto all = runs.run(o, 2);
  check_alike(all, one);
  emulation::set_seed(22);
  o.out = "again";
  const auto again = runs.run(o, 2);
  CHECK(again[0].error == "");
  CHECK((again[0] == all[0]));
  check_nothing_left();
}

TEST_CASE("GPUs' gradients leave while the backward goes on, and nothing else changes", "[cuda][ranks]") {
  const TinyRuns runs;
  Machine machine;
  RunOptions o = machine.options();
  o.own_width = true, o.row_tokens = 8, o.batch_docs = 3, o.out = "end";
  o.collectives = [&](Context& ctx, net::Mesh& mesh, const CollectiveOptions& group) { return ranks::all_at_the_end(ctx, machine.collectives(ctx, mesh, group, false), true); };
  emulation::set_seed(31);
  const auto end = runs.run(o, 2);
  for (const Outcome& outcome : end) CHECK(outcome.error == "");
  o.collectives = machine.options().collectives;
  for (const uint64_t seed : {32, 33}) {  // streams in other orders
    emulation::set_seed(seed);
    o.out = fmt::format("beside{}", seed);
    const auto beside = runs.run(o, 2);
    for (const size_t r : {0, 1}) {
      CHECK(beside[r].error == "");
      CHECK((beside[r] == end[r]));
    }
  }
  check_nothing_left();
}

TEST_CASE("compute does not wait for a reduction that was started", "[cuda][ranks]") {
  Machine machine;
  emulation::set_seed(34);
  auto meshes = ranks::local_meshes(2, 60);
  std::atomic<bool> went_on{false};
  std::array<double, 2> sums{};
  std::vector<std::thread> threads;
  for (const size_t r : {0, 1})
    threads.emplace_back([&, r] {
      std::unique_lock at_work(machine.mutex());
      meshes[r]->around_wait = [&](const std::function<void()>& wait) {
        at_work.unlock();
        wait();
        at_work.lock();
      };
      const auto backend = make_backend({.device = "emulated-rank", .precision = Precision::fp32});
      Context& ctx = backend->context();
      const auto collectives = machine.collectives(ctx, *meshes[r], {2}, false);
      const Tensor a = ctx.allocate(DType::f32, 3, 5), b = ctx.allocate(DType::f32, 3, 5);
      fill(ctx, {a, 1.0 + static_cast<double>(r)});
      const Collectives::Piece piece{a, 0};
      double v = 0;
      const auto read = [&](const Tensor& t) { ctx.download_now({&v, DType::f64, 1, 1, 1}, t.row_range(2, 1).col_range(4, 1)); };
      while (r == 1 && !went_on) emulation::give_way();
      collectives->start_reduce({&piece, 1});
      fill(ctx, {b, 7});
      read(b);  // on rank 0 while the other has not come
      went_on = true;
      collectives->finish();
      read(a);
      sums[r] = v;
      collectives->barrier();
      ctx.free(a), ctx.free(b);
    });
  for (auto& t : threads) t.join();
  CHECK(sums[0] == 3);
  meshes.clear();
  check_nothing_left();
}

TEST_CASE("shard groups of GPUs train as one GPU does", "[cuda][ranks]") {
  const TinyRuns runs;
  Machine machine;
  emulation::set_seed(23);
  RunOptions o = machine.options();
  o.muon = true, o.steps = 1;
  const Outcome one = runs.run(o, 1).front();
  REQUIRE(one.error == "");
  o.group = 2, o.out = "groups";
  check_alike(runs.run(o, 4), one);
  check_nothing_left();
}

TEST_CASE("ranks on GPUs in bf16 keep masters with their owners, and bf16 may carry gradients", "[cuda][ranks]") {
  const TinyRuns runs;
  Machine machine;
  emulation::set_seed(24);
  RunOptions o = machine.options(Precision::bf16);
  o.steps = 1, o.batch_docs = 1;  // a rank without rows
  const Outcome one = runs.run(o, 1).front();
  REQUIRE(one.error == "");
  for (const bool bf16_wire : {false, true}) {
    o.bf16_wire = bf16_wire, o.out = bf16_wire ? "bf16" : "fp32";
    const auto all = runs.run(o, 2);
    int64_t masters = 0;
    for (const Outcome& outcome : all) {
      CHECK(outcome.error == "");
      CHECK((outcome.weights == all[0].weights));
      masters += outcome.state_elements;
    }
    CHECK(masters == one.state_elements);
    CHECK(all[0].steps.at(0)[0] == Approx(one.steps[0][0]).epsilon(1e-6));
    CHECK(all[0].steps.at(0)[1] == Approx(one.steps[0][1]).epsilon(bf16_wire ? 1e-2 : 1e-5));
  }
  check_nothing_left();
}

TEST_CASE("ranks on GPUs multiply with the kernels that the first one chose", "[cuda][ranks]") {
  const TinyRuns runs;
  Machine machine;
  emulation::set_seed(26);
  RunOptions o = machine.options();
  o.choose_kernels = true, o.steps = 1;
  static_cast<void>(emulation::blas_variants_used());
  for (const Outcome& outcome : runs.run(o, 2)) CHECK(outcome.error == "");
  const std::vector<int> used = emulation::blas_variants_used();
  // One rank tried them all; after that both take the fast ones.
  const auto last_tried = std::find(used.rbegin(), used.rend(), emulation::kMiddling);
  CHECK(last_tried != used.rend());
  CHECK(std::count(used.rbegin(), last_tried, emulation::kFast) > 20);
  check_nothing_left();
}

TEST_CASE("a rank that fails, and NCCL that fails, end the others with the reason", "[cuda][ranks][fault]") {
  const TinyRuns runs;
  Machine machine;
  emulation::set_seed(25);
  RunOptions o = machine.options();
  o.steps = 50;
  o.on_step = [](const train::StepRecord& r) {
    if (r.step == 1) fail("the disk is full");
  };
  const auto failed = runs.run(o, 2);
  CHECK(failed[0].error == "the disk is full");
  CHECK(contains(failed[1].error, "rank 0 ended the run: the disk is full"));
  check_nothing_left();

  o.on_step = [](const train::StepRecord& r) {
    if (r.step == 1) emulation::fail_nccl(0);
  };
  o.out = "nccl";
  const auto broken = runs.run(o, 2);
  CHECK(contains(broken[0].error, "NCCL: on rank 0 a collective failed: remote process exited or there was a network error (error 6)"));
  CHECK(contains(broken[1].error, "rank 0 ended the run: NCCL: on rank 0"));
  check_nothing_left();

  emulation::fail_nccl(-1);
  emulation::set_nccl_version(21700);
  o.on_step = {}, o.out = "old";
  for (const Outcome& outcome : runs.run(o, 2)) CHECK(contains(outcome.error, "libnccl.so.2: it is version 2.17.0, too old; wanted: NCCL 2.18 or newer for CUDA 13"));
  check_nothing_left();
}

TEST_CASE("the watchdog ends a rank's communicators while its host is held up", "[cuda][ranks][fault]") {
  const TinyRuns runs;
  Machine machine;
  emulation::set_seed(26);
  RunOptions o = machine.options();
  o.collectives = [&](Context& ctx, net::Mesh& mesh, const CollectiveOptions& group) { return machine.collectives(ctx, mesh, group, true); };
  // A run in which nothing goes wrong, watched.
  const auto well = runs.run(o, 2);
  for (const Outcome& outcome : well) CHECK(outcome.error == "");
  check_nothing_left();

  bool ended = false;
  o.steps = 50, o.out = "held-up";
  o.on_step = [&](const train::StepRecord& r) {
    if (r.step != 1) return;
    emulation::fail_nccl(0);
    const auto before = emulation::live_communicators();
    for (const double until = now_s() + 20; !ended && now_s() < until;) {  // as in a call of the driver that does not return
      machine.mutex().unlock();
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      machine.mutex().lock();
      ended = emulation::live_communicators() < before;
    }
  };
  const auto held_up = runs.run(o, 2);
  CHECK(ended);
  CHECK(contains(held_up[0].error, "NCCL: on rank 0 a collective failed: remote process exited or there was a network error (error 6)"));
  CHECK(contains(held_up[1].error, "rank 0 ended the run: NCCL: on rank 0"));
  check_nothing_left();
}

TEST_CASE("a machine without NCCL is told what is wanted", "[cuda][ranks]") {
  std::string said;
  try {
    (void)cuda::nvidia_nccl();
    SUCCEED("this machine has NCCL");
    return;
  } catch (const Error& e) {
    said = e.what();
  }
  CHECK(contains(said, "libnccl.so.2: cannot be loaded ("));
  CHECK(contains(said, "wanted: NCCL 2.18 or newer for CUDA 13"));
}
