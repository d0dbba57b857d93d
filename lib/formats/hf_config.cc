#include "formats/hf_config.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <set>

#include "core/hash.h"
#include "core/log.h"
#include "formats/json_fields.h"
#include "formats/safetensors.h"  // shape_text

namespace dspark::formats {
namespace {

struct Known {
  Architecture architecture;
  std::string_view name, hf_class;
};
constexpr std::array<Known, 3> kKnown = {{{Architecture::llama, "llama", "LlamaForCausalLM"},
                                          {Architecture::qwen2, "qwen2", "Qwen2ForCausalLM"},
                                          {Architecture::qwen3, "qwen3", "Qwen3ForCausalLM"}}};

const Known& known(Architecture a) { return kKnown.at(static_cast<size_t>(a)); }

Architecture architecture_from_name(std::string_view name, const std::string& where) {
  std::string supported;
  for (const Known& k : kKnown) {
    if (k.name == name) return k.architecture;
    supported += fmt::format("{}{}", supported.empty() ? "" : ", ", k.name);
  }
  fail("{}: the architecture '{}' is not supported ({} are)", where, printable(name, 80), supported);
}

constexpr double kMostEps = 0.1;  // of an RMS norm; more is no guard against a division by zero but another model

// Sizes that arithmetic elsewhere may multiply without looking.
void validate(const TargetConfig& c, const std::string& where) {
  const auto size = [&](const char* what, int64_t n, int64_t most) {
    DS_REQUIRE(n >= 1 && n <= most, "{}: {} is {}, expected 1 to {}", where, what, n, most);
  };
  size("the hidden size", c.hidden, 1 << 20);
  size("the number of layers", c.layers, 1 << 12);
  size("the number of heads", c.heads, 1 << 14);
  size("the number of key/value heads", c.kv_heads, c.heads);
  size("the head size", c.head_dim, 1 << 14);
  size("the FFN width", c.ffn, 1 << 24);
  size("the vocabulary", c.vocab, 1 << 28);
  size("the number of positions", c.max_position, INT32_MAX);
  DS_REQUIRE(c.heads % c.kv_heads == 0, "{}: {} heads do not share {} key/value heads evenly", where, c.heads,
             c.kv_heads);
  DS_REQUIRE(c.head_dim % 2 == 0, "{}: the head size {} is odd, rotary embeddings need pairs", where, c.head_dim);
  for (int64_t w : c.windows) DS_REQUIRE(w >= 0, "{}: the sliding window is {}", where, w);
}

// eos_token_id is a number or a list of them.
void add_eos(const JsonFields& f, std::set<int64_t>& eos) {
  const Json* v = f.find("eos_token_id");
  if (!v) return;
  for (const Json& id : v->is_array() ? *v : Json::array({*v})) {
    DS_REQUIRE(id.is_number_integer(), "{}: 'eos_token_id' is {}, expected integers", f.where(), JsonFields::shown(*v));
    eos.insert(id.get<int64_t>());
  }
}

// Qwen2 and Qwen3: windows only when switched on, for the layers that layer_types or max_window_layers says.
std::vector<int64_t> qwen_windows(const JsonFields& f, int64_t layers) {
  std::vector<int64_t> windows(static_cast<size_t>(layers), 0);
  const Json* types = f.find("layer_types");
  DS_REQUIRE(!types || (types->is_array() && types->size() == windows.size()),
             "{}: 'layer_types' is not a list of {} names", f.where(), layers);
  const auto window = f.boolean("use_sliding_window").value_or(false) ? f.integer("sliding_window") : std::nullopt;
  const int64_t first = f.integer("max_window_layers").value_or(28);
  for (size_t i = 0; i < windows.size(); ++i) {
    bool sliding = window && static_cast<int64_t>(i) >= first;
    if (types) {
      const Json& type = (*types)[i];
      DS_REQUIRE(type == "full_attention" || type == "sliding_attention",
                 "{}: layer_types[{}] is {}, expected full_attention or sliding_attention", f.where(), i,
                 JsonFields::shown(type));
      sliding = type == "sliding_attention";
      DS_REQUIRE(!sliding || window,
                 "{}: layer {} is sliding but no window is switched on (use_sliding_window, sliding_window)", f.where(),
                 i);
    }
    if (!sliding) continue;
    DS_REQUIRE(*window >= 1, "{}: 'sliding_window' is {}", f.where(), *window);
    windows[i] = *window;
  }
  return windows;
}

}  // namespace

std::string_view architecture_name(Architecture a) { return known(a).name; }
std::string_view hf_class_name(Architecture a) { return known(a).hf_class; }

TargetConfig target_config_from_hf(const fs::path& config_json) {
  const std::string where = config_json.string();
  const Json json = read_json(config_json);
  const JsonFields f(json, where);
  TargetConfig c;
  c.architecture = architecture_from_name(f.required("model_type", f.string("model_type")), where);
  if (const Json* classes = f.find("architectures"))
    // A classifier, a reward model or a drafter has the same model_type and is something else.
    DS_REQUIRE(classes->is_array() &&
                   std::find(classes->begin(), classes->end(), hf_class_name(c.architecture)) != classes->end(),
               "{}: 'architectures' is {}, expected {}", where, JsonFields::shown(*classes),
               hf_class_name(c.architecture));
  DS_REQUIRE(!f.has("quantization_config"),
             "{}: the weights are quantised (quantization_config); use the unquantised model or a GGUF file", where);
  const auto activation = f.string("hidden_act").value_or("silu");
  DS_REQUIRE(activation == "silu", "{}: the activation '{}' is not supported (silu is)", where, activation);

  c.hidden = f.required_integer("hidden_size");
  c.layers = f.required_integer("num_hidden_layers");
  c.heads = f.required_integer("num_attention_heads");
  c.ffn = f.required_integer("intermediate_size");
  c.vocab = f.required_integer("vocab_size");
  c.max_position = f.required_integer("max_position_embeddings");
  c.eps = f.number("rms_norm_eps").value_or(1e-6);
  DS_REQUIRE(c.eps > 0 && c.eps <= kMostEps, "{}: 'rms_norm_eps' is {}, expected more than 0 and at most {}", where, c.eps, kMostEps);
  c.tied = f.boolean("tie_word_embeddings").value_or(false);
  c.rope = rope_from_hf(json, where);
  c.bos_token = f.integer("bos_token_id").value_or(-1);
  DS_REQUIRE(c.layers >= 1 && c.layers <= 1 << 12 && c.heads >= 1, "{}: {} layers of {} heads", where, c.layers,
             c.heads);
  c.windows.assign(static_cast<size_t>(c.layers), 0);
  const auto head_dim = f.integer("head_dim"), kv_heads = f.integer("num_key_value_heads");
  const bool bias = f.boolean("attention_bias").value_or(false);
  switch (c.architecture) {
    case Architecture::llama:
      c.kv_heads = kv_heads.value_or(c.heads);
      c.head_dim = head_dim.value_or(c.hidden / c.heads);
      c.qkv_bias = c.o_bias = bias;
      c.mlp_bias = f.boolean("mlp_bias").value_or(false);
      break;
    case Architecture::qwen2:
      c.kv_heads = kv_heads.value_or(32);  // the class's defaults, here and below
      c.head_dim = head_dim.value_or(c.hidden / c.heads);
      c.qkv_bias = true;
      c.windows = qwen_windows(f, c.layers);
      break;
    case Architecture::qwen3:
      c.kv_heads = kv_heads.value_or(32);
      c.head_dim = head_dim.value_or(128);
      c.qkv_bias = c.o_bias = bias;
      c.qk_norm = true;
      c.windows = qwen_windows(f, c.layers);
      break;
  }
  std::set<int64_t> eos;
  add_eos(f, eos);
  const fs::path generation = config_json.parent_path() / "generation_config.json";
  std::error_code ec;
  if (fs::exists(generation, ec)) {
    const Json g = read_json(generation);
    add_eos(JsonFields(g, generation.string()), eos);
  }
  c.eos_tokens.assign(eos.begin(), eos.end());
  validate(c, where);
  return c;
}

TargetConfig target_config_from_gguf(const Gguf& g) {
  const std::string where = g.path().string(), arch(g.string("general.architecture"));
  TargetConfig c;
  c.architecture = architecture_from_name(arch, where);
  const auto key = [&](std::string_view name) { return fmt::format("{}.{}", arch, name); };
  const auto real = [&](std::string_view name, double value, double least, double most) {
    DS_REQUIRE(value >= least && value <= most, "{}: '{}' is {}, expected {} to {}", where, key(name), value, least, most);
    return value;
  };
  DS_REQUIRE(g.integer(key("expert_count"), 0) == 0, "{}: mixtures of experts are not supported ('{}' is {})", where,
             key("expert_count"), g.integer(key("expert_count"), 0));
  DS_REQUIRE(g.integer(key("attention.sliding_window"), 0) == 0,
             "{}: a sliding window is not supported for '{}' GGUF files", where, arch);
  c.hidden = g.integer(key("embedding_length"));
  c.layers = g.integer(key("block_count"));
  c.heads = g.integer(key("attention.head_count"));
  c.kv_heads = g.integer(key("attention.head_count_kv"), c.heads);
  c.ffn = g.integer(key("feed_forward_length"));
  c.max_position = g.integer(key("context_length"));
  c.eps = real("attention.layer_norm_rms_epsilon", g.number(key("attention.layer_norm_rms_epsilon")), 1e-30, kMostEps);
  DS_REQUIRE(c.layers >= 1 && c.layers <= 1 << 12 && c.heads >= 1, "{}: {} layers of {} heads", where, c.layers,
             c.heads);
  c.windows.assign(static_cast<size_t>(c.layers), 0);
  c.head_dim = g.integer(key("attention.key_length"), c.hidden / c.heads);
  DS_REQUIRE(g.integer(key("attention.value_length"), c.head_dim) == c.head_dim,
             "{}: '{}' is {}, expected the key length {}", where, key("attention.value_length"),
             g.integer(key("attention.value_length"), 0), c.head_dim);
  // Of a file with neighbouring pairs nobody says which rows were permuted.
  const int64_t rotated = g.integer(key("rope.dimension_count"), c.head_dim);
  DS_REQUIRE(rotated == c.head_dim || (c.architecture != Architecture::llama && rotated > 0 && rotated < c.head_dim && rotated % 2 == 0),
             "{}: '{}' is {}, expected the head size {}", where, key("rope.dimension_count"), rotated, c.head_dim);

  const GgufTensor& embedding = g.get("token_embd.weight");
  DS_REQUIRE(embedding.shape.size() == 2 && embedding.shape[1] == c.hidden,
             "{}: tensor 'token_embd.weight' has shape {}, expected [V, {}]", where, shape_text(embedding.shape),
             c.hidden);
  c.vocab = embedding.shape[0];
  DS_REQUIRE(g.integer(key("vocab_size"), c.vocab) == c.vocab, "{}: '{}' is {} but the embedding matrix has {} rows",
             where, key("vocab_size"), g.integer(key("vocab_size"), 0), c.vocab);
  c.tied = !g.find("output.weight");
  c.qkv_bias = g.find("blk.0.attn_q.bias");
  c.o_bias = g.find("blk.0.attn_output.bias");
  c.mlp_bias = g.find("blk.0.ffn_gate.bias");
  c.qk_norm = c.architecture == Architecture::qwen3;
  c.interleaved_qk = c.architecture == Architecture::llama;

  c.rope.theta = real("rope.freq_base", g.number(key("rope.freq_base"), 10000.0), kLeastRopeTheta, kMostRopeTheta);
  c.rope.partial_rotary_factor = static_cast<double>(rotated) / static_cast<double>(c.head_dim);
  const std::string_view scaling =
      g.string(key("rope.scaling.type"), g.has(key("rope.scale_linear")) ? "linear" : "none");
  if (scaling != "none") {
    DS_REQUIRE(scaling == "linear" || scaling == "yarn",
               "{}: rope scaling '{}' is not supported (none, linear, yarn are)", where, scaling);
    c.rope.type = scaling;
    const char* factor = g.has(key("rope.scaling.factor")) ? "rope.scaling.factor" : "rope.scale_linear";
    c.rope.factor = real(factor, g.number(key(factor)), 1 / kMostRopeFactor, kMostRopeFactor);
  }
  if (scaling == "yarn") {
    c.rope.original_max_position = g.integer(key("rope.scaling.original_context_length"), c.max_position);
    c.rope.beta_fast = real("rope.scaling.yarn_beta_fast", g.number(key("rope.scaling.yarn_beta_fast"), 32), 1 / kMostRopeFactor, kMostRopeFactor);
    c.rope.beta_slow = real("rope.scaling.yarn_beta_slow", g.number(key("rope.scaling.yarn_beta_slow"), 1), 1 / kMostRopeFactor, kMostRopeFactor);
    // llama.cpp multiplies its own 0.1 ln(factor) + 1 by this.
    if (g.has(key("rope.scaling.attn_factor")))
      c.rope.attention_factor = real("rope.scaling.attn_factor", g.number(key("rope.scaling.attn_factor")), 1 / kMostRopeFactor, kMostRopeFactor) * (0.1 * std::log(c.rope.factor) + 1);
    for (const char* name :
         {"rope.scaling.yarn_ext_factor", "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_log_multiplier"})
      DS_REQUIRE(!g.has(key(name)), "{}: '{}' is not supported", where, key(name));
  }
  DS_REQUIRE(c.rope.original_max_position >= 0, "{}: '{}' is {}, expected at least 0", where, key("rope.scaling.original_context_length"), c.rope.original_max_position);
  if (const GgufTensor* divisors = g.find("rope_freqs.weight")) {
    DS_REQUIRE(divisors->count() == c.head_dim / 2, "{}: tensor 'rope_freqs.weight' has {} values, expected {}", where,
               divisors->count(), c.head_dim / 2);
    for (float d : read_f32(*divisors)) {
      DS_REQUIRE(std::isfinite(d) && d > 0, "{}: tensor 'rope_freqs.weight' holds {}", where, d);
      c.rope_divisors.push_back(d);
    }
  }
  c.bos_token = g.integer("tokenizer.ggml.bos_token_id", -1);
  std::set<int64_t> eos;
  for (const char* name : {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"})
    if (g.has(name)) eos.insert(g.integer(name));
  c.eos_tokens.assign(eos.begin(), eos.end());
  validate(c, where);
  return c;
}

TargetConfig read_target_config(const fs::path& target) {
  std::error_code ec;
  if (fs::is_directory(target, ec)) {
    DS_REQUIRE(fs::exists(target / "config.json", ec),
               "{}: no config.json there; expected a Hugging Face folder or a GGUF file", target.string());
    return target_config_from_hf(target / "config.json");
  }
  if (target.extension() == ".json") return target_config_from_hf(target);
  return target_config_from_gguf(Gguf(target));
}

std::string canonical_text(const TargetConfig& c) {
  const auto real = [](double v) { return static_cast<double>(static_cast<float>(v)); };
  Json j = {{"architecture", architecture_name(c.architecture)},
            {"hidden", c.hidden},
            {"layers", c.layers},
            {"heads", c.heads},
            {"kv_heads", c.kv_heads},
            {"head_dim", c.head_dim},
            {"ffn", c.ffn},
            {"vocab", c.vocab},
            {"eps", real(c.eps)},
            {"tied", c.tied},
            {"qkv_bias", c.qkv_bias},
            {"o_bias", c.o_bias},
            {"mlp_bias", c.mlp_bias},
            {"windows", c.windows},
            {"rope_type", c.rope.type},
            {"rope_theta", real(c.rope.theta)}};
  if (c.rope.type != "default") {
    j["rope_factor"] = real(c.rope.factor);
    j["rope_original"] = c.rope.original_max_position > 0 ? c.rope.original_max_position : c.max_position;
  }
  if (c.rope.partial_rotary_factor != 1) j["rope_partial"] = real(c.rope.partial_rotary_factor);
  if (c.rope.type == "llama3") j["rope_llama3"] = {real(c.rope.low_freq_factor), real(c.rope.high_freq_factor)};
  if (c.rope.type == "yarn") {
    j["rope_yarn"] = {real(c.rope.beta_fast), real(c.rope.beta_slow), real(c.rope.attention_factor),
                      real(c.rope.mscale), real(c.rope.mscale_all_dim)};
    j["rope_truncate"] = c.rope.truncate;
  }
  if (!c.rope_divisors.empty()) j["rope_divisors"] = c.rope_divisors;
  return j.dump();
}

std::string config_hash(const TargetConfig& config) { return sha256_hex(canonical_text(config)); }

}  // namespace dspark::formats
