// What may happen to a run from outside, through the built binary: kill -9, signals, full disks, other processes,
// damaged stores, numbers that are none. Afterwards the same command ends where an undisturbed one does.
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <random>

#include "cli_bench.h"
#include "core/error.h"
#include "core/files.h"
#include "core/log.h"
#include "formats/store.h"
#include "store_edit.h"

using namespace dspark;
using formats::StoreReader;

namespace {

struct Sample {
  std::vector<int32_t> ids;
  std::vector<uint8_t> mask;
  std::vector<uint16_t> states;
  uint64_t conversation = 0;
  bool operator==(const Sample&) const = default;
};

// Everything a store holds, by id; an id that is there twice, damage and an unfinished store fail the test.
std::map<uint64_t, Sample> store_samples(const fs::path& folder) {
  const StoreReader reader(folder);
  CHECK(reader.complete());
  CHECK(reader.problems().empty());
  std::map<uint64_t, Sample> out;
  const int64_t width = reader.identity().row_width();
  for (int64_t i = 0; i < reader.size(); ++i) {
    const auto tokens = reader.tokens(i);
    Sample s{{tokens.token_ids.begin(), tokens.token_ids.end()}, {tokens.loss_mask.begin(), tokens.loss_mask.end()}, {}, reader.info(i).conversation};
    std::vector<bf16> states(s.ids.size() * static_cast<size_t>(width));
    reader.read_states(i, states.data(), width);
    s.states.resize(states.size());
    std::memcpy(s.states.data(), states.data(), 2 * states.size());
    CHECK(out.emplace(reader.info(i).id, std::move(s)).second);
  }
  return out;
}

}  // namespace

TEST_CASE("extract killed at any moment loses nothing and stores nothing twice", "[cli][fault]") {
  const Bench b(250, 40);
  const double start = now_s();
  require_ok(dspark_run(b.extract(b.at("whole"))));
  const double seconds = now_s() - start;
  const auto whole = store_samples(b.at("whole"));
  REQUIRE(whole.size() == 250);
  const auto out = b.at("killed");
  int killed = 0;
  for (int round = 0; round < 6; ++round) {
    const double moment = seconds * random_fraction();
    INFO("killed after " << moment << " s of " << seconds);
    Process run(b.extract(out));
    // The first one surely while it writes, the others whenever it comes.
    if (round == 0)
      while (run.running() && !fs::exists(out / "shard-00000.dss")) ::usleep(500);
    else
      ::usleep(static_cast<useconds_t>(moment * 1e6));
    run.kill(SIGKILL);
    killed += run.wait().signal == SIGKILL;
  }
  INFO("killed " << killed << " times");
  CHECK(killed > 0);
  require_ok(dspark_run(b.extract(out)));
  CHECK(store_samples(out) == whole);

  // Once more: it is all there, and that is said.
  const Ran again = dspark_run(b.extract(out, {"--json", "-"}));
  require_ok(again);
  CHECK(again.said("resuming"));
  CHECK(json_lines(again.out).at(0)["new"] == 0);
  CHECK(json_lines(again.out).at(0)["present"] == 250);
}

TEST_CASE("an interrupted extract keeps what is finished and exits 75", "[cli][fault]") {
  const Bench b(400, 60);
  const auto out = b.at("out");
  Process run(b.extract(out));
  while (run.running() && !fs::exists(out / "shard-00000.dss")) ::usleep(500);
  run.kill(SIGINT);
  const Ran ran = run.wait();
  check_fails(ran, 75, {"start the same command again"});
  require_ok(dspark_run(b.extract(out)));
  CHECK(store_samples(out).size() == 400);
}

TEST_CASE("an existing store: the same run resumes, another one is an error that names the difference", "[cli]") {
  const Bench b;
  const auto store = b.make_store();
  const std::string before = file_bytes(store / "shard-00000.dss");
  check_fails(dspark_run(b.extract(store, {"--codec", "zstd"})), 1, {"store", "codec"});
  check_fails(dspark_run(b.extract(store, {"--taps", "1,2"})), 1, {"store", "taps: 1 2 asked, 1 2 3"});
  CHECK(file_bytes(store / "shard-00000.dss") == before);
  b.scratch.put("file", "not a folder");
  check_fails(dspark_run(b.extract(b.at("file"))), 1, {"file"});
}

TEST_CASE("an existing training run: the same one resumes, another one is an error that names the difference", "[cli]") {
  const Bench b;
  const auto store = b.make_store(), out = b.make_drafter(store, "run");
  const std::string before = file_bytes(out / "model.safetensors");
  const Ran again = dspark_run(b.train(store, out, 2));
  require_ok(again);
  CHECK(again.said("resuming"));
  CHECK(file_bytes(out / "model.safetensors") == before);
  check_fails(dspark_run(b.train(store, out, 2, {"--lr", "0.5"})), 1, {"run", "lr: 0.5 now, 0.0006 there"});
  check_fails(dspark_run(b.train(store, out, 2, {"--seed", "9"})), 1, {"run", "seed: 9 now, 0 there"});
  check_fails(dspark_run(b.train(store, out, 3)), 1, {"run", "steps: 3 now, 2 there"});
  CHECK(file_bytes(out / "model.safetensors") == before);
  // Packing onto a drafter.
  check_fails(dspark_run({"pack", out, "--out", out}), 1, {"run"});
  CHECK(file_bytes(out / "model.safetensors") == before);
  fs::remove_all(out / "checkpoints");
  check_fails(dspark_run(b.train(store, out, 2)), 1, {"run", "no checkpoint"});
}

TEST_CASE("one process at a time has an output", "[cli][fault]") {
  const Bench b;
  const auto store = b.make_store(), out = b.at("out");
  {
    const FolderLock held(store);
    check_fails(dspark_run(b.extract(store)), 1, {"store", "another dspark process"});
  }
  Process first(b.train(store, out, 100000, {"--json", b.at("first.json")}));
  wait_for_lines(first, b.at("first.json"), 2);
  check_fails(dspark_run(b.train(store, out, 100000)), 1, {"out", "another dspark process"});
  REQUIRE(first.running());
  first.kill(SIGTERM);
  CHECK(first.wait().code == 75);
}

TEST_CASE("a folder without write permission is named", "[cli][fault]") {
  if (!permissions_bind()) {
    WARN("skipped: root here cannot give up CAP_DAC_OVERRIDE, so that permissions do not bind it");
    return;
  }
  const Bench b;
  const auto store = b.make_store(), drafter = b.make_drafter(store), locked = b.at("locked");
  make_folder(locked);
  fs::permissions(locked, fs::perms::owner_read | fs::perms::owner_exec);
  const RunOptions bound{.without_override = true};
  check_fails(dspark_run(b.extract(locked), bound), 1, {"locked", "Permission denied"});
  check_fails(dspark_run(b.extract(locked / "new"), bound), 1, {"locked", "Permission denied"});
  check_fails(dspark_run(b.train(store, locked / "run", 1), bound), 1, {"locked", "Permission denied"});
  check_fails(dspark_run({"pack", drafter, "--out", locked / "packed"}, bound), 1, {"locked", "Permission denied"});
  CHECK(files_below(locked).empty());
  fs::permissions(b.rows, fs::perms::none);
  check_fails(dspark_run(b.extract(b.at("unread")), bound), 1, {"rows.jsonl", "Permission denied"});
  CHECK_FALSE(fs::exists(b.at("unread")));
  fs::permissions(locked, fs::perms::owner_all);
}

TEST_CASE("a full disk leaves nothing half-written, and the run goes on when there is room", "[cli][fault]") {
  const Bench b(160, 40);
  require_ok(dspark_run(b.extract(b.at("whole"))));
  const auto whole = store_samples(b.at("whole"));
  for (long limit : {long{2} << 20, long{6} << 20}) {
    INFO("files of at most " << limit << " bytes");
    const auto out = b.at("full" + std::to_string(limit));
    check_fails(dspark_run(b.extract(out), {.file_limit = limit}), 1, {"shard-00000.dss"});
    for (const auto& name : files_below(out)) CHECK(name.find(".tmp") == std::string::npos);
    CHECK(StoreReader(out).problems().empty());
    require_ok(dspark_run(b.extract(out)));
    CHECK(store_samples(out) == whole);
  }

  // Training: a checkpoint that does not fit, then a run that never met the limit.
  const auto out = b.at("run"), undisturbed = b.at("undisturbed");
  check_fails(dspark_run(b.train(b.at("whole"), out, 6, {"--save-every", "2"}), {.file_limit = 100000}), 1, {"run", "File too large"});
  for (const auto& name : files_below(out)) {
    INFO(name);
    CHECK(name.find("writing-") == std::string::npos);
    CHECK(name.find(".tmp") == std::string::npos);
  }
  CHECK_FALSE(fs::exists(out / "config.json"));
  require_ok(dspark_run(b.train(b.at("whole"), out, 6, {"--save-every", "2"})));
  require_ok(dspark_run(b.train(b.at("whole"), undisturbed, 6)));
  CHECK(file_bytes(out / "model.safetensors") == file_bytes(undisturbed / "model.safetensors"));

  // Packing: nothing that looks like a drafter.
  check_fails(dspark_run({"pack", out, "--out", b.at("packed")}, {.file_limit = 20000}), 1, {"packed"});
  CHECK(files_below(b.at("packed")).empty());
  require_ok(dspark_run({"pack", out, "--out", b.at("packed")}));
}

TEST_CASE("a damaged store is found, named and mended", "[cli][fault]") {
  const Bench b;
  const auto store = b.make_store();
  const auto whole = store_samples(store);
  const auto shard = store / "shard-00000.dss";
  const std::string bytes = file_bytes(shard);
  CHECK(dspark_run({"extract", "--verify", store}).code == 0);

  std::string flipped = bytes;
  flipped[bytes.size() / 2] = static_cast<char>(flipped[bytes.size() / 2] ^ 4);
  write_bytes(shard, flipped);
  const Ran verify = dspark_run({"extract", "--verify", store});
  check_fails(verify, 1, {"store", "damaged"});
  CHECK(verify.said("shard-00000.dss"));
  check_fails(dspark_run(b.train(store, b.at("out"), 8, {"--val-fraction", "0"})), 1, {"store"});
  CHECK(files_below(b.at("out")).empty());

  std::string header = bytes;
  header[2] = static_cast<char>(header[2] ^ 1);
  write_bytes(shard, header);
  CHECK(dspark_run({"extract", "--verify", store}).code == 1);

  write_bytes(shard, bytes.substr(0, bytes.size() * 2 / 3));
  check_fails(dspark_run({"extract", "--verify", store}), 1, {"store", "damaged"});
  require_ok(dspark_run(b.extract(store)));
  CHECK(store_samples(store) == whole);
}

TEST_CASE("a NaN in the states stops training and names the sample", "[cli][fault]") {
  const Bench b;
  const auto store = b.make_store(), bad = b.at("bad");
  uint64_t id = 0;
  copy_store(store, bad, [&](int64_t i, std::vector<bf16>& states) {
    if (i != 5) return;
    id = StoreReader(store).info(i).id;
    states[states.size() / 2] = to_bf16(std::numeric_limits<float>::quiet_NaN());
  });
  check_fails(dspark_run(b.train(bad, b.at("out"), 20, {"--val-fraction", "0"})), 1, {"bad", fmt::format("{:016x}", id), "nan"});
  CHECK_FALSE(fs::exists(b.at("out") / "config.json"));
  const Ran verify = dspark_run({"extract", "--verify", bad});
  check_fails(verify, 1, {});
  CHECK(verify.said("1 samples that are not finite"));
}

TEST_CASE("train stopped by SIGTERM goes on bit for bit", "[cli][fault]") {
  const Bench b(24, 16);
  const auto store = b.make_store(), whole = b.at("whole"), out = b.at("out");
  constexpr int kSteps = 300;
  require_ok(dspark_run(b.train(store, whole, kSteps, {"--json", b.at("whole.json")})));
  const auto expected = step_lines(b.at("whole.json"));
  REQUIRE(expected.size() == kSteps);

  Process first(b.train(store, out, kSteps, {"--json", b.at("first.json")}));
  wait_for_lines(first, b.at("first.json"), 10);
  first.kill(SIGTERM);
  const Ran stopped = first.wait();
  check_fails(stopped, 75, {"start the same command again"});
  auto before = step_lines(b.at("first.json"));
  REQUIRE(before.size() >= 10);
  REQUIRE(before.size() < kSteps);
  const Ran rest = dspark_run(b.train(store, out, kSteps, {"--json", b.at("rest.json")}));
  require_ok(rest);
  CHECK(rest.said("resuming"));
  auto after = step_lines(b.at("rest.json"));
  // The resumed run does the remaining steps and no others.
  CHECK(before.size() + after.size() == kSteps);
  before.merge(after);
  CHECK(after.empty());
  CHECK(before == expected);
  CHECK(file_bytes(out / "model.safetensors") == file_bytes(whole / "model.safetensors"));
  CHECK(file_bytes(out / "config.json") == file_bytes(whole / "config.json"));
}

TEST_CASE("an eval that is stopped ends between two tokens and writes no result", "[cli][fault]") {
  const Bench b;
  const auto drafter = b.make_drafter(b.make_store());
  std::string task;
  for (int i = 0; i < 400; ++i) task += R"({"turns": ["what is a bridge and why does it stand"]})" "\n";
  Process run({"eval", "--target", b.target, "--drafter", drafter, "--data", b.scratch.put("task.jsonl", task), "--max-new-tokens", "1500", "--json", b.at("out.json"), "--threads", "1"});
  ::usleep(700000);
  const double start = now_s();
  run.kill(SIGTERM);
  const Ran ran = run.wait();
  check_fails(ran, 75, {"stopped on request"});
  CHECK(now_s() - start < 5);
  CHECK_FALSE(fs::exists(b.at("out.json")));
}

TEST_CASE("train killed at any moment ends with the same drafter, whatever the threads", "[cli][fault]") {
  const Bench b(24, 16);
  const auto store = b.make_store(), one = b.at("one"), two = b.at("two"), out = b.at("out");
  constexpr int kSteps = 90;
  require_ok(dspark_run(b.train(store, one, kSteps, {"--threads", "1"})));
  const double start = now_s();
  require_ok(dspark_run(b.train(store, two, kSteps, {"--threads", "2", "--save-every", "5"})));
  const double seconds = now_s() - start;
  const std::string expected = file_bytes(one / "model.safetensors");
  CHECK(file_bytes(two / "model.safetensors") == expected);
  int killed = 0;
  for (int round = 0; round < 5; ++round) {
    Process run(b.train(store, out, kSteps, {"--save-every", "5", "--json", b.at("killed.json")}));
    // The first one surely while it trains, the others whenever it comes.
    if (round == 0) wait_for_lines(run, b.at("killed.json"), 1 + static_cast<int64_t>(60 * random_fraction()));
    else ::usleep(static_cast<useconds_t>(seconds * random_fraction() * 1e6));
    run.kill(SIGKILL);
    killed += run.wait().signal == SIGKILL;
  }
  CHECK(killed > 0);
  require_ok(dspark_run(b.train(store, out, kSteps, {"--save-every", "5"})));
  CHECK(file_bytes(out / "model.safetensors") == expected);
  CHECK(file_bytes(out / "config.json") == file_bytes(one / "config.json"));
}
