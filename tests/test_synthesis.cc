// What a store remembers of the text its target wrote: which questions, in which order, how, and which were held out.
#include <catch2/catch.hpp>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include "cli_bench.h"
#include "core/log.h"
#include "job/store_tools.h"

using namespace dspark;
namespace fs = std::filesystem;

TEST_CASE("extract: a question is held out or trained on, however often the store grows", "[cli][synthesis]") {
  const Bench b(0, 0);
  const fs::path out = b.at("store"), held = b.at("held.jsonl");
  fs::create_directory(out);
  std::string journal;
  for (int i = 0; i < 8; ++i) journal += fmt::format(R"({{"id": {}, "text": "What is bridge number {}?"}})" "\n", i, i);
  write_bytes(out / "questions.jsonl", journal);
  auto command = [&](int synthesize, int hold_out, const std::string& tokens = "4") {
    return std::vector<std::string>{"extract", "--target", b.target, "--synthesize", std::to_string(synthesize), "--hold-out", std::to_string(hold_out), "--hold-out-file", held,
                                    "--out", out, "--taps", "1", "--max-new-tokens", tokens, "--threads", "1"};
  };
  auto held_out = [&] {
    std::set<std::string> numbers;
    for (const auto& line : json_lines(file_bytes(held))) numbers.insert(line.dump().substr(line.dump().find("number ") + 7, 1));
    return numbers;
  };
  require_ok(dspark_run(command(4, 2)));
  CHECK(held_out() == std::set<std::string>{"4", "5"});
  require_ok(dspark_run(command(3, 3)));  // fewer to train on: the others stay trained on
  CHECK(held_out() == std::set<std::string>{"4", "5", "6"});
  require_ok(dspark_run(command(5, 3)));
  CHECK(held_out() == std::set<std::string>{"4", "5", "6"});
  CHECK(job::inspect_store(out).at("samples") == 5);
  const Ran other = dspark_run(command(5, 3, "5"));
  INFO(other.describe());
  CHECK(other.code == 1);
  CHECK(other.said("max_new_tokens 4 there, 5 asked"));
  auto dry = command(5, 3, "5");
  dry.push_back("--dry-run");
  check_fails(dspark_run(dry), 1, {"max_new_tokens 4 there, 5 asked"});
}

TEST_CASE("extract: the questions do not depend on where a run was stopped or in which order they were ended", "[cli][synthesis]") {
  const Bench b(0, 0);
  const auto stored = [&](const std::string& name, const std::string& journal) {
    const fs::path out = b.at(name);
    fs::create_directory(out);
    write_bytes(out / "questions.jsonl", journal);
    require_ok(dspark_run({"extract", "--target", b.target, "--synthesize", "2", "--out", out, "--taps", "1", "--max-new-tokens", "4", "--threads", "1"}));
    return out;
  };
  const auto trained_on = [](const fs::path& out) { return Json::parse(file_bytes(out / "synthesis.json")).at("training").get<std::set<uint64_t>>(); };
  const std::string first = R"({"id": 0, "text": "What is a bridge?"})" "\n", none = R"({"id": 1})" "\n", again = R"({"id": 2, "text": "what is a Bridge"})" "\n",
                    second = R"({"id": 3, "text": "What is a stone?"})" "\n", third = R"({"id": 4, "text": "What is a river?"})" "\n";
  CHECK(trained_on(stored("in_order", first + none + again + second + third)) == std::set<uint64_t>{0, 3});
  CHECK(trained_on(stored("late", third + again + second + none + first)) == std::set<uint64_t>{0, 3});
  // An attempt in flight at a kill is missing: it is made before anything else, since its question would come first.
  const fs::path holes = stored("killed", first + second + third);
  std::set<uint64_t> made;
  for (const OrderedJson& line : json_lines(file_bytes(holes / "questions.jsonl"))) CHECK(made.insert(line.at("id").get<uint64_t>()).second);
  CHECK(made == std::set<uint64_t>{0, 1, 2, 3, 4});
  // And a number that no run can have written is damage, not a billion of open attempts.
  const fs::path damaged = b.at("damaged");
  fs::create_directory(damaged);
  write_bytes(damaged / "questions.jsonl", R"({"id": 4000000000, "text": "What is a bridge?"})" "\n");
  check_fails(dspark_run({"extract", "--target", b.target, "--synthesize", "1", "--out", damaged, "--taps", "1", "--threads", "1"}), 1, {"questions.jsonl", "4000000000", "damaged"});
}

TEST_CASE("extract: one store holds one way of answering, of given questions too", "[cli][synthesis]") {
  const Bench b(0, 0);
  const fs::path prompts = b.scratch.put("prompts.jsonl", R"({"prompt": "What is a bridge?"})" "\n");
  const auto command = [&](const std::string& temperature) {
    return std::vector<std::string>{"extract", "--target", b.target, "--data", prompts, "--regenerate", "--out", b.at("store"), "--taps", "1", "--max-new-tokens", "4", "--temperature", temperature, "--threads", "1"};
  };
  require_ok(dspark_run(command("0.5")));
  require_ok(dspark_run(command("0.5")));
  check_fails(dspark_run(command("0.7")), 1, {"temperature 0.5 there, 0.7 asked"});
  check_fails(dspark_run({"extract", "--target", b.target, "--data", prompts, "--regenerate", "--hold-out", "1", "--hold-out-file", b.at("held.jsonl"), "--out", b.at("other")}), 2,
              {"--hold-out", "--synthesize"});
}
