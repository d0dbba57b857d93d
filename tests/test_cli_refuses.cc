// What people get wrong, through the built binary: each is one message that names the thing, and nothing is left behind. Tables, so that
// the next case is one line.
#include <signal.h>
#include <unistd.h>

#include <limits>
#include <nlohmann/json.hpp>

#include "cli_bench.h"
#include "core/error.h"
#include "core/files.h"
#include "core/log.h"
#include "formats/store.h"
#include "model/drafter_files.h"
#include "train/checkpoint.h"

using namespace dspark;

namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN(), kInf = std::numeric_limits<double>::infinity();

// A drafter folder whose config.json was edited by hand.
fs::path edited(const Bench& b, const fs::path& drafter, const std::function<void(OrderedJson&)>& edit) {
  const auto copy = b.at("edited");
  fs::remove_all(copy);
  fs::copy(drafter, copy, fs::copy_options::recursive);
  OrderedJson config = OrderedJson::parse(file_bytes(copy / "config.json"));
  edit(config);
  write_bytes(copy / "config.json", config.dump());
  return copy;
}

}  // namespace

TEST_CASE("numbers outside an option's limits are wrong usage, said with the limits", "[cli]") {
  struct Wrong {
    const char *command, *option, *value;
    std::string said;
  };
  const Wrong all[] = {{"train", "--layers", "100000", "from 1 to 1000"},
                       {"train", "--layers", "2.5", "whole number from 1"},
                       {"train", "--block", "128", "from 1 to 127"},
                       {"train", "--block", "-7", "from 1 to 127"},
                       {"train", "--hidden", "2147483647", "from 0 to 1048576"},
                       {"train", "--rank", "99999999", "from 0 to 65536"},
                       {"train", "--row-tokens", "16777217", "from 1 to 16777216"},
                       {"train", "--batch-docs", "1e20", "whole number from 0"},
                       {"train", "--batch-docs", "99999999999999999999999", "whole number from 0"},
                       {"train", "--anchors", "0", "from 1 to"},
                       {"train", "--chunk-slots", "0", "from 1 to"},
                       {"train", "--draft-vocab", "-1", "from 0 to"},
                       {"train", "--mask-token", "-5", "from -1 to"},
                       {"train", "--seed", "-1", "from 0 to"},
                       {"train", "--decay", "-0.5", "number from 0"},
                       {"train", "--val-fraction", "-0.1", "from 0 to 1"},
                       {"train", "--store-weights", "1,", "'' is wrong, expected a number from 0 to 1000"},
                       {"train", "--store-weights", "1,,2", "'' is wrong"},
                       {"train", "--store-weights", "1,x", "'x' is wrong"},
                       {"train", "--cpu-kernel", "nonsense", "expected one of auto, base"},
                       {"train", "--ranks", "0", "from 1 to"},
                       {"train", "--rank-timeout", "0", "from 1 to"},
                       {"extract", "--max-length", "7", "from 8 to"},
                       {"extract", "--batch", "1e20", "from 1 to"},
                       {"eval", "--max-length", "1e20", "from 8 to 16777216"},
                       {"eval", "--max-new-tokens", "0", "from 1 to"},
                       {"eval", "--seed", "-1", "from 0 to"},
                       {"eval", "--cpu-kernel", "AVX2", "expected one of auto"},
                       {"bench gemm", "--threads", "3000", "from 0 to 1024"},
                       {"bench gemm", "--cpu-kernel", "nonsense", "expected one of auto"},
                       {"bench loss", "--chunk-slots", "128,", "'' is wrong"},
                       {"bench step", "--steps", "0", "from 1 to"}};
  for (const Wrong& w : all) {
    const std::string command = w.command;
    std::vector<std::string> a{command.substr(0, command.find(' '))};
    if (a[0] == "bench") a.push_back(command.substr(6));
    a.insert(a.end(), {w.option, w.value});
    INFO(command << " " << w.option << " " << w.value);
    check_fails(dspark_run(a), 2, {std::string(w.option) + " " + w.value, w.said});
  }
  // Planned from a shape, without a store.
  for (const std::string layers : {"1", "1000"}) CHECK(dspark_run({"train", "--plan", "--shape", "tiny", "--steps", "2", "--machine", "h200", "--layers", layers}).code == 0);
}

TEST_CASE("options that contradict each other or end in nothing are wrong usage", "[cli]") {
  const Bench b;
  const auto store = b.make_store(), out = b.at("out");
  check_fails(dspark_run(b.train(store, out, 2, {"--algorithm", "dflash", "--markov", "gated"})), 2, {"dflash", "--markov gated"});
  check_fails(dspark_run(b.train(store, out, 2, {"--loss", "ce=1,"})), 2, {"--loss ce=1,", "''"});
  check_fails(dspark_run(b.train(store, out, 2, {"--layer-types", "full,"})), 2, {"--layer-types"});
  check_fails(dspark_run(b.train(store, out, 2, {"--taps", "1,2,"})), 2, {"--taps 1,2,", "''"});
  CHECK_FALSE(fs::exists(out));
  // An output inside a store.
  const auto before = files_below(store);
  const auto drafter = b.make_drafter(store);
  for (const auto& inside : {store, store / "run", store / "a" / "b"}) {
    check_fails(dspark_run(b.train(store, inside, 2)), 2, {"--out", "lies in the store"});
    check_fails(dspark_run({"pack", drafter, "--out", inside}), 2, {"--out", "lies in the store"});
  }
  check_fails(dspark_run(b.extract(store / "more")), 2, {"--out", "lies in the store"});
  check_fails(dspark_run({"extract", "--merge", store, "--out", store / "more"}), 2, {"--out", "lies in the store"});
  CHECK(files_below(store) == before);
}

TEST_CASE("a drafter that no memory holds is refused before anything is allocated", "[cli]") {
  const Bench b;
  const auto store = b.make_store(), out = b.at("out");
  check_fails(dspark_run(b.train(store, out, 2, {"--hidden", "1048576", "--layers", "1000"})), 1, {"parameters", "this machine has", "--hidden"});
  check_fails(dspark_run(b.train(store, out, 2, {"--row-tokens", "16777216", "--block", "64", "--dry-run"})), 1, {"slots are more than"});
  CHECK(files_below(out).empty());
}

TEST_CASE("pack refuses a target that is not the drafter's", "[cli]") {
  const Bench b;
  const auto drafter = b.make_drafter(b.make_store()), out = b.at("packed");
  auto pack = [&](const fs::path& d, const fs::path& target) { return dspark_run({"pack", d, "--out", out, "--target", target}); };
  auto other = [&](TinyTarget tiny) {
    write_tiny_target(b.at("other.gguf"), tiny);
    return pack(drafter, b.at("other.gguf"));
  };
  check_fails(other({.hidden = 96, .heads = 6}), 1, {"drafter", "width 64", "96"});
  check_fails(other({.extra_tokens = 5}), 1, {"drafter", "259", "264"});
  check_fails(other({.layers = 3}), 1, {"drafter", "taps the state after 3", "has 3"});
  check_fails(pack(edited(b, drafter, [](OrderedJson& c) { c["dspark_training"]["tokenizer_hash"] = std::string(64, '0'); }), b.target), 1, {"another tokenizer (000000000000)"});
  check_fails(pack(edited(b, drafter, [](OrderedJson& c) { c["aux_hidden_state_layer_ids"] = {1, 2, 99}; }), b.target), 1, {"taps the state after 99", "has 4"});
  CHECK_FALSE(fs::exists(out));
  // DeepSpec's own format says how many layers there are.
  require_ok(dspark_run(b.train(b.at("store"), b.at("full"), 2, {"--draft-vocab", "0"})));
  require_ok(dspark_run({"pack", b.at("full"), "--to", "deepspec", "--out", b.at("deepspec"), "--target", b.target}));
  const auto beyond = edited(b, b.at("deepspec"), [](OrderedJson& c) { c["target_layer_ids"] = {0, 1, 99}; });
  check_fails(dspark_run({"pack", beyond, "--out", out}), 1, {"target_layer_ids ends with 99", "num_target_layers 4"});
  check_fails(dspark_run({"pack", edited(b, drafter, [](OrderedJson& c) { c["aux_hidden_state_layer_ids"][0] = int64_t{1} << 40; }), "--inspect"}), 1, {"aux_hidden_state_layer_ids"});
  CHECK_FALSE(fs::exists(out));
}

TEST_CASE("weights that are not finite are refused by name, wherever they are read", "[cli]") {
  const Bench b;
  const auto store = b.make_store(), drafter = b.make_drafter(store), out = b.at("out"), bad = b.at("bad.gguf");
  auto eval = [&](const fs::path& target, const fs::path& d) { return dspark_run({"eval", "--target", target, "--drafter", d, "--prompt", "x", "--max-new-tokens", "4", "--threads", "1"}); };
  for (const double value : {kNan, kInf, -kInf}) {
    write_tiny_target(bad, {.spoilt = "blk.1.ffn_up.weight", .spoiling = value});
    const std::string tensor = "tensor 'blk.1.ffn_up.weight' holds";
    check_fails(eval(bad, drafter), 1, {"bad.gguf", tensor, "element 3072"});
    check_fails(dspark_run({"extract", "--target", bad, "--data", b.rows, "--out", out, "--taps", "1"}), 1, {"bad.gguf", tensor});
  }
  write_tiny_target(bad, {.spoilt = "token_embd.weight", .spoiling = kNan});
  check_fails(dspark_run({"pack", drafter, "--out", b.at("packed"), "--target", bad}), 1, {"bad.gguf", "token_embd.weight"});
  CHECK_FALSE(fs::exists(b.at("packed")));
  // Finite, and too large to compute with: gate times up overflows.
  write_tiny_target(bad, {.spoilt = "blk.1.ffn_norm.weight", .spoiling = 3e38});
  check_fails(eval(bad, drafter), 1, {"bad.gguf with ", "the target's logits after a prompt of", "not finite"});

  // The drafter's.
  const model::DrafterFiles files = model::read_drafter(drafter);
  auto with = [&](double value) {
    fs::remove_all(b.at("bad"));
    model::write_drafter(b.at("bad"), files.config, files.kept, [&](const std::string& name) {
      auto v = files.tensors.find(name) ? model::drafter_values(files, name) : std::vector<float>();
      if (name == "layers.0.post_attention_layernorm.weight") std::fill(v.begin(), v.end(), static_cast<float>(value));
      return v;
    }, {.leave_out = files.from_target});
  };
  with(1e30);
  std::string whole = file_bytes(b.at("bad") / "model.safetensors");
  const float large = 1e30f;
  const uint16_t bits = to_bf16(large).bits;
  const size_t at = whole.find(std::string(reinterpret_cast<const char*>(&bits), 2), 8 + whole.find('}') / 2);
  REQUIRE(at != std::string::npos);
  with(3e38);
  check_fails(eval(b.target, b.at("bad")), 1, {"bad: the drafter's logits after", "not finite"});
  const uint16_t nan = to_bf16(std::numeric_limits<float>::quiet_NaN()).bits;
  std::memcpy(whole.data() + at, &nan, 2);
  write_bytes(b.at("bad") / "model.safetensors", whole);
  check_fails(eval(b.target, b.at("bad")), 1, {"bad: tensor '", "holds nan"});
  check_fails(dspark_run(b.train(store, out, 2, {"--init", b.at("bad")})), 1, {"bad: tensor '", "holds nan"});
  check_fails(dspark_run({"pack", b.at("bad"), "--out", b.at("packed")}), 1, {"bad: tensor '", "holds nan"});
  CHECK_FALSE(fs::exists(b.at("packed")));
}

TEST_CASE("a target's rope and norm settings that make no sense are refused by their key", "[cli]") {
  const Bench b(2, 4);
  const auto bad = b.at("bad.gguf"), out = b.at("out");
  auto check = [&](const TinyTarget& tiny, const std::string& key, const std::string& value) {
    write_tiny_target(bad, tiny);
    INFO(key << " " << value);
    check_fails(dspark_run({"extract", "--target", bad, "--data", b.rows, "--out", out, "--taps", "1", "--dry-run"}), 1, {"bad.gguf", "'llama." + key + "' is " + value, "expected"});
  };
  for (const auto& [value, text] : {std::pair{kInf, "inf"}, {kNan, "nan"}, {0.0, "0"}, {-1.0, "-1"}, {0.5, "0.5"}, {1e30, "1.0000000"}})
    check({.reals = {{"rope.freq_base", value}}}, "rope.freq_base", text);
  for (const auto& [value, text] : {std::pair{kInf, "inf"}, {kNan, "nan"}, {0.0, "0"}, {-1.0, "-1"}, {0.75, "0.75"}})
    check({.eps = value}, "attention.layer_norm_rms_epsilon", text);
  for (const auto& [value, text] : {std::pair{kInf, "inf"}, {kNan, "nan"}, {0.0, "0"}, {-2.0, "-2"}})
    check({.reals = {{"rope.scale_linear", value}}}, "rope.scale_linear", text);
  CHECK_FALSE(fs::exists(out));
}

TEST_CASE("an edited state.json is a damaged checkpoint", "[cli][fault][checkpoint]") {
  const Bench b;
  const auto store = b.make_store(), out = b.at("run");
  const Bench::Arguments save{"--save-every", "2", "--keep", "9"};
  require_ok(dspark_run(b.train(store, out, 4, save)));
  const std::string whole = file_bytes(out / "model.safetensors");
  const auto newest = out / "checkpoints" / "step-00000004" / "state.json";
  const std::string state = file_bytes(newest);
  const Json good = Json::parse(state);
  REQUIRE(good.contains("crc32c"));
  auto again = [&](const std::string& text) {
    const auto copy = b.at("copy");
    fs::remove_all(copy);
    fs::copy(out, copy, fs::copy_options::recursive);
    for (const char* name : {"model.safetensors", "config.json"}) fs::remove(copy / name);
    write_bytes(copy / "checkpoints" / "step-00000004" / "state.json", text);
    const Ran ran = dspark_run(b.train(store, copy, 4, save));
    INFO(ran.describe());
    REQUIRE(ran.code == 0);
    CHECK(file_bytes(copy / "model.safetensors") == whole);
    CHECK_FALSE(ran.said("json.exception"));
    return ran;
  };
  CHECK_FALSE(again(state).said("set aside"));
  const std::pair<const char*, Json> edits[] = {{"optimizer_steps", -1}, {"optimizer_steps", 1000000000000000000}, {"optimizer_steps", "four"}, {"optimizer_steps", 3.5}, {"optimizer_steps", 5},
                                                {"step", 2},             {"step", Json()},                          {"files", Json::array()},    {"validation_tau", -3},  {"format_version", 12}};
  for (const auto& [key, value] : edits) {
    Json bad = good;
    bad[key] = value;
    INFO(key << " " << value.dump());
    CHECK(again(bad.dump(1)).said("state.json is damaged (its checksum is another one); it is set aside as damaged-00000004"));
    // By somebody who puts the checksum right, and in the format that had none.
    bad.erase("crc32c");
    Json unchecked = bad;
    bad["crc32c"] = json_checksum(bad);
    const Ran ran = again(bad.dump(1));
    CHECK(ran.said("it is set aside as damaged-00000004"));
    CHECK(ran.said(std::string(key) == "format_version" ? "its checksum is missing" : "'" + std::string(key) + "' is "));
    if (std::string(key) == "format_version") continue;
    unchecked["format_version"] = "1.1";
    CHECK(again(unchecked.dump(1)).said("'" + std::string(key) + "' is "));
  }
  Json without = good;
  without.erase("crc32c");
  CHECK(again(without.dump(1)).said("its checksum is missing"));
  without["format_version"] = "1.1";  // an older dspark's
  CHECK_FALSE(again(without.dump(1)).said("set aside"));
  CHECK(again("").said("state.json: not valid JSON: it is empty"));
  CHECK(again(state.substr(0, 40)).said("ends too early"));
  CHECK(again("[1, 2]").said("not a JSON object"));
  // A newer format is nobody's damage.
  Json newer = good;
  newer.erase("crc32c");
  newer["format_version"] = "2.0";
  newer["crc32c"] = json_checksum(newer);
  const auto copy = b.at("copy");
  write_bytes(copy / "checkpoints" / "step-00000004" / "state.json", newer.dump(1));
  for (const auto& entry : fs::directory_iterator(copy / "checkpoints")) INFO(entry.path());
  fs::remove_all(copy);
  fs::copy(out, copy, fs::copy_options::recursive);
  write_bytes(copy / "checkpoints" / "step-00000004" / "state.json", newer.dump(1));
  check_fails(dspark_run(b.train(store, copy, 4, save)), 1, {"format '2.0' is not one this version reads"});
  CHECK(fs::exists(copy / "checkpoints" / "step-00000004"));
}

TEST_CASE("rows without anything to learn make no store", "[cli]") {
  const Bench b;
  const auto out = b.at("out");
  auto extract = [&](const std::string& rows, std::vector<std::string> more = {}) {
    more.insert(more.begin(), {"extract", "--target", b.target, "--data", b.scratch.put("bad.jsonl", rows), "--out", out, "--taps", "1,2"});
    return dspark_run(more);
  };
  const std::string unlabelled = R"({"messages": [{"role": "user", "content": "a"}]})" "\n", masked = R"({"input_ids": [1, 2, 3], "loss_mask": [0, 0, 0]})" "\n";
  for (const std::vector<std::string>& more : {std::vector<std::string>{}, {"--dry-run"}}) {
    check_fails(extract("", more), 1, {"bad.jsonl: nothing to extract in 0 lines", "no store is written"});
    check_fails(extract("not JSON\n{\"text\": 3}\n", more), 1, {"bad.jsonl: nothing to extract in 2 lines", "1 as ", "bad.jsonl:1: not JSON"});
    check_fails(extract(masked + masked + "[]\n", more), 1, {"nothing to extract in 3 lines", "1 as ", "bad.jsonl:3: not a JSON object", "2 as ", "bad.jsonl:1: no token in the loss"});
    check_fails(extract(unlabelled, more), 1, {"nothing to extract in 1 lines"});
    CHECK_FALSE(fs::exists(out));
  }
  // Answers that --on-length drops, every one.
  check_fails(extract(unlabelled, {"--regenerate", "--max-new-tokens", "1", "--on-length", "drop"}), 1, {"nothing to extract", "1 answers cut by --max-new-tokens"});
  CHECK_FALSE(fs::exists(out / "manifest.json"));
  CHECK_FALSE(fs::exists(out / "shard-00000.dss"));
  // A store that is there stays as it was.
  require_ok(dspark_run({"extract", "--target", b.target, "--data", b.rows, "--out", out, "--taps", "1,2"}));
  const std::string manifest = file_bytes(out / "manifest.json");
  check_fails(extract(masked), 1, {"nothing to extract"});
  CHECK(file_bytes(out / "manifest.json") == manifest);
}

TEST_CASE("train takes a damaged store never, an unfinished one with a word", "[cli][fault]") {
  const Bench b;
  const auto store = b.make_store(), copy = b.at("copy"), out = b.at("out");
  const std::string shard = file_bytes(store / "shard-00000.dss"), manifest = file_bytes(store / "manifest.json");
  auto train = [&](const std::string& bytes, bool finished) {
    fs::remove_all(copy), fs::remove_all(out);
    make_folder(copy);
    write_bytes(copy / "shard-00000.dss", bytes);
    if (finished) write_bytes(copy / "manifest.json", manifest);
    return dspark_run(b.train(copy, out, 2));
  };
  require_ok(train(shard, true));
  for (const size_t size : {shard.size() - 1, shard.size() * 2 / 3, shard.size() / 3}) {
    INFO("cut to " << size << " of " << shard.size());
    check_fails(train(shard.substr(0, size), true), 1, {"copy is damaged", "shard-00000.dss", "keeps what is whole"});
    CHECK_FALSE(fs::exists(out));
    const Ran ran = train(shard.substr(0, size), false);  // what a killed extract leaves
    INFO(ran.describe());
    CHECK(ran.code == 0);
    CHECK(ran.said("not finished"));
    CHECK(ran.said("all samples before it are whole"));
  }
  std::string flipped = shard;
  flipped[shard.size() / 2] = static_cast<char>(flipped[shard.size() / 2] ^ 4);
  check_fails(train(flipped, false), 1, {"copy is damaged"});
  check_fails(train(flipped, true), 1, {"copy"});
  std::string summary = manifest;
  summary[manifest.size() / 2] = static_cast<char>(summary[manifest.size() / 2] ^ 1);
  fs::remove_all(copy);
  fs::copy(store, copy, fs::copy_options::recursive);
  write_bytes(copy / "manifest.json", summary);
  check_fails(dspark_run(b.train(copy, out, 2)), 1, {"copy is damaged", "manifest.json"});
  // A merge that keeps nothing.
  check_fails(dspark_run({"extract", "--merge", [&] {
                            std::string none = shard;
                            for (size_t i = shard.find("DREC"); i != std::string::npos; i = shard.find("DREC", i + 1)) none[i + 80] = static_cast<char>(none[i + 80] ^ 1);
                            write_bytes(copy / "shard-00000.dss", none);
                            write_bytes(copy / "manifest.json", manifest);
                            return copy;
                          }(), "--out", b.at("merged")}),
              1, {"would be empty", "shard-00000.dss at"});
  CHECK_FALSE(fs::exists(b.at("merged") / "manifest.json"));
}

TEST_CASE("bench stops within a moment of being asked", "[cli]") {
  for (const std::vector<std::string>& what : {std::vector<std::string>{"gemm"}, {"step", "--shape", "small", "--steps", "100000"}, {"loss", "--steps", "100000"}, {"optimizer", "--steps", "100000"}})
    for (const int signal : {SIGTERM, SIGINT}) {
      const Scratch scratch;
      std::vector<std::string> a{"bench"};
      a.insert(a.end(), what.begin(), what.end());
      a.insert(a.end(), {"--json", scratch.folder / "out.json"});
      Process run(a);
      ::usleep(700000);
      const double start = now_s();
      run.kill(signal);
      const Ran ran = run.wait();
      INFO(what[0] << " " << now_s() - start << " s");
      check_fails(ran, 75, {"stopped on request", "no result"});
      CHECK(now_s() - start < 5);  // a product that has begun goes on to its end
      CHECK(files_below(scratch.folder).empty());
    }
}

TEST_CASE("a thread that cannot be started is an error with a way out", "[cli]") {
  check_fails(dspark_run({"bench", "gemm", "--threads", "512"}, {.no_threads = true}), 1, {"cannot start thread", "of 512", "--threads"});
}

TEST_CASE("a standard output that cannot be written fails the command", "[cli][fault]") {
  const Bench b;
  const auto drafter = b.make_drafter(b.make_store());
  for (const std::string to : {"/dev/full", "-"})
    for (const std::vector<std::string>& a :
         {std::vector<std::string>{"pack", drafter, "--inspect"}, {"pack", drafter, "--inspect", "--json", "-"}, {"extract", "--inspect", b.at("store")}, {"--version"}, {"train", "--help"}, {"train", "--print-config"}}) {
      INFO(to << " " << a[0]);
      check_fails(dspark_run(a, {.stdout_to = to}), 1, {"standard output"});
    }
  // Nothing to print, nothing to fail.
  CHECK(dspark_run({"pack", drafter, "--out", b.at("packed")}, {.stdout_to = "-"}).code == 0);
  CHECK(dspark_run({"extract", "--verify", b.at("store")}, {.stdout_to = "/dev/full"}).code == 0);
}

TEST_CASE("a --json file appears whole or not at all, and fails before the work", "[cli][fault]") {
  const Bench b;
  const auto store = b.make_store(), drafter = b.make_drafter(store), out = b.at("out"), json = b.at("result.json");
  // Where it cannot be: nothing else is made.
  fs::create_directory(b.at("folder"));
  for (const std::string& bad : {std::string(b.at("no") / "result.json"), std::string(b.at("folder"))}) {
    INFO(bad);
    check_fails(dspark_run(b.train(store, out, 2, {"--json", bad})), 1, {bad});
    check_fails(dspark_run(b.extract(out, {"--json", bad})), 1, {bad});
    check_fails(dspark_run({"pack", drafter, "--out", out, "--json", bad}), 1, {bad});
    CHECK_FALSE(fs::exists(out));
  }
  // A full disk: named, and what was there before stays.
  check_fails(dspark_run({"pack", drafter, "--inspect", "--json", json}, {.file_limit = 1500}), 1, {json, "File too large"});
  CHECK_FALSE(fs::exists(json));
  write_bytes(json, "before\n");
  check_fails(dspark_run({"pack", drafter, "--inspect", "--json", json}, {.file_limit = 1500}), 1, {json});
  check_fails(dspark_run({"pack", b.at("none"), "--inspect", "--json", json}), 1, {"none"});
  CHECK(file_bytes(json) == "before\n");
  require_ok(dspark_run({"pack", drafter, "--inspect", "--json", json}));
  CHECK(json_lines(file_bytes(json)).size() == 1);
  for (const auto& name : files_below(b.scratch.folder)) CHECK(name.find(".tmp") == std::string::npos);
  // A device is written, not replaced.
  require_ok(dspark_run({"pack", drafter, "--inspect", "--json", "/dev/null"}));
  CHECK(fs::is_character_file("/dev/null"));
  check_fails(dspark_run({"pack", drafter, "--inspect", "--json", "/dev/full"}), 1, {"/dev/full", "No space left"});
  // A run's lines are a stream; losing it does not lose the run, and is no success.
  const Ran ran = dspark_run(b.train(store, out, 3, {"--json", "/dev/full"}));
  check_fails(ran, 1, {"out is complete", "/dev/full", "history.jsonl"});
  CHECK(ran.said("training goes on"));
  CHECK(fs::exists(out / "model.safetensors"));
  // A run that fails before its first line leaves none.
  check_fails(dspark_run(b.train(store, out, 3, {"--lr", "1", "--json", b.at("new.json")})), 1, {"holds another run"});
  CHECK_FALSE(fs::exists(b.at("new.json")));
}

TEST_CASE("messages quote files without obeying them, and say where", "[cli]") {
  const Bench b;
  const auto loop = b.at("loop");
  fs::create_symlink(loop, loop);
  for (const std::vector<std::string>& a : {std::vector<std::string>{"pack", loop, "--inspect"}, {"extract", "--inspect", loop}, {"eval", "--target", loop, "--drafter", loop, "--prompt", "x"},
                                           {"extract", "--target", loop, "--data", b.rows, "--out", b.at("out")}}) {
    const Ran ran = dspark_run(a);
    check_fails(ran, 1, {loop, "Too many levels of symbolic links"});
    CHECK_FALSE(ran.said("filesystem error"));
  }
  TinyTarget strange;
  strange.architecture = "ll\x1b[31mama\x07";
  write_tiny_target(b.at("esc.gguf"), strange);
  const Ran ran = dspark_run({"extract", "--target", b.at("esc.gguf"), "--data", b.rows, "--out", b.at("out"), "--taps", "1"});
  check_fails(ran, 1, {"esc.gguf", "ll\\x1b[31mama\\x07"});
  CHECK_FALSE(ran.said("\x1b"));
  // The table of rows, and a drafter's own words.
  const Ran table = dspark_run({"extract", "--target", b.target, "--data", b.scratch.put("rows2.jsonl", tiny_rows(1, 4) + R"({"messages": [{"role": "wiz\u001b[2Jard", "content": "b"}, {"role": "assistant", "content": "c"}]})" "\n"), "--out", b.at("out"), "--taps", "1"});
  INFO(table.describe());
  CHECK(table.code == 0);
  CHECK(table.said("wiz\\x1b[2Jard"));
  CHECK_FALSE(table.said("\x1b"));
  const auto drafter = b.make_drafter(b.make_store());
  const Ran inspected = dspark_run({"pack", edited(b, drafter, [](OrderedJson& c) { c["speculators_config"]["verifier"]["name_or_path"] = "my\x1b]0;target"; }), "--inspect"});
  CHECK(inspected.code == 0);
  CHECK(inspected.out.find("my\\x1b]0;target") != std::string::npos);
  CHECK(inspected.out.find('\x1b') == std::string::npos);
  // States and logits that are not finite are said with their row, and their target.
  write_tiny_target(b.at("huge.gguf"), {.spoilt = "blk.3.attn_norm.weight", .spoiling = 3e38});
  const std::vector<std::string> huge{"extract", "--target", b.at("huge.gguf"), "--data", b.rows, "--taps", "1,2", "--out", b.at("huge")};
  check_fails(dspark_run(huge), 1, {"rows.jsonl:1: the target's state of token"});
  auto answers = huge;
  answers.push_back("--regenerate");
  check_fails(dspark_run(answers), 1, {"huge.gguf: the logits after a prompt of", "not finite"});
}
