// Faults that people reported against other trainers, in what files keep: how heads are turned, which tokens a drafter proposes,
// what a checkpoint holds. What is trained is in test_cases.cc.
#include <algorithm>
#include <cmath>
#include <functional>
#include <nlohmann/json.hpp>

#include "cli_bench.h"
#include "core/error.h"
#include "core/files.h"
#include "core/rng.h"
#include "formats/hf_config.h"
#include "formats/store.h"
#include "model/backends.h"
#include "model/drafter_files.h"
#include "train/init.h"

using namespace dspark;
using namespace dspark::model;
using formats::RopeConfig;
using formats::Rotary;

namespace {

Json inspected(const fs::path& drafter) {
  const Ran ran = dspark_run({"pack", drafter, "--inspect", "--json", "-"});
  require_ok(ran);
  return Json::parse(ran.out);
}

void edit_config(const fs::path& drafter, const std::function<void(Json&)>& edit) {
  Json config = read_json(drafter / "config.json");
  edit(config);
  write_bytes(drafter / "config.json", config.dump());
}

std::vector<fs::path> checkpoints(const fs::path& run) {
  std::vector<fs::path> out;
  for (const auto& entry : fs::directory_iterator(run / "checkpoints")) out.push_back(entry.path());
  std::sort(out.begin(), out.end());
  return out;
}

// A folder's tensors without those named.
void drop_tensors(const fs::path& drafter, const std::vector<std::string>& names) {
  const fs::path path = drafter / "model.safetensors";
  const fs::path whole = drafter / "whole.safetensors";
  fs::rename(path, whole);
  {
    const formats::SafetensorsFile file(whole);
    std::vector<formats::TensorView> kept;
    for (const auto& t : file.tensors())
      if (std::find(names.begin(), names.end(), t.name) == names.end()) kept.push_back(t);
    formats::write_safetensors(path, kept);
  }
  fs::remove(whole);
}

// Keys of one raw row at two positions: what a layer does to a head, channel by channel.
struct Turned {
  std::vector<double> at_zero, at_position;
};
Turned turned_keys(const DrafterConfig& config, int32_t position) {
  const auto backend = make_backend({.device = "ref", .precision = Precision::fp64});
  Context& ctx = backend->context();
  Drafter drafter(ctx, config, DrafterOptions{.trainable = false});
  for (Parameter& p : drafter.parameters()) {
    const std::vector<float> v(static_cast<size_t>(p.value.size()), 1.0f);
    drafter.set(p, {v.data(), DType::f32, p.value.rows, p.value.cols, p.value.cols});
  }
  const int64_t kv = config.kv_cols();
  std::vector<double> raw(static_cast<size_t>(2 * kv));
  const Rng rng(9, RngStream::test);
  for (size_t i = 0; i < raw.size(); ++i) raw[i] = rng.normal(i);
  Arena arena(ctx.device(), int64_t{1} << 20);
  const Tensor kv_raw = arena.matrix(DType::f64, 1, 2 * kv), k = arena.matrix(DType::f64, 1, kv), at = arena.vector(DType::i32, 1);
  ctx.upload_now(kv_raw, {raw.data(), DType::f64, 1, 2 * kv, 2 * kv});
  const auto keys = [&](int32_t p) {
    ctx.upload_now(at, {&p, DType::i32, 1, 1, 1});
    drafter.context_keys(0, kv_raw, at, k, {}, {});
    std::vector<double> v(static_cast<size_t>(kv));
    ctx.download_now({v.data(), DType::f64, 1, kv, kv}, k);
    return v;
  };
  return {keys(0), keys(position)};
}

// The angle by which channels i and i + rot/2 turned, for i < rot/2; the rest must not have moved.
void check_turned(const DrafterConfig& config, int64_t rot, double theta) {
  constexpr int32_t kPosition = 11;
  const Turned t = turned_keys(config, kPosition);
  const int64_t half = rot / 2;
  double error = 0;
  for (int64_t i = 0; i < half; ++i) {
    const double angle = kPosition * std::pow(theta, -2.0 * static_cast<double>(i) / static_cast<double>(rot));
    const auto a = static_cast<size_t>(i), b = static_cast<size_t>(i + half);
    error = std::max(error, std::abs(t.at_position[a] - (t.at_zero[a] * std::cos(angle) - t.at_zero[b] * std::sin(angle))));
    error = std::max(error, std::abs(t.at_position[b] - (t.at_zero[b] * std::cos(angle) + t.at_zero[a] * std::sin(angle))));
  }
  CHECK(error < 1e-12);
  for (int64_t i = rot; i < config.head_dim; ++i) CHECK(t.at_position[static_cast<size_t>(i)] == t.at_zero[static_cast<size_t>(i)]);
}

// A store that says nothing of its target's config: what a server's states are.
fs::path server_store(const Bench& b, int64_t hidden, int64_t vocab) {
  formats::StoreIdentity id;
  id.target = "a server", id.taps = {1}, id.hidden_size = hidden, id.vocab_size = vocab;
  formats::StoreWriter writer(b.at("states"), id);
  const Rng rng(8, RngStream::test);
  uint64_t draws = 0;
  for (uint64_t s = 0; s < 8; ++s) {
    std::vector<int32_t> ids;
    std::vector<uint8_t> mask;
    for (int i = 0; i < 24; ++i) {
      ids.push_back(static_cast<int32_t>(rng.below(draws++, 200)));
      mask.push_back(i >= 4);
    }
    std::vector<bf16> states(ids.size() * static_cast<size_t>(2 * hidden));
    for (auto& v : states) v = to_bf16(static_cast<float>(rng.normal(draws++)));
    writer.append(formats::encode_record(writer.format(), {.id = s + 1, .token_ids = ids, .loss_mask = mask, .states = states.data(), .row_stride = 2 * hidden}));
  }
  writer.finish();
  return b.at("states");
}

}  // namespace

// speculators#613: head_dim 256, partial_rotary_factor 0.25. Training turned all 256 channels, vLLM the first 64: validation
// accuracy 0.87, served acceptance 1.04 of 15.
TEST_CASE("a part of the head is turned in training as it is when served", "[cases][cli]") {
  constexpr double kTheta = 1e7;
  const Bench b(1, 1, {.hidden = 256, .layers = 2, .heads = 1, .kv_heads = 1, .ffn = 64, .architecture = "qwen2", .rotated = 64, .rope_theta = kTheta});
  const auto store = server_store(b, 256, 259);
  const auto train = [&](const std::string& out, Bench::Arguments more) {
    more.insert(more.end(), {"--draft-vocab", "0", "--taps", "1", "--anchors", "4"});
    return dspark_run(b.train(store, b.at(out), 1, more));
  };
  // Natively such a target's states are not computed: whose would they be?
  check_fails(dspark_run(b.extract(b.at("native"), {"--taps", "1"})), 1, {"rotating a part of the head", "0.25"});
  CHECK(files_below(b.at("native")).empty());
  require_ok(train("served", {}));
  const DrafterConfig served = read_drafter(b.at("served")).config;
  CHECK(served.head_dim == 256);
  CHECK(served.rope == RopeConfig{.theta = kTheta, .partial_rotary_factor = 0.25});
  CHECK(served.rotary == Rotary::served);
  check_turned(served, 64, kTheta);
  // The public trainers' way, when it is asked for, and then the files do not ask a server for another one.
  for (const Bench::Arguments& more : {Bench::Arguments{"--rotary", "reference"}, Bench::Arguments{"--recipe", "speculators", "--window", "16"}}) {
    const std::string name = more.front().substr(2);
    require_ok(train(name, more));
    const DrafterConfig reference = read_drafter(b.at(name)).config;
    CHECK(reference.rope == RopeConfig{.theta = kTheta});
    CHECK(reference.rotary == Rotary::reference);
    CHECK(file_bytes(b.at(name) / "config.json").find("partial_rotary_factor") == std::string::npos);
    check_turned(reference, 256, kTheta);
  }
  // Through checkpoint, pack and load.
  for (const auto& checkpoint : checkpoints(b.at("served"))) CHECK(read_drafter(checkpoint).config.rope == served.rope);
  for (const std::string to : {"speculators", "deepspec"}) {
    require_ok(dspark_run({"pack", b.at("served"), "--to", to, "--target", b.target, "--out", b.at("packed-" + to)}));
    const DrafterConfig packed = read_drafter(b.at("packed-" + to)).config;
    CHECK(packed.rope == served.rope);
    CHECK(packed.rotary == Rotary::served);
    const Turned there = turned_keys(packed, 11), here = turned_keys(served, 11);
    CHECK(there.at_position == here.at_position);
  }
  CHECK(inspected(b.at("packed-speculators"))["rope_parameters"]["partial_rotary_factor"] == 0.25);

  // A drafter of whom nobody says how it was trained is not packed for a server that obeys the factor.
  edit_config(b.at("packed-deepspec"), [](Json& c) { c.erase("dspark_training"); });
  const auto pack = [&](const std::string& out, Bench::Arguments more) {
    more.insert(more.begin(), {"pack", b.at("packed-deepspec"), "--out", b.at(out)});
    return dspark_run(more);
  };
  check_fails(pack("unsaid", {}), 1, {"partial_rotary_factor 0.25", "64 of 256", "--rotary reference", "--rotary served"});
  CHECK_FALSE(fs::exists(b.at("unsaid")));
  CHECK(inspected(b.at("packed-deepspec"))["rotary"] == "unknown");
  require_ok(pack("was-full", {"--rotary", "reference"}));
  CHECK(read_drafter(b.at("was-full")).config.rope.partial_rotary_factor == 1);
  require_ok(pack("was-part", {"--rotary", "served"}));
  CHECK(read_drafter(b.at("was-part")).config.rope == served.rope);
  check_fails(dspark_run({"pack", b.at("was-part"), "--out", b.at("other"), "--rotary", "reference"}), 1, {"--rotary reference", "the other way"});
  check_fails(dspark_run({"pack", b.at("was-part"), "--out", b.at("other"), "--rotary", "both"}), 2, {"--rotary both"});
  // Nor is it gone on with before someone says it.
  check_fails(train("continued", {"--init", b.at("packed-deepspec")}), 1, {"--init", "partial_rotary_factor 0.25", "--rotary"});
  require_ok(train("continued", {"--init", b.at("packed-deepspec"), "--rotary", "served"}));
  CHECK(read_drafter(b.at("continued")).config.rope == served.rope);
}

// Where the drafter turns whole heads and its target their first part, a warm start puts every pair that the target turns where the
// drafter has its frequency.
TEST_CASE("a warm start gives heads the target's angles", "[cases]") {
  const Scratch scratch;
  const fs::path path = scratch.folder / "tiny.gguf";
  write_tiny_target(path, {.hidden = 64, .layers = 2, .heads = 2, .kv_heads = 1, .ffn = 32, .architecture = "qwen2", .rotated = 16, .rope_theta = 1e4});
  const target::TargetFiles files(path);
  const auto backend = make_backend({.device = "ref", .precision = Precision::fp64});
  for (const Rotary rotary : {Rotary::served, Rotary::reference}) {
    train::NewDrafter choice;
    choice.layers = 1, choice.rotary = rotary;
    const DrafterConfig config = train::drafter_config_for(files, choice, {{1}}, 0);
    Drafter drafter(backend->context(), config, DrafterOptions{});
    train::init_random(drafter, train::target_values(files, {}), 1);
    train::warm_start(drafter, files);
    const RopeTable own = make_rope_table(config.rope, 32, config.max_position), target = make_rope_table(files.config().rope, 32, 4096);
    const auto w = device_values(drafter)("layers.0.self_attn.q_proj.weight"), from = files.tensor("model.layers.1.self_attn.q_proj.weight");
    const auto row = [](const std::vector<float>& m, int64_t r) { return std::vector<float>(m.begin() + r * 64, m.begin() + (r + 1) * 64); };
    std::vector<std::vector<float>> all;
    for (int64_t h = 0; h < 2; ++h)
      for (int64_t i = 0; i < 8; ++i) {
        const int64_t j = rotary == Rotary::served ? i : 2 * i;
        CHECK(own.inv_freq[static_cast<size_t>(j)] == Approx(target.inv_freq[static_cast<size_t>(i)]).epsilon(1e-14));
        CHECK(row(w, h * 32 + j) == row(from, h * 32 + i));
        CHECK(row(w, h * 32 + j + own.rot / 2) == row(from, h * 32 + i + 8));
      }
    // No channel twice, none lost.
    for (int64_t r = 0; r < 64; ++r) all.push_back(row(w, r));
    std::vector<std::vector<float>> wanted;
    for (int64_t r = 0; r < 64; ++r) wanted.push_back(row(from, r));
    std::sort(all.begin(), all.end());
    std::sort(wanted.begin(), wanted.end());
    CHECK(all == wanted);
    CHECK((rotary == Rotary::served) == (w == from));
  }
}

// Automodel#2447: d2t and t2d were not in the checkpoint, acceptance collapsed after a save and a load.
TEST_CASE("the draft vocabulary is in every file of a drafter, and a file without it is refused", "[cases][cli]") {
  const Bench b;
  const auto store = b.make_store();
  require_ok(dspark_run(b.train(store, b.at("run"), 4, {"--save-every", "2", "--keep", "5"})));
  require_ok(dspark_run({"pack", b.at("run"), "--out", b.at("packed")}));
  std::vector<fs::path> folders = checkpoints(b.at("run"));
  CHECK(folders.size() == 2);
  folders.push_back(b.at("run")), folders.push_back(b.at("packed"));
  const auto kept = read_drafter(b.at("run")).kept;
  REQUIRE(kept.size() == 64);
  for (const auto& folder : folders) {
    INFO(folder.string());
    const formats::SafetensorsFile file(folder / "model.safetensors");
    const auto d2t = formats::read_i64(file.get("d2t", {64})), t2d = formats::read_i64(file.get("t2d", {259}));
    for (size_t i = 0; i < 64; ++i) {
      CHECK(d2t[i] + static_cast<int64_t>(i) == kept[i]);
      CHECK(t2d[static_cast<size_t>(kept[i])] == 1);
    }
    CHECK(std::count(t2d.begin(), t2d.end(), 1) == 64);
    // Everything else that a reader must find.
    for (const auto& spec : expected_tensors(read_drafter(folder).config))
      if (spec.name != "embed_tokens.weight") CHECK(file.find(spec.name) != nullptr);
  }
  drop_tensors(b.at("packed"), {"d2t", "t2d"});
  const Bench::Arguments readers[] = {{"pack", b.at("packed"), "--inspect"},
                                      {"pack", b.at("packed"), "--out", b.at("again")},
                                      {"eval", "--target", b.target, "--drafter", b.at("packed"), "--prompt", "x"},
                                      b.train(store, b.at("next"), 1, {"--init", b.at("packed")})};
  for (const auto& arguments : readers) check_fails(dspark_run(arguments), 1, {"packed", "64 of 259", "'d2t'", "'t2d'"});
}

// SpecForge#534: fine-tuning counted the new data's tokens and made a new d2t, while the rows of lm_head kept their old order.
TEST_CASE("a drafter that goes on keeps its draft vocabulary, whatever the new data counts", "[cases][cli]") {
  const Bench b;
  const auto store = b.make_store();
  require_ok(dspark_run(b.train(store, b.at("first"), 2)));
  const std::string line = R"({"messages": [{"role": "user", "content": "QRSTUVWXYZ 90"}, {"role": "assistant", "content": "ZYXWV UTSRQ {} 7 8 9 JKLMNOP !?%&"}]})";
  std::string rows;
  for (int i = 0; i < 10; ++i) rows += std::string(line).replace(line.find("{}"), 2, std::to_string(i)) + "\n";
  const auto other = b.at("other");
  require_ok(dspark_run(b.extract(other, {"--data", b.scratch.put("other.jsonl", rows)})));
  require_ok(dspark_run(b.train(other, b.at("new"), 2)));
  const auto kept = read_drafter(b.at("first")).kept;
  REQUIRE(read_drafter(b.at("new")).kept != kept);  // this data counts other tokens

  const Ran next = dspark_run(b.train(other, b.at("next"), 2, {"--init", b.at("first")}));
  require_ok(next);
  CHECK(next.said("its draft vocabulary of 64 tokens stays"));
  const DrafterFiles files = read_drafter(b.at("next"));
  CHECK(files.kept == kept);
  const auto head = formats::read_f32(files.tensors.get("lm_head.weight")), before = formats::read_f32(read_drafter(b.at("first")).tensors.get("lm_head.weight"));
  CHECK(head == before);  // row by row the same tokens
  // A resumed run is the same: nothing is counted again there either.
  for (const auto& checkpoint : checkpoints(b.at("next"))) CHECK(read_drafter(checkpoint).kept == kept);
  // Another size is another drafter.
  for (const char* size : {"32", "0", "65"})
    check_fails(dspark_run(b.train(other, b.at("size"), 2, {"--init", b.at("first"), "--draft-vocab", size})), 1, {"--draft-vocab", size, "64 of 259", "cannot change"});
  CHECK(files_below(b.at("size")).empty());
}

// Model-Optimizer#1621: the exported config had the base model's rope_theta (5e6), the drafter was trained with 1e6.
TEST_CASE("every rope field of a drafter survives, whatever its target's are", "[cases][cli]") {
  const Bench b(12, 12, {.rope_theta = 5e6});
  const auto store = b.make_store();
  require_ok(dspark_run(b.train(store, b.at("base"), 1, {"--draft-vocab", "0"})));
  CHECK(read_drafter(b.at("base")).config.rope == RopeConfig{.theta = 5e6});
  const std::vector<std::pair<std::string, RopeConfig>> ropes = {
      {"theta", {.theta = 1e6}},
      {"part", {.theta = 1e6, .partial_rotary_factor = 0.5}},
      {"linear", {.type = "linear", .theta = 123456.5, .factor = 2.5}},
      {"dynamic", {.type = "dynamic", .theta = 2e6, .factor = 3}},
      {"proportional", {.type = "proportional", .theta = 3e6, .factor = 2, .partial_rotary_factor = 0.5}},
      {"llama3", {.type = "llama3", .theta = 5e5, .factor = 7.5, .original_max_position = 1111, .low_freq_factor = 1.5, .high_freq_factor = 3.25}},
      {"yarn", {.type = "yarn", .theta = 77777, .factor = 3.5, .original_max_position = 999, .beta_fast = 24, .beta_slow = 2, .mscale = 0.7, .mscale_all_dim = 1.3, .truncate = false}},
      {"yarn_factor", {.type = "yarn", .theta = 1e6, .factor = 4, .original_max_position = 512, .attention_factor = 0.9}}};
  for (const auto& [name, rope] : ropes) {
    INFO(name);
    const fs::path start = b.at(name + "-start"), run = b.at(name + "-run");
    fs::copy(b.at("base"), start, fs::copy_options::recursive);
    const Json parameters = Json::parse(formats::rope_to_hf(rope).dump());
    edit_config(start, [&](Json& c) {
      Json& layers = c["transformer_layer_config"];
      layers["rope_parameters"] = parameters;
      layers["rope_theta"] = rope.theta;
      layers["max_position_embeddings"] = 777;
    });
    require_ok(dspark_run(b.train(store, run, 2, {"--init", start, "--draft-vocab", "0"})));
    std::vector<fs::path> folders = checkpoints(run);
    folders.push_back(run);
    for (const std::string to : {"speculators", "deepspec"}) {
      folders.push_back(b.at(name + "-" + to));
      require_ok(dspark_run({"pack", run, "--to", to, "--target", b.target, "--out", folders.back()}));
    }
    // And from a packed one back.
    folders.push_back(b.at(name + "-back"));
    require_ok(dspark_run({"pack", b.at(name + "-deepspec"), "--out", folders.back()}));
    for (const auto& folder : folders) {
      INFO(folder.string());
      const DrafterConfig c = read_drafter(folder).config;
      CHECK(c.rope == rope);
      CHECK(c.max_position == 777);
      CHECK(c.rotary == Rotary::served);
      const Json file = read_json(folder / "config.json"), layers = file.contains("transformer_layer_config") ? file["transformer_layer_config"] : file;
      CHECK(layers["rope_parameters"] == parameters);
      CHECK(layers["rope_theta"] == rope.theta);  // for transformers 4
      const Json seen = inspected(folder);
      CHECK(seen["rope_parameters"] == parameters);
      CHECK(seen["rope_theta"] == rope.theta);
      CHECK(seen["max_position"] == 777);
    }
  }
}

// speculators#899 and #411: optimizer states went through bf16, the step counter was lost, the loss jumped after a resume.
TEST_CASE("a resumed run goes on bit for bit, states in fp32 and steps counted", "[cases][cli]") {
  const Bench b(16, 12);
  const auto store = b.make_store();
  const std::vector<std::pair<std::string, Bench::Arguments>> runs = {
      {"adamw", {"--weight-decay", "0.1"}}, {"muon", {"--optimizer", "muon", "--markov", "gated"}}, {"own_width", {"--hidden", "48"}}};
  for (const auto& [name, more] : runs) {
    INFO(name);
    Bench::Arguments arguments = more;
    arguments.insert(arguments.end(), {"--save-every", "3", "--keep", "9"});
    const fs::path whole = b.at(name), cut = b.at(name + "-cut");
    require_ok(dspark_run(b.train(store, whole, 6, arguments)));
    fs::copy(whole, cut, fs::copy_options::recursive);
    for (const char* file : {"config.json", "model.safetensors"}) fs::remove(cut / file);
    fs::remove_all(cut / "checkpoints/step-00000006");
    const Ran rest = dspark_run(b.train(store, cut, 6, arguments));
    require_ok(rest);
    CHECK(rest.said("at step 3"));
    for (const char* file : {"config.json", "model.safetensors", "checkpoints/step-00000006/masters.safetensors", "checkpoints/step-00000006/optimizer.safetensors",
                             "checkpoints/step-00000006/model.safetensors"}) {
      INFO(file);
      CHECK(file_bytes(cut / file) == file_bytes(whole / file));
    }
    for (const int64_t step : {3, 6}) {
      const fs::path checkpoint = whole / fmt::format("checkpoints/step-{:08}", step);
      const Json state = read_json(checkpoint / "state.json");
      CHECK(state.at("step") == step);
      CHECK(state.at("optimizer_steps") == step);
      int64_t tensors = 0;
      for (const char* name_of : {"masters.safetensors", "optimizer.safetensors"}) {
        const formats::SafetensorsFile file(checkpoint / name_of);
        for (const auto& t : file.tensors()) {
          INFO(t.name);
          CHECK(t.dtype == DType::f32);
          ++tensors;
        }
      }
      CHECK(tensors > 20);
    }
    // The states are not bf16 numbers written wide.
    const formats::SafetensorsFile states(whole / "checkpoints/step-00000006/optimizer.safetensors");
    const auto m = formats::read_f32(states.get("m.fc.weight"));
    CHECK(std::any_of(m.begin(), m.end(), [](float v) { return to_float(to_bf16(v)) != v; }));
  }
}
