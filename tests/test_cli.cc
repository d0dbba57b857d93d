// Bad input through the built binary: one clear message, the right exit status, nothing half-written.
#include <cstring>
#include <nlohmann/json.hpp>

#include "cli_bench.h"
#include "core/error.h"
#include "core/files.h"
#include "core/rng.h"
#include "formats/gguf.h"

using namespace dspark;

namespace {

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  const size_t at = text.find(from);
  REQUIRE(at != std::string::npos);
  return text.replace(at, from.size(), to);
}

}  // namespace

TEST_CASE("help, version and wrong usage have their exit codes", "[cli]") {
  for (const char* command : {"extract", "train", "eval", "pack", "bench"}) {
    const Ran ran = dspark_run({command, "--help"});
    INFO(command << " " << ran.describe());
    CHECK(ran.code == 0);
    CHECK(ran.err.empty());
    CHECK(ran.out.find("--json") != std::string::npos);
    check_fails(dspark_run({command, "gemm", "--no-such-flag"}), 2, {"--no-such-flag"});
  }
  CHECK(dspark_run({"--help"}).code == 0);
  const Ran version = dspark_run({"--version"});
  CHECK(version.code == 0);
  CHECK(version.out.starts_with("dspark "));
  check_fails(dspark_run({}), 2, {});
  check_fails(dspark_run({"distill"}), 2, {"unknown command 'distill'"});
}

TEST_CASE("options that make no sense are wrong usage", "[cli]") {
  const Scratch scratch;
  const std::string store = scratch.folder / "store", out = scratch.folder / "out", target = scratch.folder / "t.gguf";
  auto train = [&](std::vector<std::string> more) {
    more.insert(more.begin(), {"train", "--store", store, "--target", target, "--out", out});
    return dspark_run(more);
  };
  check_fails(train({"--steps", "5", "--layers", "0"}), 2, {"--layers 0"});
  check_fails(train({"--steps", "5", "--layers", "-1"}), 2, {"--layers"});
  check_fails(train({"--steps", "5", "--block", "0"}), 2, {"--block 0"});
  check_fails(train({"--steps", "5", "--rank", "0"}), 2, {"--rank 0"});
  check_fails(train({}), 2, {"--steps"});
  check_fails(train({"--steps", "many"}), 2, {"--steps", "many"});
  check_fails(train({"--steps", "5", "--loss", "ce=1,nonsense=2"}), 2, {"nonsense"});
  check_fails(train({"--steps", "5", "--layer-types", "sliding"}), 2, {"--window"});
  check_fails(train({"--steps", "5", "--val-fraction", "1.5"}), 2, {"--val-fraction"});
  check_fails(dspark_run({"train", "--steps", "5"}), 2, {"--store"});
  check_fails(dspark_run({"extract", "--target", target, "--out", out}), 2, {"--data"});
  check_fails(dspark_run({"extract", "--data", target, "--out", out}), 2, {"--target"});
  check_fails(dspark_run({"eval", "--target", target}), 2, {"--drafter"});
  check_fails(dspark_run({"pack"}), 2, {"drafter"});
  CHECK_FALSE(fs::exists(out));
}

TEST_CASE("paths that are not there are named", "[cli]") {
  const Bench b;
  const auto gone = b.at("gone"), empty = b.at("empty"), out = b.at("out");
  make_folder(empty);
  const std::string rows = b.rows, target = b.target;
  check_fails(dspark_run({"extract", "--target", gone, "--data", rows, "--out", out}), 1, {"gone"});
  check_fails(dspark_run({"extract", "--target", target, "--data", gone, "--out", out, "--taps", "1"}), 1, {"gone"});
  check_fails(dspark_run({"extract", "--target", empty, "--data", rows, "--out", out}), 1, {"empty", "config.json"});
  check_fails(dspark_run({"extract", "--target", rows, "--data", rows, "--out", out}), 1, {"rows.jsonl", "GGUF"});
  check_fails(dspark_run({"extract", "--inspect", gone}), 1, {"gone"});
  check_fails(dspark_run({"extract", "--verify", gone}), 1, {"gone"});
  check_fails(dspark_run({"extract", "--verify", empty}), 1, {"empty"});
  check_fails(dspark_run(b.train(gone, out, 1)), 1, {"gone"});
  check_fails(dspark_run(b.train(empty, out, 1)), 1, {"empty"});
  check_fails(dspark_run({"pack", gone, "--inspect"}), 1, {"gone"});
  check_fails(dspark_run({"pack", empty, "--inspect"}), 1, {"empty", "config.json"});
  check_fails(dspark_run({"eval", "--target", target, "--drafter", gone, "--prompt", "x"}), 1, {"gone"});
  check_fails(dspark_run(b.extract(out, {"--taps", "1,9"})), 2, {"--taps"});
  check_fails(dspark_run(b.extract(out, {"--json", b.at("no") / "such.json"})), 1, {"such.json"});
  CHECK_FALSE(fs::exists(out));
}

TEST_CASE("damaged and unknown GGUF files are refused", "[cli][fault]") {
  const Bench b(2, 4);
  const std::string whole = file_bytes(b.target);
  const auto bad = b.at("bad.gguf"), out = b.at("out");
  auto run = [&] { return dspark_run({"extract", "--target", bad, "--data", b.rows, "--out", out, "--taps", "1", "--threads", "1"}); };
  const Rng rng(20, RngStream::test);
  uint64_t draws = 0;
  for (uint64_t size : {uint64_t{0}, uint64_t{3}, uint64_t{23}, whole.size() / 2, whole.size() - 1, rng.below(draws++, whole.size()), rng.below(draws++, 8192)}) {
    INFO("cut to " << size);
    write_bytes(bad, whole.substr(0, size));
    check_fails(run(), 1, {"bad.gguf"});
  }
  // Magic, version, counts: never right again whatever the bit (bit 0 of the version makes 3 a 2, which reads the same).
  for (size_t byte : {0, 3, 5, 8, 12, 16, 22}) {
    std::string text = whole;
    text[byte] = static_cast<char>(text[byte] ^ 0x10);
    INFO("byte " << byte);
    write_bytes(bad, text);
    check_fails(run(), 1, {"bad.gguf"});
  }
  CHECK_FALSE(fs::exists(out));
  int refused = 0;
  for (int i = 0; i < 40; ++i) {
    std::string text = whole;
    const uint64_t bit = rng.below(draws++, 8 * 9000);  // the metadata and the list of tensors
    text[bit / 8] = static_cast<char>(text[bit / 8] ^ (1 << (bit % 8)));
    write_bytes(bad, text);
    const Ran ran = dspark_run({"extract", "--target", bad, "--data", b.rows, "--out", out, "--taps", "1", "--threads", "1", "--dry-run"});
    INFO("bit " << bit << " " << ran.describe());
    // A flipped letter of a token is still a tokenizer; anything else is one message.
    if (ran.code == 0 && ran.signal == 0) continue;
    check_fails(ran, 1, {"bad.gguf"});
    ++refused;
  }
  CHECK(refused > 0);
  TinyTarget strange;
  strange.architecture = "retnet";
  write_tiny_target(bad, strange);
  check_fails(run(), 1, {"bad.gguf", "retnet"});
  CHECK_FALSE(fs::exists(out));
}

TEST_CASE("damaged safetensors are refused", "[cli][fault]") {
  const Bench b;
  const auto drafter = b.make_drafter(b.make_store());
  const auto file = drafter / "model.safetensors";
  const std::string whole = file_bytes(file);
  uint64_t header = 0;
  std::memcpy(&header, whole.data(), 8);
  for (uint64_t size : {uint64_t{0}, uint64_t{7}, header / 2, header + 8, whole.size() - 1}) {
    INFO("cut to " << size);
    write_bytes(file, whole.substr(0, size));
    check_fails(dspark_run({"pack", drafter, "--inspect"}), 1, {"model.safetensors"});
    check_fails(dspark_run({"eval", "--target", b.target, "--drafter", drafter, "--prompt", "x"}), 1, {"model.safetensors"});
  }
  const Rng rng(21, RngStream::test);
  int refused = 0;
  for (int i = 0; i < 30; ++i) {
    std::string text = whole;
    const uint64_t bit = rng.below(static_cast<uint64_t>(i), 8 * (header + 8));
    text[bit / 8] = static_cast<char>(text[bit / 8] ^ (1 << (bit % 8)));
    write_bytes(file, text);
    const Ran ran = dspark_run({"pack", drafter, "--inspect"});
    INFO("bit " << bit << " " << ran.describe());
    if (ran.code == 0 && ran.signal == 0) continue;  // the metadata's own text
    check_fails(ran, 1, {"drafter"});
    ++refused;
  }
  CHECK(refused > 10);
  fs::remove(file);
  check_fails(dspark_run({"pack", drafter, "--inspect"}), 1, {"drafter", "safetensors"});
}

TEST_CASE("rows that cannot be used are counted, and named with --strict", "[cli]") {
  const Bench b;
  const std::string good = tiny_rows(1, 4);
  const std::string lines[] = {good, "this is not JSON\n", "\n",
                               R"({"messages": [{"role": "user", "content": "a"}, {"role": "wizard", "content": "b"}, {"role": "assistant", "content": "c"}]})" "\n",
                               tiny_rows(1, 60, 5), R"({"messages": []})" "\n", R"([1, 2])" "\n", R"({"text": "x"})" "\n"};
  std::string all;
  for (const auto& line : lines) all += line;
  const auto rows = b.scratch.put("mixed.jsonl", all);
  auto run = [&](const fs::path& data, const std::string& out, std::vector<std::string> more) {
    more.insert(more.begin(), {"extract", "--target", b.target, "--data", data, "--out", b.at(out), "--taps", "1,2", "--max-length", "128"});
    return dspark_run(more);
  };
  const Ran ran = run(rows, "out", {"--json", "-"});
  INFO(ran.describe());
  REQUIRE(ran.code == 0);
  const auto result = json_lines(ran.out).at(0);
  CHECK(result["lines"] == 8);
  CHECK(result["samples"] == 3);
  CHECK(result["cut"] == 1);
  CHECK(result["dropped"] == 5);
  for (const char* said : {"not JSON", "empty line", "unknown role 'wizard'", "cut at the length limit", "empty conversation", "not a JSON object", "unknown dialect", "mixed.jsonl:2"}) {
    INFO(said);
    CHECK(ran.said(said));
  }
  for (size_t bad = 1; bad < std::size(lines); ++bad) {
    INFO(lines[bad]);
    const auto one = b.scratch.put("one.jsonl", good + good + lines[bad]);
    check_fails(run(one, "strict", {"--strict"}), 1, {"one.jsonl:3"});
  }
  CHECK_FALSE(fs::exists(b.at("strict")));
}

TEST_CASE("a drafter of another target is refused", "[cli]") {
  const Bench b;
  const auto drafter = b.make_drafter(b.make_store());
  auto eval = [&](const fs::path& target) { return dspark_run({"eval", "--target", target, "--drafter", drafter, "--prompt", "x", "--max-new-tokens", "4"}); };
  const Ran fits = eval(b.target);
  INFO(fits.describe());
  REQUIRE(fits.code == 0);
  // Another target under the same drafter.
  auto with = [&](TinyTarget tiny) {
    write_tiny_target(b.at("other.gguf"), tiny);
    return eval(b.at("other.gguf"));
  };
  check_fails(with({.hidden = 96, .heads = 6}), 1, {"drafter", "width 64", "96", "another target"});
  check_fails(with({.extra_tokens = 5}), 1, {"drafter", "259", "264", "another target"});
  check_fails(with({.layers = 2}), 1, {"drafter", "taps the state after 3", "another target"});
  // The same target under a drafter whose config says otherwise.
  const std::string config = file_bytes(drafter / "config.json");
  auto edited = [&](const std::string& from, const std::string& to) {
    write_bytes(drafter / "config.json", replaced(config, from, to));
    return eval(b.target);
  };
  const auto json = OrderedJson::parse(config);
  const std::string hash = json["dspark_training"]["tokenizer_hash"];
  check_fails(edited(hash, std::string(hash.size(), 'a')), 1, {"drafter", "tokenizer", "aaaaaaaaaaaa"});
  check_fails(edited("\"vocab_size\": 259", "\"vocab_size\": 300"), 1, {"drafter"});
  check_fails(edited("\"hidden_size\": 64", "\"hidden_size\": 96"), 1, {"drafter"});
  OrderedJson taps = json;
  taps["aux_hidden_state_layer_ids"] = {1, 2};
  write_bytes(drafter / "config.json", taps.dump());
  check_fails(eval(b.target), 1, {"drafter", "fc.weight"});
  write_bytes(drafter / "config.json", config.substr(0, config.size() / 2));
  check_fails(eval(b.target), 1, {"config.json"});
}

TEST_CASE("a store of another target is refused", "[cli]") {
  const Bench b;
  const auto store = b.make_store(), out = b.at("out");
  auto with = [&](TinyTarget tiny) {
    Bench other(1, 1, tiny);
    return dspark_run(other.train(store, out, 2));
  };
  check_fails(with({.hidden = 96, .heads = 6}), 1, {"store", "width 64", "96"});
  check_fails(with({.ffn = 128}), 1, {"store", "tiny.gguf", "config"});
  check_fails(with({.extra_tokens = 3}), 1, {"store"});
  // The same architecture, tokenizer and file name: another checkpoint.
  check_fails(with({.seed = 2}), 1, {"store", "other weights", "another target"});
  CHECK(files_below(out).empty());
  const Bench sibling(1, 1, {.seed = 2});
  check_fails(dspark_run(sibling.extract(store)), 1, {"store", "weights"});
  check_fails(dspark_run(b.train(store, out, 2, {"--taps", "0"})), 1, {"store", "1 2 3"});
  CHECK(files_below(out).empty());
}

TEST_CASE("a config file gives options from TOML and JSON, and the command line goes first", "[cli]") {
  const Bench b(2, 4);
  auto printed = [&](const std::string& text, const std::vector<std::string>& more = {}) {
    std::vector<std::string> a{"train", "--print-config", "--config", b.scratch.put("config", text)};
    a.insert(a.end(), more.begin(), more.end());
    return dspark_run(a);
  };
  auto has = [](const Ran& r, const std::string& name, const std::string& value) {
    INFO(r.describe());
    std::istringstream in(r.out);
    for (std::string line; std::getline(in, line);)
      if (line.starts_with(name + " ")) return line.find(" " + value + " ") != std::string::npos;
    return false;
  };
  for (const std::string text : {"lr = 0.01\nlayers = 3\nno-confidence = true\n", "[train]\nlr = 0.01\nlayers = 3\n[eval]\nlimit = 3\n",
                                 "{\"lr\": 0.01, \"train\": {\"layers\": 3}}"}) {
    CHECK(has(printed(text), "lr", "0.01"));
    CHECK(has(printed(text), "layers", "3"));
    CHECK(has(printed(text, {"--layers", "4"}), "layers", "4"));
  }
  check_fails(printed("bogus = 3\n"), 2, {"'bogus' is no option of 'dspark train'"});
  check_fails(printed("[bogus]\nlr = 3\n"), 2, {"section [bogus] is no command"});
  check_fails(printed("{\"lr\": "), 2, {"not valid JSON"});
  check_fails(printed("{\"lr\": {\"x\": 1}}"), 2, {"[lr]"});
  check_fails(printed("no-confidence = 3\n"), 2, {"is a flag"});
  check_fails(dspark_run({"train", "--print-config", "--config", b.at("missing")}), 2, {"--config", "missing"});
}

TEST_CASE("numbers are finite", "[cli]") {
  for (const char* option : {"--lr", "--weight-decay", "--epochs", "--warmup", "--decay", "--val-fraction", "--dpace", "--muon-lr"})
    for (const char* value : {"nan", "inf", ""}) check_fails(dspark_run({"train", "--print-config", option, value}), 2, {option});
  check_fails(dspark_run({"train", "--print-config", "--layers", "99999999999999999999"}), 2, {"--layers"});
  for (const char* option : {"--temperature", "--top-p"}) check_fails(dspark_run({"eval", option, "nan"}), 2, {option});
  check_fails(dspark_run({"eval", "--top-p", "0"}), 2, {"--top-p"});
  check_fails(dspark_run({"train", "--threads", "100000"}), 2, {"--threads"});
}

TEST_CASE("a drafter that is not finite is not written, and a run that changed nothing is not done", "[cli]") {
  const Bench b(6, 8);
  const auto store = b.make_store();
  check_fails(dspark_run(b.train(store, b.at("far"), 3, {"--lr", "1e17", "--warmup", "0"})), 1, {"diverged", "is not written"});
  CHECK(!std::filesystem::exists(b.at("far") / "model.safetensors"));
  check_fails(dspark_run(b.train(store, b.at("noisy"), 2, {"--tap-noise", "1e17", "--loss", "ce=1e17"})), 1, {"none of 2 steps changed the drafter"});
}
