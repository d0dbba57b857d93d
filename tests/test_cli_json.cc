// Looking at things: what a command shows a person it also gives a program, with --json.
#include <catch2/catch.hpp>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "cli_bench.h"

using namespace dspark;

namespace {

// What `arguments` write to a --json file.
std::vector<OrderedJson> json_of(const Bench& b, std::vector<std::string> arguments) {
  const auto file = b.at("out.json");
  arguments.insert(arguments.end(), {"--json", file});
  require_ok(dspark_run(arguments));
  return json_lines(file_bytes(file));
}

}  // namespace

TEST_CASE("extract --preview shows conversations, prompts and token rows", "[cli]") {
  const Bench b(0, 0);
  const auto rows = b.scratch.put("rows.jsonl", R"({"messages": [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]})" "\n"
                                                R"({"prompt": "What is a bridge?"})" "\n" R"({"input_ids": [65, 66, 67], "loss_mask": [0, 1, 1]})" "\n");
  const std::vector<std::string> command{"extract", "--preview", "9", "--target", b.target, "--data", rows};
  const Ran ran = dspark_run(command);
  INFO(ran.describe());
  CHECK(ran.code == 0);
  CHECK(ran.out.find("[[cd") != std::string::npos);
  CHECK(ran.out.find("What is a bridge?") != std::string::npos);
  CHECK(ran.said("prompts to answer"));
  const auto lines = json_of(b, command);
  REQUIRE(lines.size() == 3);
  int64_t in_loss = 0;
  std::string text;
  for (const auto& s : lines[0].at("segments"))
    if (s.at("in_loss")) text += s.at("text");
  CHECK(text.starts_with("cd"));
  CHECK(lines[1].at("loss_tokens") == 0);
  CHECK(lines[1].at("where").get<std::string>().find("rows.jsonl:2") != std::string::npos);
  for (const auto& s : lines[1].at("segments")) in_loss += s.at("in_loss") ? 1 : 0;
  CHECK(in_loss == 0);
  CHECK(lines[2].at("tokens") == 3);
  CHECK(lines[2].at("loss_tokens") == 2);
  CHECK(json_of(b, {"extract", "--preview", "1", "--regenerate", "--target", b.target, "--data", rows}).at(0).at("loss_tokens") == 0);
  // What extract would drop is no preview of anything, and nothing to show is no success.
  const auto unasked = b.scratch.put("unasked.jsonl", R"({"messages": [{"role": "assistant", "content": "cd"}]})" "\n");
  check_fails(dspark_run({"extract", "--preview", "1", "--regenerate", "--target", b.target, "--data", unasked}), 1, {"no row to show"});
  check_fails(dspark_run({"extract", "--preview", "1", "--target", b.target, "--data", b.scratch.put("empty.jsonl", "")}), 1, {"no row to show"});
  check_fails(dspark_run({"extract", "--preview", "0", "--target", b.target, "--data", rows}), 2, {"--preview 0"});
}

TEST_CASE("settings, merges and dry runs are written as JSON", "[cli]") {
  const Bench b;
  const auto store = b.make_store();
  bool found = false;
  for (const auto& line : json_of(b, {"train", "--print-config", "--lr", "3e-4"}))
    if (line.at("option") == "lr") found = line.at("value") == 0.0003 && line.at("from") == "given";
  CHECK(found);
  const auto merged = json_of(b, {"extract", "--merge", store, "--out", b.at("merged")});
  REQUIRE(merged.size() == 1);
  CHECK(merged[0].at("samples") == 12);
  CHECK(merged[0].at("left_out") == 0);
  auto dry = b.train(store, b.at("run"), 7, {"--dry-run"});
  CHECK(json_of(b, dry).at(0).at("steps") == 7);
  CHECK(json_of(b, b.extract(b.at("other"), {"--dry-run"})).at(0).at("rows") == 12);
  const auto synthesis = json_of(b, {"extract", "--target", b.target, "--synthesize", "3", "--hold-out", "2", "--hold-out-file", b.at("held.jsonl"), "--out", b.at("other"), "--taps", "1", "--dry-run"});
  CHECK(synthesis.at(0).at("synthesize") == 3);
  CHECK(synthesis.at(0).at("hold_out") == 2);
  CHECK_FALSE(std::filesystem::exists(b.at("other")));
  check_fails(dspark_run(b.extract(store, {"--dry-run", "--taps", "1"})), 1, {"holds a store of something else", "taps"});
}

TEST_CASE("extract does one thing at a time and passes over nothing in silence", "[cli]") {
  const Bench b;
  const auto store = b.make_store();
  const std::vector<std::pair<std::vector<std::string>, std::string>> wrong = {
      {{"--inspect", store, "--verify", store}, "--inspect and --verify"},
      {{"--preview", "1", "--target", b.target, "--data", b.rows, "--synthesize", "2"}, "--preview and --synthesize"},
      {{"--merge", store, "--out", b.at("merged"), "--data", b.rows}, "--merge takes no --data"},
      {{"--merge", store, "--out", b.at("merged"), "--dry-run"}, "--merge has no --dry-run"},
      {{"--target", b.target, "--synthesize", "2", "--regenerate", "--out", b.at("out")}, "--regenerate answers rows of --data"},
      {{"--target", b.target, "--synthesize", "2", "--hold-out-file", b.at("held.jsonl"), "--out", b.at("out")}, "--hold-out-file needs --hold-out"}};
  for (const auto& [options, said] : wrong) {
    std::vector<std::string> command{"extract"};
    command.insert(command.end(), options.begin(), options.end());
    check_fails(dspark_run(command), 2, {said});
  }
  CHECK_FALSE(std::filesystem::exists(b.at("merged")));
  CHECK_FALSE(std::filesystem::exists(b.at("out")));
}

TEST_CASE("help names options, values and defaults as people write them", "[cli]") {
  for (const char* command : {"extract", "train", "eval", "pack", "bench"}) {
    const Ran ran = dspark_run({command, "--help"});
    INFO(ran.out);
    CHECK(ran.code == 0);
    for (const char* raw : {"{false}", "INT", "FLOAT", "TEXT", "REQUIRED", "\n\n\n"}) CHECK(ran.out.find(raw) == std::string::npos);
    size_t begin = 0;
    for (size_t end; (end = ran.out.find('\n', begin)) != std::string::npos; begin = end + 1) CHECK(end - begin <= 118);
    CHECK_FALSE(ran.out.ends_with("\n\n"));
  }
  CHECK(dspark_run({"train", "--help"}).out.find("  --steps N                   optimizer steps") != std::string::npos);
  CHECK(dspark_run({"train", "--help"}).out.find("decoder layers [5]") != std::string::npos);
}

TEST_CASE("a run that is not a drafter yet, and a validation of nothing, are said", "[cli]") {
  const Bench b;
  const auto store = b.make_store(), run = b.at("run");
  require_ok(dspark_run(b.train(store, run, 2, {"--save-every", "1"})));
  std::filesystem::remove(run / "config.json");
  const auto task = b.scratch.put("task.jsonl", R"({"turns": ["ab"]})" "\n");
  for (const auto& command : {std::vector<std::string>{"eval", "--target", b.target, "--drafter", run, "--data", task}, {"pack", run, "--inspect"}})
    check_fails(dspark_run(command), 1, {"has not finished", "checkpoints"});
  const Ran none = dspark_run(b.train(store, b.at("none"), 1, {"--val-fraction", "0.000001"}));
  require_ok(none);
  CHECK(none.said("nothing is validated"));
}
