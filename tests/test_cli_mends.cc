// What a user does next, after damage, a stop or a mistake, works: nothing is a dead end, and nothing that is read is written over.
#include <catch2/catch.hpp>

#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>

#include "cli_bench.h"
#include "core/log.h"
#include "store_edit.h"
#include "train/checkpoint.h"

using namespace dspark;
namespace fs = std::filesystem;

TEST_CASE("a store with states that are not finite is mended by a merge and the same extract", "[cli][fault]") {
  const Bench b;
  const auto store = b.make_store(), bad = b.at("bad"), mended = b.at("mended");
  copy_store(store, bad, [](int64_t i, std::vector<bf16>& states) {
    if (i == 2) states[5] = to_bf16(std::numeric_limits<float>::infinity());
  });
  check_fails(dspark_run({"extract", "--verify", bad}), 1, {"--merge", "--out NEW"});
  const Ran merge = dspark_run({"extract", "--merge", bad, "--out", mended});
  INFO(merge.describe());
  REQUIRE(merge.code == 0);
  CHECK(merge.said("left out"));
  CHECK(merge.said("holds inf"));
  CHECK(merge.said("11 samples"));
  const Ran again = dspark_run(b.extract(mended));
  INFO(again.describe());
  REQUIRE(again.code == 0);
  CHECK(again.said("1 new, 11 there already"));
  require_ok(dspark_run(b.train(mended, b.at("run"), 2)));
}

TEST_CASE("a step that cannot be read leaves a checkpoint of those before it", "[cli][fault]") {
  const Bench b;
  const auto store = b.make_store();
  // Whichever document comes first, one of these two does not.
  for (const int64_t damaged : {0, 7}) {
    const auto bad = b.at(fmt::format("bad{}", damaged)), out = b.at(fmt::format("run{}", damaged));
    copy_store(store, bad, [&](int64_t i, std::vector<bf16>& states) {
      if (i == damaged) states[0] = to_bf16(std::numeric_limits<float>::quiet_NaN());
    });
    const Ran ran = dspark_run(b.train(bad, out, 12, {"--val-fraction", "0", "--batch-docs", "1"}));
    check_fails(ran, 1, {"holds nan", "leaves such samples out"});
    CHECK(ran.said("a checkpoint of step") == train::has_checkpoint(out));
  }
  CHECK((train::has_checkpoint(b.at("run0")) || train::has_checkpoint(b.at("run7"))));
}

TEST_CASE("a run that is resumed for steps that are skipped ends as it would have without the stop", "[cli][train]") {
  const Bench b;
  const auto store = b.make_store(), huge = b.at("huge");
  copy_store(store, huge, [](int64_t i, std::vector<bf16>& states) {
    if (i % 2 == 1) std::fill(states.begin(), states.end(), to_bf16(3e38f));
  });
  const auto command = [&](const std::string& out, int64_t steps) {
    return b.train(huge, b.at(out), static_cast<int>(steps), {"--val-fraction", "0", "--batch-docs", "1", "--save-every", "1", "--keep", "100", "--json", b.at(out + ".json")});
  };
  const auto skipped_steps = [&](const std::string& out) {
    std::vector<int64_t> steps;
    for (const auto& line : json_lines(file_bytes(b.at(out + ".json")))) {
      if (line.at("phase") == "train" && !line.at("applied").get<bool>()) steps.push_back(line.at("step"));
      if (line.at("phase") == "done") CHECK(line.at("skipped") == steps.size());
    }
    return steps;
  };
  static_cast<void>(dspark_run(command("all", 12)));
  const auto skipped = skipped_steps("all");
  REQUIRE(skipped.size() > 1);
  REQUIRE(skipped.size() < 12);
  const int64_t last = skipped.back();
  const Ran whole = dspark_run(command("cut", last));
  // What it would have left when it was killed before its last step.
  for (const char* file : {"config.json", "model.safetensors"}) fs::remove(b.at("cut") / file);
  fs::remove_all(b.at("cut") / "checkpoints" / fmt::format("step-{:08}", last));
  const Ran resumed = dspark_run(command("cut", last));
  INFO(whole.describe() << "\n" << resumed.describe());
  CHECK(resumed.code == whole.code);
  CHECK(whole.code == 0);
}

TEST_CASE("a run goes on with the states it began with", "[cli][train]") {
  const Bench b;
  const auto store = b.make_store(), other = b.at("other"), run = b.at("run");
  require_ok(dspark_run(b.extract(other, {"--codec", "fp8"})));
  require_ok(dspark_run(b.train(store, run, 2)));
  check_fails(dspark_run(b.train(other, run, 2)), 1, {"states.store 1.codec: \"fp8\" now, \"raw\" there"});
  check_fails(dspark_run(b.train(store, run, 2, {"--window-rule", "anchor"})), 1, {"drafter.dspark_training.window_rule: \"anchor\" now, \"served\" there"});
}

TEST_CASE("an objective of nothing is wrong usage", "[cli][train]") {
  const Bench b;
  const auto store = b.make_store();
  const std::vector<std::pair<std::vector<std::string>, std::string>> wrong = {
      {{"--loss", "ce=0"}, "trains this drafter"},       {{"--loss", "conf=1", "--no-confidence"}, "no confidence head"}, {{"--loss", "conf=1", "--markov", "none"}, "no confidence head"},
      {{"--loss", "ce=inf"}, "from 0 to 1e+18"},       {{"--loss", "ce=1,ce=2"}, "ce stands there twice"},              {{"--epochs", "1"}, "give one of them"}};
  for (const auto& [options, said] : wrong) check_fails(dspark_run(b.train(store, b.at("run"), 2, options)), 2, {said});
  CHECK_FALSE(fs::exists(b.at("run")));
}

TEST_CASE("folders of hs files are trained on when their layers are named", "[cli][train]") {
  const Bench b;
  const auto store = b.make_store(), hs = b.at("hs");
  write_hs_folder(store, hs);
  const std::string taps = fmt::format("{}", fmt::join(taps_of(store), ","));
  check_fails(dspark_run(b.train(hs, b.at("none"), 2)), 1, {"does not say which layers", "--taps"});
  require_ok(dspark_run(b.train(hs, b.at("run"), 2, {"--taps", taps})));
  check_fails(dspark_run({"extract", "--merge", hs, "--out", b.at("merged")}), 1, {"name the taps"});
  require_ok(dspark_run({"extract", "--merge", hs, "--out", b.at("merged"), "--taps", taps}));
}

TEST_CASE("what is read is not written over", "[cli]") {
  const Bench b;
  const auto store = b.make_store(), drafter = b.make_drafter(store);
  const std::string rows = file_bytes(b.rows), weights = file_bytes(drafter / "model.safetensors");
  check_fails(dspark_run(b.extract(b.at("out"), {"--json", b.rows})), 2, {"--json", "written over"});
  check_fails(dspark_run({"extract", "--target", b.target, "--synthesize", "1", "--hold-out", "1", "--hold-out-file", b.target / "config.json", "--out", b.at("out")}), 2, {"--hold-out-file", "written over"});
  check_fails(dspark_run({"extract", "--inspect", store, "--json", store / "shard-00000.dss"}), 2, {"written over"});
  check_fails(dspark_run(b.train(store, b.at("run"), 1, {"--json", store / "shard-00000.dss"})), 2, {"written over"});
  check_fails(dspark_run(b.train(store, b.at("run"), 1, {"--report", store / "page.html"})), 2, {"written over"});
  check_fails(dspark_run(b.train(store, b.at("run"), 1, {"--tensorboard", store / "events"})), 2, {"written over"});
  check_fails(dspark_run({"pack", drafter, "--inspect", "--json", drafter / "model.safetensors"}), 2, {"written over"});
  check_fails(dspark_run({"eval", "--target", b.target, "--drafter", drafter, "--prompt", "x", "--json", drafter / "config.json"}), 2, {"written over"});
  CHECK(file_bytes(b.rows) == rows);
  CHECK(file_bytes(drafter / "model.safetensors") == weights);
  require_ok(dspark_run({"extract", "--verify", store}));
}

TEST_CASE("prompts that leave no room are counted by extract, and named by eval before it begins", "[cli]") {
  const Bench b;
  const auto drafter = b.make_drafter(b.make_store());
  const auto prompts = b.scratch.put("prompts.jsonl", R"({"prompt": "What is a bridge?"})" "\n" R"({"prompt": ")" + std::string(600, 'x') + R"("})" "\n");
  const std::vector<std::string> regenerate{"extract", "--target", b.target, "--data", prompts, "--regenerate", "--out", b.at("answers"), "--taps", "1,2,3", "--max-length", "100", "--max-new-tokens", "4", "--threads", "1"};
  const Ran ran = dspark_run(regenerate);
  INFO(ran.describe());
  CHECK(ran.code == 0);
  CHECK(ran.said("no room for an answer"));
  CHECK(ran.said("prompts.jsonl:2"));
  auto strict = regenerate;
  strict.push_back("--strict");
  check_fails(dspark_run(strict), 1, {"prompts.jsonl:2", "no room for an answer", "--max-length 100"});
  check_fails(dspark_run({"eval", "--target", b.target, "--drafter", drafter, "--data", prompts, "--max-length", "128", "--max-new-tokens", "4"}), 1, {"prompts.jsonl:2", "--max-length 687 (is 128)"});
}

TEST_CASE("eval --prompt writes its answer as JSON, and takes one thing at a time", "[cli]") {
  const Bench b;
  const auto drafter = b.make_drafter(b.make_store());
  const std::vector<std::string> eval{"eval", "--target", b.target, "--drafter", drafter, "--prompt", "ab", "--max-new-tokens", "6", "--temperature", "0"};
  auto with_json = eval;
  with_json.insert(with_json.end(), {"--json", "-"});
  const auto lines = json_lines(dspark_run(with_json).out);
  REQUIRE(lines.size() == 1);
  CHECK(dspark_run(eval).out == lines[0].at("answer").get<std::string>() + "\n");
  for (const auto& [more, said] : std::vector<std::pair<std::vector<std::string>, std::string>>{{{"--chat"}, "one at a time"}, {{"--drafter", drafter}, "--data compares them"}}) {
    auto wrong = eval;
    wrong.insert(wrong.end(), more.begin(), more.end());
    check_fails(dspark_run(wrong), 2, {said});
  }
}

TEST_CASE("config files that are cut off or no object are refused", "[cli]") {
  const Bench b;
  const auto refused = [&](const std::string& text, const std::string& said) { check_fails(dspark_run({"train", "--print-config", "--config", b.scratch.put("c", text)}), 2, {said}); };
  refused("layers = 2\nstore-weights = [1, 2\n", "the '[' of line 2 is not closed");
  refused("layers = 2]\n", "line 1 closes a list");
  refused(R"([{"steps": 3}])", "not an object of options");
  require_ok(dspark_run({"train", "--print-config", "--config", b.scratch.put("c", "# [ a comment\n[train]\nloss = \"ce=1\"  # ]\nlayers = 2\n")}));
}
