#include <catch2/catch.hpp>

#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/json.h"
#include "formats/hf_config.h"
#include "scratch.h"

using namespace dspark;
using namespace dspark::formats;
using Catch::Contains;

namespace {

const fs::path kGolden = DSPARK_SOURCE_DIR "/tests/golden/target";

Json llama() { return read_json(kGolden / "tiny/llama_gqa_llama3_untied_sharded/config.json"); }
Json qwen2() { return read_json(kGolden / "tiny/qwen2_sliding_bf16/config.json"); }

TargetConfig read(const Scratch& scratch, const Json& json) {
  return target_config_from_hf(scratch.put("config.json", json.dump()));
}

// A GGUF `llama` file with one small tensor, its metadata changed by `edit`.
template <typename Edit>
fs::path gguf_with(const Scratch& scratch, Edit edit) {
  const fs::path path = scratch.folder / "x.gguf";
  GgufWriter w(path);
  w.set_string("general.architecture", "llama");
  w.set_u32("llama.embedding_length", 32);
  w.set_u32("llama.block_count", 2);
  w.set_u32("llama.attention.head_count", 4);
  w.set_u32("llama.feed_forward_length", 48);
  w.set_u32("llama.context_length", 100);
  w.set_f32("llama.attention.layer_norm_rms_epsilon", 1e-5f);
  w.add_tensor("token_embd.weight", GgmlType::F32, {5, 32});
  const std::vector<float> extra = edit(w);
  w.begin();
  const std::vector<float> embedding(5 * 32);
  w.write("token_embd.weight", std::as_bytes(std::span(embedding)));
  if (!extra.empty()) w.write("rope_freqs.weight", std::as_bytes(std::span(extra)));
  w.finish();
  return path;
}

}  // namespace

TEST_CASE("tiny Hugging Face configs read as transformers wrote them", "[hf_config][golden]") {
  struct Row {
    const char* name;
    Architecture architecture;
    bool tied, qkv_bias, o_bias, mlp_bias, qk_norm;
    const char* rope;
    double theta;
    int64_t heads, kv_heads, head_dim;
    std::vector<int64_t> windows;
  };
  const Row rows[] = {
      {"llama_bias_linear_rope",
       Architecture::llama,
       false,
       true,
       true,
       true,
       false,
       "linear",
       1e4,
       3,
       1,
       16,
       {0, 0, 0}},
      {"llama_gqa_llama3_untied_sharded",
       Architecture::llama,
       false,
       false,
       false,
       false,
       false,
       "llama3",
       5e5,
       6,
       2,
       16,
       {0, 0, 0}},
      {"llama_tied_bf16", Architecture::llama, true, false, false, false, false, "default", 1e4, 4, 4, 16, {0, 0, 0}},
      {"qwen2_bias", Architecture::qwen2, true, true, false, false, false, "default", 1e6, 6, 2, 8, {0, 0, 0}},
      {"qwen2_sliding_bf16",
       Architecture::qwen2,
       false,
       true,
       false,
       false,
       false,
       "default",
       1e4,
       6,
       2,
       8,
       {0, 0, 9, 9}},
      {"qwen3_tied", Architecture::qwen3, true, false, false, false, true, "default", 1e6, 6, 2, 12, {0, 0, 0}},
      {"qwen3_yarn_bf16", Architecture::qwen3, false, false, false, false, true, "yarn", 1e4, 6, 2, 16, {0, 0, 0}},
  };
  for (const Row& r : rows) {
    INFO(r.name);
    const TargetConfig c = read_target_config(kGolden / "tiny" / r.name);
    CHECK(c.architecture == r.architecture);
    CHECK(c.tied == r.tied);
    CHECK(c.qkv_bias == r.qkv_bias);
    CHECK(c.o_bias == r.o_bias);
    CHECK(c.mlp_bias == r.mlp_bias);
    CHECK(c.qk_norm == r.qk_norm);
    CHECK(c.rope.type == r.rope);
    CHECK(c.rope.theta == r.theta);
    CHECK(c.heads == r.heads);
    CHECK(c.kv_heads == r.kv_heads);
    CHECK(c.head_dim == r.head_dim);
    CHECK(c.windows == r.windows);
    CHECK(c.layers == static_cast<int64_t>(r.windows.size()));
    CHECK(c.vocab == 80);
    CHECK(c.ffn == 64);
    CHECK(c.bos_token == 1);
    CHECK(c.eos_tokens == std::vector<int64_t>{2});
    CHECK_FALSE(c.interleaved_qk);
  }
  const TargetConfig c = read_target_config(kGolden / "tiny/llama_gqa_llama3_untied_sharded");
  CHECK(c.rope == RopeConfig{.type = "llama3", .theta = 5e5, .factor = 8, .original_max_position = 64});
  CHECK(c.eps == 1e-5);
}

TEST_CASE("architectures that are not supported are refused by name", "[hf_config]") {
  const char* refused[][2] = {{"deepseek_v3_mla", "deepseek_v3"},
                              {"gemma2", "gemma2"},
                              {"gpt_oss", "gpt_oss"},
                              {"phi3_fused_partial", "phi3"},
                              {"qwen3_moe", "qwen3_moe"}};
  for (const auto& [name, type] : refused)
    CHECK_THROWS_WITH(read_target_config(kGolden / "tiny" / name),
                      Contains(std::string("'") + type + "'") && Contains("qwen2, qwen3"));
}

TEST_CASE("transformers 4 and 5 spellings give one config and one hash", "[hf_config]") {
  Scratch scratch;
  const Json v5 = llama();
  Json v4 = v5;
  v4["rope_scaling"] = v5["rope_parameters"];
  v4["rope_scaling"].erase("rope_theta");
  v4["rope_theta"] = 500000.0;
  v4.erase("rope_parameters");
  const TargetConfig a = read(scratch, v5), b = read(scratch, v4);
  CHECK(a.rope == b.rope);
  CHECK(config_hash(a) == config_hash(b));
  CHECK(config_hash(a).size() == 64);

  v4["rope_scaling"]["type"] = v4["rope_scaling"]["rope_type"];
  v4["rope_scaling"].erase("rope_type");
  CHECK(read(scratch, v4).rope == a.rope);
  Json both = v5;
  both["rope_theta"] = 500000.0;
  CHECK(read(scratch, both).rope == a.rope);
  both["rope_theta"] = 10000.0;
  CHECK_THROWS_WITH(read(scratch, both), Contains("rope_theta is 10000") && Contains("500000"));
  Json plain = v4;
  plain["rope_scaling"] = nullptr;
  CHECK(read(scratch, plain).rope == RopeConfig{.theta = 5e5});

  const Json back = rope_to_hf(a.rope);
  CHECK(rope_from_hf({{"rope_parameters", back}}, "test") == a.rope);
  const RopeConfig yarn{.type = "yarn",
                        .theta = 1e6,
                        .factor = 4,
                        .original_max_position = 32,
                        .beta_fast = 16,
                        .beta_slow = 2,
                        .attention_factor = 1.5,
                        .mscale = 0.5,
                        .mscale_all_dim = 0.25,
                        .truncate = false};
  CHECK(rope_from_hf({{"rope_parameters", Json(rope_to_hf(yarn))}}, "test") == yarn);
}

TEST_CASE("the config hash follows what changes the states and nothing else", "[hf_config]") {
  Scratch scratch;
  const std::string hash = config_hash(read(scratch, llama()));
  const auto with = [&](const char* key, Json value) {
    Json j = llama();
    j[key] = std::move(value);
    return config_hash(read(scratch, j));
  };
  CHECK(with("transformers_version", "4.0") == hash);
  CHECK(with("eos_token_id", {3, 4}) == hash);
  CHECK(with("rms_norm_eps", 1e-5 + 1e-14) == hash);  // one fp32 value
  CHECK(with("rms_norm_eps", 1e-6) != hash);
  CHECK(with("intermediate_size", 65) != hash);
  CHECK(with("tie_word_embeddings", true) != hash);
  CHECK(with("attention_bias", true) != hash);
}

TEST_CASE("qwen windows follow the switch, the list and max_window_layers", "[hf_config]") {
  Scratch scratch;
  Json j = qwen2();
  j.erase("layer_types");
  j["max_window_layers"] = 3;
  CHECK(read(scratch, j).windows == std::vector<int64_t>{0, 0, 0, 9});
  j["use_sliding_window"] = false;
  CHECK(read(scratch, j).windows == std::vector<int64_t>{0, 0, 0, 0});
  j = qwen2();
  j["use_sliding_window"] = false;
  CHECK_THROWS_WITH(read(scratch, j), Contains("layer 2 is sliding but no window is switched on"));
}

TEST_CASE("end-of-text tokens come from both config files", "[hf_config]") {
  Scratch scratch;
  scratch.put("generation_config.json", R"({"eos_token_id": [7, 2, 5]})");
  CHECK(read(scratch, llama()).eos_tokens == std::vector<int64_t>{2, 5, 7});
}

TEST_CASE("wrong config values are refused by field", "[hf_config]") {
  Scratch scratch;
  const auto refuse = [&](const char* key, Json value, const std::string& message) {
    Json j = llama();
    j[key] = std::move(value);
    CHECK_THROWS_WITH(read(scratch, j), Contains("config.json") && Contains(message));
  };
  refuse("hidden_size", nullptr, "'hidden_size' is missing");
  refuse("hidden_size", "48", "'hidden_size' is \"48\", expected an integer");
  refuse("hidden_size", 48.5, "expected an integer");
  refuse("hidden_size", -48, "the hidden size is -48");
  refuse("num_hidden_layers", 1ull << 63, "expected an integer");
  refuse("num_hidden_layers", 1ll << 40, "1099511627776 layers");
  refuse("num_attention_heads", 0, "0 heads");
  refuse("num_key_value_heads", 4, "6 heads do not share 4");
  refuse("head_dim", 15, "head size 15 is odd");
  refuse("vocab_size", 1ll << 50, "the vocabulary");
  refuse("rms_norm_eps", 0, "'rms_norm_eps' is 0");
  refuse("tie_word_embeddings", 1, "expected true or false");
  refuse("hidden_act", "gelu", "'gelu' is not supported");
  refuse("architectures", {"LlamaForSequenceClassification"}, "expected LlamaForCausalLM");
  refuse("quantization_config", {{"quant_method", "fp8"}}, "quantised");
  refuse("partial_rotary_factor", 1.5, "expected 1e-06 to 1");
  refuse("eos_token_id", "x", "'eos_token_id' is \"x\"");
  refuse("rope_parameters", {{"rope_type", "longrope"}}, "'longrope' is not supported");
  refuse("rope_parameters", {{"rope_type", "linear"}}, "'factor' is missing");
  refuse("rope_parameters", {{"rope_type", "llama3"}, {"factor", 8.0}}, "'low_freq_factor' is missing");
  refuse("rope_parameters", {{"full_attention", {{"rope_theta", 1.0}}}}, "differ by layer type");
  refuse("rope_parameters", {{"rope_theta", -1.0}}, "'rope_theta' is -1");
  CHECK_THROWS_WITH(target_config_from_hf(scratch.put("config.json", "[1]")), Contains("expected a JSON object"));
  CHECK_THROWS_WITH(target_config_from_hf(scratch.put("config.json", "{")), Contains("not valid JSON"));
  fs::remove(scratch.folder / "config.json");
  CHECK_THROWS_WITH(read_target_config(scratch.folder), Contains("no config.json there"));
}

TEST_CASE("tiny GGUF files give the config they were made from", "[hf_config][gguf][golden]") {
  for (const char* name : {"llama_q4_1", "qwen2_q5_0", "qwen3_bf16"}) {
    INFO(name);
    const TargetConfig c = read_target_config(kGolden / "tiny_gguf" / name / "model.gguf");
    Scratch scratch;
    Json made_from = read_json(kGolden / "tiny_gguf" / name / "case.json").at("config");
    const TargetConfig hf = read(scratch, made_from);
    CHECK(c.interleaved_qk == (hf.architecture == Architecture::llama));
    if (hf.rope.type == "llama3") {
      // A GGUF file holds the resulting divisors instead: 1 for high frequencies, `factor` for low ones.
      CHECK(c.rope == RopeConfig{.theta = hf.rope.theta});
      REQUIRE(c.rope_divisors.size() == 8);
      CHECK(c.rope_divisors.front() == 1.0);
      CHECK(c.rope_divisors.back() == 8.0);
      made_from["rope_parameters"] = {{"rope_theta", hf.rope.theta}};
      TargetConfig same = read(scratch, made_from);
      same.rope_divisors = c.rope_divisors;
      CHECK(canonical_text(c) == canonical_text(same));
    } else {
      CHECK(canonical_text(c) == canonical_text(hf));
      CHECK(config_hash(c) == config_hash(hf));
    }
  }
  CHECK_THROWS_WITH(read_target_config(kGolden / "tiny_gguf/gemma3_q4_0/model.gguf"),
                    Contains("'gemma3' is not supported"));
}

TEST_CASE("GGUF metadata that the forward does not compute is refused by key", "[hf_config][gguf]") {
  Scratch scratch;
  using Floats = std::vector<float>;
  const TargetConfig plain = read_target_config(gguf_with(scratch, [](GgufWriter&) { return Floats(); }));
  CHECK(plain.tied);
  CHECK(plain.kv_heads == 4);
  CHECK(plain.head_dim == 8);
  CHECK(plain.vocab == 5);
  CHECK(plain.rope == RopeConfig{});
  CHECK(plain.bos_token == -1);
  const TargetConfig linear = read_target_config(gguf_with(scratch, [](GgufWriter& w) {
    w.set_f32("llama.rope.scale_linear", 4);
    return Floats();
  }));
  CHECK(linear.rope == RopeConfig{.type = "linear", .factor = 4});
  const auto refuse = [&](const std::string& message, auto edit) {
    const fs::path path = gguf_with(scratch, edit);
    CHECK_THROWS_WITH(read_target_config(path), Contains("x.gguf") && Contains(message));
  };
  refuse("mixtures of experts", [](GgufWriter& w) {
    w.set_u32("llama.expert_count", 8);
    return Floats();
  });
  refuse("'llama.rope.dimension_count' is 4", [](GgufWriter& w) {
    w.set_u32("llama.rope.dimension_count", 4);
    return Floats();
  });
  refuse("'llama.attention.value_length' is 4", [](GgufWriter& w) {
    w.set_u32("llama.attention.value_length", 4);
    return Floats();
  });
  refuse("'llama.vocab_size' is 6", [](GgufWriter& w) {
    w.set_u32("llama.vocab_size", 6);
    return Floats();
  });
  refuse("rope scaling 'longrope'", [](GgufWriter& w) {
    w.set_string("llama.rope.scaling.type", "longrope");
    return Floats();
  });
  refuse("a sliding window", [](GgufWriter& w) {
    w.set_u32("llama.attention.sliding_window", 8);
    return Floats();
  });
  refuse("'llama.rope.freq_base' is 0", [](GgufWriter& w) {
    w.set_f32("llama.rope.freq_base", 0);
    return Floats();
  });
  refuse("'rope_freqs.weight' has 3 values", [](GgufWriter& w) {
    w.add_tensor("rope_freqs.weight", GgmlType::F32, {3});
    return Floats{1, 1, 1};
  });
  refuse("'rope_freqs.weight' holds 0", [](GgufWriter& w) {
    w.add_tensor("rope_freqs.weight", GgmlType::F32, {4});
    return Floats{1, 0, 1, 1};
  });
}
