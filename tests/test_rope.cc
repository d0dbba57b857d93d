// The drafter's rotary embeddings: every variant against the reference's numbers, what is trained when a config asks to rotate a
// part of the head, rows and decodes longer than the drafter's positions, Llama 3's scaling out of a GGUF file.
#include <catch2/catch.hpp>

#include <cmath>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "formats/hf_config.h"
#include "golden_train.h"
#include "model/rope.h"
#include "scratch.h"
#include "spec_models.h"
#include "train/init.h"

using namespace dspark;
using namespace dspark::golden;
using namespace dspark::model;
using Catch::Contains;
using formats::RopeConfig;
using formats::Rotary;

namespace {

struct Tolerance {
  BackendOptions options;
  double outputs;
  const char* label;
};
// The fixtures' README.
std::vector<Tolerance> precisions() {
  BackendOptions ref, cpu;
  ref.device = "ref", ref.precision = Precision::fp64;
  cpu.device = "cpu", cpu.precision = Precision::fp32;
  return {{ref, 1e-11, "ref fp64"}, {cpu, 5e-6, "cpu fp32"}};
}

}  // namespace

TEST_CASE("every rotary variant turns heads as the public trainers do", "[golden][train][rope]") {
  int compared = 0, refused = 0;
  for (const Case& c : cases("drafter_rope")) {
    const Json d = description(c);
    const formats::SafetensorsFile file(c.folder / "tensors.safetensors");
    for (const auto& [name, variant] : d.at("variants").items()) {
      INFO(c.name << " " << name);
      Json with = d;
      with["config"]["rope_parameters"] = variant.at("rope_parameters");
      with["config"]["max_position_embeddings"] = variant.value("max_position_embeddings", 4096);
      if (variant.contains("fails_in_reference")) {
        CHECK_THROWS_WITH(drafter_config(with), Contains("the reference trainers cannot train this") && Contains("--rotary served"));
        ++refused;
        continue;
      }
      for (const Tolerance& tol : precisions()) {
        Report report(fmt::format("drafter_rope {}", tol.label), c.name + "/" + name);
        Harness h(tol.options, with, file);
        const auto packed = pack_case(file, "in.", h.config, h.objective);
        const BatchPlan& plan = packed->batch.plan;
        const RopeTable table = make_rope_table(h.config.rope, h.config.head_dim, h.config.max_position);
        report.check("inv_freq", relative_2norm(plan.inv_freq.empty() ? table.inv_freq : plan.inv_freq, values(file, "out." + name + ".inv_freq")), 1e-11);
        report.check("attention scaling", relative_2norm({table.scale}, {variant.at("attention_scaling").get<double>()}), 1e-11);
        const train::StepMetrics m = h.step->run(packed->batch, false, Write::overwrite);
        const auto want = values(file, "out." + name + ".hidden");
        std::vector<double> rows;
        const int64_t block = h.config.block, cols = h.config.hidden;
        for (const int64_t a : packed->anchor_slots) rows.insert(rows.end(), want.begin() + a * block * cols, want.begin() + (a + 1) * block * cols);
        report.check("hidden", relative_2norm(h.download(h.step->state().hidden), rows), tol.outputs);
        double loss = 0;
        for (int t = 0; t < kNumTerms; ++t) loss += h.objective.coef[static_cast<size_t>(t)] * m.term_sum[static_cast<size_t>(t)] * h.objective.scale(t, plan);
        report.check("loss", relative_2norm({loss}, {variant.at("loss").get<double>()}), tol.outputs);
        ++compared;
      }
    }
  }
  CHECK(compared >= 20);
  CHECK(refused >= 1);
}

TEST_CASE("a partial factor is kept where servers obey it and dropped where the trainers ignore it", "[rope]") {
  const RopeConfig part{.type = "default", .theta = 1e7, .partial_rotary_factor = 0.25}, stretched{.type = "linear", .factor = 2, .partial_rotary_factor = 0.5};
  const RopeConfig proportional{.type = "proportional", .partial_rotary_factor = 0.5};
  CHECK(trained_rope(part, Rotary::served) == part);
  CHECK(trained_rope(stretched, Rotary::served) == stretched);
  CHECK(trained_rope(part, Rotary::reference) == RopeConfig{.type = "default", .theta = 1e7});
  CHECK_THROWS_WITH(trained_rope(stretched, Rotary::reference), Contains("linear") && Contains("0.5"));
  for (const Rotary r : {Rotary::served, Rotary::reference}) CHECK(trained_rope(proportional, r) == proportional);
  CHECK_THROWS_WITH(make_rope_table({.partial_rotary_factor = 0.1}, 16, 512), Contains("1 of 16 channels"));
}

// Exponents over the rotated part for a partial factor, over the head for `proportional`.
TEST_CASE("partial and proportional rotation differ in their frequencies", "[rope]") {
  const RopeTable part = make_rope_table({.theta = 1e4, .partial_rotary_factor = 0.25}, 256, 512);
  REQUIRE(part.rot == 64);
  for (size_t i = 0; i < 32; ++i) CHECK(part.inv_freq[i] == std::pow(1e4, -2.0 * static_cast<double>(i) / 64));
  const RopeTable all = make_rope_table({.type = "proportional", .theta = 1e4, .partial_rotary_factor = 0.25}, 256, 512);
  REQUIRE(all.rot == 256);
  for (size_t i = 0; i < 128; ++i) CHECK(all.inv_freq[i] == (i < 32 ? std::pow(1e4, -2.0 * static_cast<double>(i) / 256) : 0.0));
}

// What a row of this length turns by, the first round of a decode must turn by too: with a base that gives the same frequencies
// a drafter of the default type proposes the same.
TEST_CASE("a decode longer than the drafter's positions follows dynamic rope", "[rope][spec]") {
  const auto accepted = [](const RopeConfig& rope, int64_t max_position, int64_t n) {
    test::SpecModel m;
    m.markov = false, m.block = 6;
    m.rope = rope, m.max_position = max_position;
    test::SpecRun run(m, Precision::fp32);
    std::vector<int64_t> lengths;
    for (uint64_t number = 0; number < 24; ++number) {
      const Rng rng(6, RngStream::test, number);
      std::vector<int32_t> prompt;
      for (int64_t i = 0; i < n; ++i) prompt.push_back(static_cast<int32_t>(rng.below(static_cast<uint64_t>(i), static_cast<uint64_t>(m.vocab - 1))));
      spec::DecodeOptions o;
      o.sampling.temperature = 0;
      o.max_new_tokens = 7;
      lengths.push_back(run.decoder->speculative(prompt, o).rounds.front().accepted);
    }
    return lengths;
  };
  constexpr int64_t kPrompt = 40, kBlock = 6, kMax = 8;
  const RopeConfig dynamic{.type = "dynamic", .theta = 100, .factor = 4};
  const double hd = test::SpecRun::kHeadDim, length = kPrompt + kBlock;
  const RopeConfig same{.theta = 100 * std::pow(4 * length / kMax - 3, hd / (hd - 2))}, plain{.theta = 100};
  const auto got = accepted(dynamic, kMax, kPrompt);
  CHECK(got == accepted(same, 512, kPrompt));
  CHECK(got != accepted(plain, 512, kPrompt));
  // Within its positions it is the plain one.
  CHECK(accepted(dynamic, 512, kPrompt) == accepted(plain, 512, kPrompt));
}

TEST_CASE("Llama 3's scaling is found in the divisors that GGUF files keep", "[rope]") {
  const auto divisors = [](const RopeConfig& c, int64_t head_dim) {
    RopeConfig plain{.theta = c.theta};
    const RopeTable a = make_rope_table(plain, head_dim, 131072), b = make_rope_table(c, head_dim, 131072);
    std::vector<double> out;
    for (size_t i = 0; i < a.inv_freq.size(); ++i) out.push_back(static_cast<float>(a.inv_freq[i] / b.inv_freq[i]));
    return out;
  };
  const RopeConfig llama31{.type = "llama3", .theta = 5e5, .factor = 8, .original_max_position = 8192};
  const RopeConfig llama32{.type = "llama3", .theta = 5e5, .factor = 32, .original_max_position = 8192};
  const RopeConfig other{.type = "llama3", .theta = 1e4, .factor = 16, .original_max_position = 3000, .low_freq_factor = 1, .high_freq_factor = 6.5};
  for (const RopeConfig& c : {llama31, llama32, other}) CHECK(rope_from_divisors({.theta = c.theta}, divisors(c, 128), 128, 131072) == c);
  CHECK(rope_from_divisors({.theta = 1e4}, std::vector<double>(64, 1.0), 128, 131072) == RopeConfig{.theta = 1e4});
  // Only original : low : high can be known.
  const RopeConfig scaled{.type = "llama3", .theta = 1e4, .factor = 8, .original_max_position = 6000, .low_freq_factor = 2, .high_freq_factor = 8};
  const auto found = rope_from_divisors({.theta = 1e4}, divisors(scaled, 128), 128, 131072);
  REQUIRE(found);
  CHECK(found->original_max_position == 3000);
  // No llama3 has these.
  std::vector<double> longrope(64, 1.0);
  for (size_t i = 0; i < 64; ++i) longrope[i] = 1 + 0.1 * static_cast<double>(i);
  CHECK_FALSE(rope_from_divisors({.theta = 1e4}, longrope, 128, 131072));
  CHECK_FALSE(rope_from_divisors({.theta = 1e4}, std::vector<double>(32, 1.0), 128, 131072));
}

TEST_CASE("a new drafter has its target's rope, from a folder and from a GGUF file", "[rope][golden]") {
  const fs::path root = fs::path(DSPARK_SOURCE_DIR) / "tests/golden/target";
  const auto drafter_of = [](const fs::path& target) {
    train::NewDrafter choice;
    choice.mask_token = 0;
    return train::drafter_config_for(target::TargetFiles(target), choice, {{1}}, 0);
  };
  for (const char* name : {"llama_q4_1", "qwen2_q5_0", "qwen3_bf16"}) {
    INFO(name);
    const Json made_from = read_json(root / "tiny_gguf" / name / "case.json").at("config");
    const RopeConfig hf = formats::rope_from_hf(made_from, name);
    const DrafterConfig c = drafter_of(root / "tiny_gguf" / name / "model.gguf");
    CHECK(c.rope.type == hf.type);
    CHECK(c.rope.theta == hf.theta);
    CHECK(c.rotary == Rotary::served);
    CHECK(c.max_position == made_from.at("max_position_embeddings"));
    const RopeTable got = make_rope_table(c.rope, c.head_dim, c.max_position), want = make_rope_table(hf, c.head_dim, c.max_position);
    REQUIRE(got.inv_freq.size() == want.inv_freq.size());
    for (size_t i = 0; i < got.inv_freq.size(); ++i) CHECK(got.inv_freq[i] == Approx(want.inv_freq[i]).epsilon(1e-6));  // fp32 divisors
  }
  for (const char* name : {"llama_gqa_llama3_untied_sharded", "llama_bias_linear_rope", "qwen3_yarn_bf16", "qwen3_tied"}) {
    INFO(name);
    Scratch scratch;
    fs::copy(root / "tiny" / name, scratch.folder, fs::copy_options::recursive);
    fs::copy_file(root / "tokenizer_small_qwen2/tokenizer.json", scratch.folder / "tokenizer.json");
    const Json config = read_json(scratch.folder / "config.json");
    RopeConfig hf = formats::rope_from_hf(config, name);
    if (hf.type == "yarn" && hf.original_max_position == 0) hf.original_max_position = config.at("max_position_embeddings");
    CHECK(drafter_of(scratch.folder).rope == hf);
    // A partial factor, which the native forward refuses, reaches the drafter: as it is, or not at all.
    Json part = config;
    part["partial_rotary_factor"] = 0.5;
    write_text_atomic(scratch.folder / "config.json", part.dump());
    hf.partial_rotary_factor = 0.5;
    CHECK(drafter_of(scratch.folder).rope == hf);
    train::NewDrafter reference;
    reference.mask_token = 0, reference.rotary = Rotary::reference;
    const target::TargetFiles files(scratch.folder);
    if (hf.type != "default") {
      CHECK_THROWS_WITH(train::drafter_config_for(files, reference, {{1}}, 0), Contains(hf.type) && Contains("--rotary served"));
      continue;
    }
    const DrafterConfig full = train::drafter_config_for(files, reference, {{1}}, 0);
    CHECK(full.rope.partial_rotary_factor == 1);
    CHECK(full.rotary == Rotary::reference);
  }
}
