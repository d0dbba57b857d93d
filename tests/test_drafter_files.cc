#include <catch2/catch.hpp>

#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>

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
