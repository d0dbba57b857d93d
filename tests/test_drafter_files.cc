#include <catch2/catch.hpp>

#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <tuple>

#include "core/error.h"
#include "golden.h"
#include "model/drafter_files.h"

using namespace dspark;
using namespace dspark::model;

namespace {

fs::path scratch(const char* name) {
  const fs::path p = fs::temp_directory_path() / fmt::format("dspark-test-{}-{}", name, ::getpid());
  fs::remove_all(p);
  make_folder(p);
  return p;
}

// The folders of the fixture, each with its format's name.
std::vector<fs::path> packed_folders() {
  std::vector<fs::path> out;
  for (const auto& c : golden::cases("drafter_files"))
    for (const auto& entry : fs::directory_iterator(c.folder))
      if (entry.is_directory() && entry.path().filename() != "tiny-target") out.push_back(entry.path());
  return out;
}

}  // namespace

TEST_CASE("drafters written by the public trainers are read in full", "[golden][pack]") {
  int n = 0;
  for (const auto& c : golden::cases("drafter_files")) {
    const Json expected = read_json(c.folder / "expected.json");
    for (const auto& folder : packed_folders()) {
      const DrafterFiles files = read_drafter(folder);
      INFO(folder.string());
      CHECK(files.config.vocab == 67);
      CHECK(files.config.n_layers() == 2);
      // Taps are counted one way inside, whatever the file's way: the fixture tapped layers after 1, 3 and 5.
      CHECK(files.config.taps == std::vector<TapLayer>{{1}, {3}, {5}});
      CHECK((files.config.draft_vocab < files.config.vocab) == !files.kept.empty());
      ++n;
    }
  }
  CHECK(n == 8);
}

TEST_CASE("a drafter folder round-trips bit by bit", "[golden][pack]") {
  const fs::path out = scratch("roundtrip");
  int n = 0;
  for (const auto& folder : packed_folders()) {
    const DrafterFiles files = read_drafter(folder);
    auto values = [&](const std::string& name) {
      const auto* view = files.tensors.find(name);
      // What the reference leaves to the target: any values will do for the round trip.
      if (!view) return std::vector<float>(static_cast<size_t>(files.config.vocab * files.config.hidden), 0.5f);
      return formats::read_f32(*view);
    };
    for (DrafterFormat format : {DrafterFormat::speculators, DrafterFormat::deepspec}) {
      if (format == DrafterFormat::deepspec && (!files.kept.empty() || !files.config.sample_from_anchor)) continue;
      const fs::path there = out / fmt::format("{}-{}", folder.filename().string(), format_name(format));
      WriteOptions options;
      options.format = format;
      write_drafter(there, files.config, files.kept, values, options);
      const DrafterFiles back = read_drafter(there);
      INFO(there.string());
      CHECK(back.format == format);
      CHECK(back.kept == files.kept);
      CHECK(back.config.taps == files.config.taps);
      CHECK(back.config.layers == files.config.layers);
      CHECK(back.config.markov == files.config.markov);
      CHECK(back.config.rope == files.config.rope);
      CHECK(back.config.sample_from_anchor == files.config.sample_from_anchor);
      for (const auto& spec : expected_tensors(files.config)) {
        const auto* a = files.tensors.find(spec.name);
        if (!a || a->dtype != DType::bf16) continue;
        const auto& b = back.tensors.get(spec.name);
        CHECK(std::equal(a->data.begin(), a->data.end(), b.data.begin(), b.data.end()));
        ++n;
      }
    }
  }
  CHECK(n > 100);
  fs::remove_all(out);
}

TEST_CASE("every field of a drafter's config survives its file", "[pack]") {
  DrafterConfig c;
  c.hidden = 48, c.target_hidden = 40, c.ffn = 56, c.heads = 6, c.kv_heads = 3, c.head_dim = 12, c.vocab = 70, c.draft_vocab = 30;
  c.layers = {LayerType::sliding, LayerType::full, LayerType::sliding};
  c.taps = {{2}, {5}, {6}, {9}};
  c.block = 6, c.rank = 10, c.markov = Markov::gated, c.confidence_with_markov = false, c.sample_from_anchor = false;
  c.window = 33, c.sliding_causal = false, c.window_by_anchor = true, c.attention_bias = true;
  c.eps = 3e-5, c.mask_token = 61, c.max_position = 1234;
  c.rope = {.type = "yarn", .theta = 54321, .factor = 3, .partial_rotary_factor = 0.5, .original_max_position = 400, .beta_fast = 20, .beta_slow = 3, .attention_factor = 1.25};
  c.rotary = formats::Rotary::served;
  c.target_name = "some/target", c.target_architectures = {"SomeForCausalLM"}, c.tokenizer_hash = "abc", c.trained_on = "Q4_1 with Q6_K";
  std::vector<int32_t> kept;
  for (int32_t i = 0; i < 30; ++i) kept.push_back(2 * i + 1);
  const fs::path out = scratch("fields");
  const auto zeros = [&](const DrafterConfig& config) {
    return [&config](const std::string& name) {
      for (const auto& spec : expected_tensors(config))
        if (spec.name == name) return std::vector<float>(static_cast<size_t>(formats::shape_count(spec.shape, name)), 0.0f);
      return std::vector<float>{};
    };
  };
  const auto same = [](const DrafterConfig& a, const DrafterConfig& b) {
    CHECK(std::tie(a.algorithm, a.hidden, a.target_hidden, a.ffn, a.heads, a.kv_heads, a.head_dim, a.vocab, a.draft_vocab, a.layers, a.taps, a.block, a.rank, a.markov) ==
          std::tie(b.algorithm, b.hidden, b.target_hidden, b.ffn, b.heads, b.kv_heads, b.head_dim, b.vocab, b.draft_vocab, b.layers, b.taps, b.block, b.rank, b.markov));
    CHECK(std::tie(a.confidence, a.confidence_with_markov, a.sample_from_anchor, a.window, a.sliding_causal, a.window_by_anchor, a.attention_bias, a.eps, a.mask_token, a.max_position) ==
          std::tie(b.confidence, b.confidence_with_markov, b.sample_from_anchor, b.window, b.sliding_causal, b.window_by_anchor, b.attention_bias, b.eps, b.mask_token, b.max_position));
    CHECK(a.rope == b.rope);
    CHECK(a.rotary == b.rotary);
    CHECK(std::tie(a.tokenizer_hash, a.trained_on) == std::tie(b.tokenizer_hash, b.trained_on));
  };
  write_drafter(out / "speculators", c, kept, zeros(c), {});
  const DrafterFiles back = read_drafter(out / "speculators");
  same(back.config, c);
  CHECK(back.kept == kept);
  CHECK(back.config.target_name == c.target_name);
  CHECK(back.config.target_architectures == c.target_architectures);
  // DeepSpec's, as far as it goes: one width, all tokens, the anchor layout.
  c.hidden = c.target_hidden, c.draft_vocab = c.vocab, c.sample_from_anchor = true;
  WriteOptions deepspec;
  deepspec.format = DrafterFormat::deepspec;
  write_drafter(out / "deepspec", c, {}, zeros(c), deepspec);
  same(read_drafter(out / "deepspec").config, c);
  fs::remove_all(out);
}

TEST_CASE("a missing tensor, a wrong shape and a wrong field are named", "[pack]") {
  const fs::path out = scratch("broken");
  const auto folders = packed_folders();
  const auto source = std::find_if(folders.begin(), folders.end(), [](const fs::path& p) { return p.filename() == "speculators090_dspark_pruned"; });
  REQUIRE(source != folders.end());
  const Json config = read_json(*source / "config.json");
  auto error_of = [&](const Json& changed, const std::string& without) {
    write_text_atomic(out / "config.json", changed.dump());
    const auto file = formats::SafetensorsFile(*source / "model.safetensors");
    std::vector<formats::TensorView> kept;
    for (const auto& t : file.tensors())
      if (t.name != without) kept.push_back(t);
    formats::write_safetensors(out / "model.safetensors", kept);
    try {
      read_drafter(out);
      return std::string("nothing was wrong");
    } catch (const Error& e) {
      return std::string(e.what());
    }
  };
  CHECK(error_of(config, "") == "nothing was wrong");
  CHECK(error_of(config, "d2t").find("d2t") != std::string::npos);
  CHECK(error_of(config, "lm_head.weight").find("lm_head.weight") != std::string::npos);
  CHECK(error_of(config, "layers.1.mlp.up_proj.weight").find("layers.1.mlp.up_proj.weight") != std::string::npos);
  Json wider = config;
  wider["transformer_layer_config"]["intermediate_size"] = 33;
  CHECK(error_of(wider, "").find("[32, 24]") != std::string::npos);
  Json untyped = config;
  untyped["block_size"] = "five";
  CHECK(error_of(untyped, "").find("block_size") != std::string::npos);
  Json taps = config;
  taps["aux_hidden_state_layer_ids"] = {1, 5, 3};
  CHECK(error_of(taps, "").find("ascend") != std::string::npos);
  CHECK_THROWS_WITH(read_drafter(out / "nothing"), Catch::Contains("no such drafter"));
  fs::remove_all(out);
}

TEST_CASE("automatic taps", "[pack]") {
  CHECK(auto_taps(36) == std::vector<TapLayer>{{2}, {10}, {18}, {26}, {34}});
  CHECK(auto_taps(30) == std::vector<TapLayer>{{2}, {9}, {15}, {22}, {28}});
}
