// config.json of drafter folders, read and written.
#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "formats/hf_config.h"
#include "model/drafter_files.h"
#include "model/drafter_names.h"

namespace dspark::model {

namespace {

// Typed access that names file and field when something is missing or of another type.
class Fields {
 public:
  Fields(const Json& json, std::string where) : json_(json), where_(std::move(where)) {
    DS_REQUIRE(json.is_object(), "{}: not a JSON object", where_);
  }
  bool has(const char* key) const { return json_.contains(key) && !json_.at(key).is_null(); }
  const Json& at(const char* key) const {
    DS_REQUIRE(has(key), "{}: field '{}' is missing", where_, key);
    return json_.at(key);
  }
  int64_t integer(const char* key) const {
    const Json& v = at(key);
    DS_REQUIRE(v.is_number_integer(), "{}: field '{}' is {}, expected a whole number", where_, key, v.dump());
    return v.get<int64_t>();
  }
  int64_t integer(const char* key, int64_t fallback) const { return has(key) ? integer(key) : fallback; }
  double number(const char* key) const {
    const Json& v = at(key);
    DS_REQUIRE(v.is_number(), "{}: field '{}' is {}, expected a number", where_, key, v.dump());
    return v.get<double>();
  }
  double number(const char* key, double fallback) const { return has(key) ? number(key) : fallback; }
  bool boolean(const char* key, bool fallback) const {
    if (!has(key)) return fallback;
    DS_REQUIRE(at(key).is_boolean(), "{}: field '{}' is {}, expected true or false", where_, key, at(key).dump());
    return at(key).get<bool>();
  }
  std::string string(const char* key, const std::string& fallback) const {
    if (!has(key)) return fallback;
    DS_REQUIRE(at(key).is_string(), "{}: field '{}' is {}, expected a text", where_, key, at(key).dump());
    return at(key).get<std::string>();
  }
  const std::string& where() const { return where_; }
  const Json& json() const { return json_; }

 private:
  const Json& json_;
  std::string where_;
};

// Without a base the loaders disagree: vLLM takes 1e6, llama.cpp 10000.
formats::RopeConfig parse_rope(const Json& json, const Fields& f) {
  const bool given = f.has("rope_theta") || (f.has("rope_parameters") && f.at("rope_parameters").is_object() && f.at("rope_parameters").contains("rope_theta")) ||
                     (f.has("rope_scaling") && f.at("rope_scaling").is_object() && f.at("rope_scaling").contains("rope_theta"));
  const formats::RopeConfig rope = formats::rope_from_hf(json, f.where());
  DS_REQUIRE(given, "{}: 'rope_theta' is missing, alone or in 'rope_parameters': servers disagree about its default", f.where());
  return rope;
}

bool has_sliding(const DrafterConfig& c) { return std::find(c.layers.begin(), c.layers.end(), LayerType::sliding) != c.layers.end(); }

// The Qwen3 layer fields, wherever they stand.
void parse_layers(const Fields& f, DrafterConfig& c) {
  c.hidden = f.integer("hidden_size");
  c.ffn = f.integer("intermediate_size");
  c.heads = f.integer("num_attention_heads");
  c.kv_heads = f.integer("num_key_value_heads", c.heads);
  c.head_dim = f.integer("head_dim", c.heads > 0 ? c.hidden / c.heads : 0);
  c.vocab = f.integer("vocab_size");
  c.eps = f.number("rms_norm_eps", 1e-6);
  c.max_position = f.integer("max_position_embeddings", 32768);
  c.attention_bias = f.boolean("attention_bias", false);
  const std::string activation = f.string("hidden_act", "silu");
  DS_REQUIRE(activation == "silu", "{}: hidden_act '{}' is not supported, only silu is", f.where(), activation);
  const int64_t n = f.integer("num_hidden_layers");
  DS_REQUIRE(n >= 1 && n <= 1000, "{}: num_hidden_layers is {}", f.where(), n);
  c.layers.assign(static_cast<size_t>(n), LayerType::full);
  if (f.has("layer_types")) {
    const Json& types = f.at("layer_types");
    DS_REQUIRE(types.is_array() && static_cast<int64_t>(types.size()) == n, "{}: layer_types has not one entry a layer ({})", f.where(), n);
    for (size_t i = 0; i < c.layers.size(); ++i) {
      DS_REQUIRE(types[i] == "full_attention" || types[i] == "sliding_attention", "{}: layer_types[{}] is {}", f.where(), i, types[i].dump());
      c.layers[i] = types[i] == "sliding_attention" ? LayerType::sliding : LayerType::full;
    }
  }
  if (has_sliding(c)) c.window = f.integer("sliding_window");
  c.rope = parse_rope(f.json(), f);
}

std::vector<TapLayer> parse_taps(const Fields& f, const char* key, int offset) {
  const Json& ids = f.at(key);
  DS_REQUIRE(ids.is_array() && !ids.empty(), "{}: {} must be a list of layer numbers", f.where(), key);
  std::vector<TapLayer> taps;
  for (const Json& id : ids) {
    DS_REQUIRE(id.is_number_integer() && id.get<int64_t>() >= -1 && id.get<int64_t>() < 1 << 16, "{}: {} holds {}, expected layer numbers", f.where(), key, id.dump());
    taps.push_back({id.get<int>() + offset});
  }
  return taps;
}

void parse_heads(const Fields& f, DrafterConfig& c) {
  c.block = f.integer("block_size");
  c.mask_token = f.integer("mask_token_id");
  c.rank = f.integer("markov_rank", 0);
  const std::string head = f.string("markov_head_type", "vanilla");
  const auto markov = parse_markov(head);
  DS_REQUIRE(markov && *markov != Markov::none, "{}: markov_head_type '{}' is not vanilla, gated or rnn", f.where(), head);
  c.markov = c.rank == 0 ? Markov::none : *markov;
  c.confidence = f.boolean("enable_confidence_head", false);
  c.confidence_with_markov = f.boolean("confidence_head_with_markov", c.rank > 0) && c.rank > 0;
  if (!f.has("dspark_training")) return;
  const Fields own(f.at("dspark_training"), f.where() + ": dspark_training");
  c.tokenizer_hash = own.string("tokenizer_hash", "");
  c.trained_on = own.string("states_from", "");
  c.target_id = own.string("target_id", "");
  c.window_by_anchor = own.string("window_rule", "served") == "anchor";
  const std::string rotary = own.string("rotary", "");
  DS_REQUIRE(rotary.empty() || rotary == "served" || rotary == "reference", "{}: rotary '{}' is not served or reference", own.where(), rotary);
  if (!rotary.empty()) c.rotary = rotary == "served" ? formats::Rotary::served : formats::Rotary::reference;
}

void put_layers(OrderedJson& j, const DrafterConfig& c) {
  j["model_type"] = "qwen3";
  j["hidden_size"] = c.hidden, j["intermediate_size"] = c.ffn, j["num_hidden_layers"] = c.n_layers();
  j["num_attention_heads"] = c.heads, j["num_key_value_heads"] = c.kv_heads, j["head_dim"] = c.head_dim;
  j["rms_norm_eps"] = c.eps, j["vocab_size"] = c.vocab, j["max_position_embeddings"] = c.max_position;
  j["hidden_act"] = "silu", j["attention_bias"] = c.attention_bias, j["attention_dropout"] = 0.0;
  auto types = OrderedJson::array();
  for (LayerType t : c.layers) types.push_back(t == LayerType::full ? "full_attention" : "sliding_attention");
  j["layer_types"] = types;
  j["use_sliding_window"] = c.window > 0;
  if (c.window > 0) j["sliding_window"] = c.window;
  else j["sliding_window"] = nullptr;
  j["rope_parameters"] = formats::rope_to_hf(c.rope);
  j["rope_theta"] = c.rope.theta;
  j["tie_word_embeddings"] = false;
}

void put_heads(OrderedJson& j, const DrafterConfig& c) {
  j["block_size"] = c.block, j["mask_token_id"] = c.mask_token;
  j["markov_rank"] = c.rank, j["markov_head_type"] = markov_name(c.rank == 0 ? Markov::vanilla : c.markov);
  j["enable_confidence_head"] = c.confidence, j["confidence_head_with_markov"] = c.confidence_with_markov;
  OrderedJson own;
  if (!c.tokenizer_hash.empty()) own["tokenizer_hash"] = c.tokenizer_hash;
  if (!c.trained_on.empty()) own["states_from"] = c.trained_on;
  if (!c.target_id.empty()) own["target_id"] = c.target_id;
  own["window_rule"] = c.window_by_anchor ? "anchor" : "served";
  if (c.rotary != formats::Rotary::unknown) own["rotary"] = c.rotary == formats::Rotary::served ? "served" : "reference";
  j["dspark_training"] = own;
  j["dtype"] = "bfloat16";
}

std::string deepspec_json(const DrafterConfig& c, const WriteOptions& options) {
  DS_REQUIRE(c.draft_vocab == c.vocab, "DeepSpec's format has the full vocabulary only, this drafter keeps {} of {} tokens", c.draft_vocab, c.vocab);
  DS_REQUIRE(!c.own_embeddings(), "DeepSpec's format has the target's width only, this drafter has {} and reads states of {}", c.hidden, c.target_hidden);
  DS_REQUIRE(c.sample_from_anchor, "DeepSpec's format has the anchor layout only, this drafter was trained with the bonus layout");
  OrderedJson j;
  j["architectures"] = {"Qwen3DSparkModel"};
  put_layers(j, c);
  put_heads(j, c);
  auto ids = OrderedJson::array();
  for (TapLayer t : c.taps) ids.push_back(t.n - 1);
  j["target_layer_ids"] = ids;
  if (options.num_target_layers > 0) j["num_target_layers"] = options.num_target_layers;
  j["num_anchors"] = 512;
  // Sliding layers and what they see of a block are not DeepSpec's own: it trains full ones.
  if (has_sliding(c)) j["sliding_window_non_causal"] = !c.sliding_causal;
  return j.dump(2) + "\n";
}

}  // namespace

std::string drafter_config_json(const DrafterConfig& c, const WriteOptions& options) {
  if (options.format == DrafterFormat::deepspec) return deepspec_json(c, options);
  // Rank 0 is a DFlash drafter whatever it was called: vLLM's CPU build dies on a dspark one without Markov head.
  const std::string type = c.rank > 0 ? "dspark" : "dflash";
  OrderedJson j;
  j["architectures"] = {c.rank > 0 ? "DSparkDraftModel" : "DFlashDraftModel"};
  j["speculators_model_type"] = type;
  j["speculators_version"] = "0.9.0";
  j["sample_from_anchor"] = c.sample_from_anchor;
  auto ids = OrderedJson::array();
  for (TapLayer t : c.taps) ids.push_back(t.n);
  j["aux_hidden_state_layer_ids"] = ids;
  j["draft_vocab_size"] = c.draft_vocab;
  if (c.target_hidden != c.hidden) j["target_hidden_size"] = c.target_hidden;
  else j["target_hidden_size"] = nullptr;
  put_heads(j, c);
  // dflash_config.causal = not this, for all layers: full layers are bidirectional only when it is true.
  const bool all_full = std::all_of(c.layers.begin(), c.layers.end(), [](LayerType t) { return t == LayerType::full; });
  j["sliding_window_non_causal"] = type == "dflash" ? all_full || !c.sliding_causal : !all_full && !c.sliding_causal;
  j["tie_word_embeddings"] = false;
  OrderedJson proposal{{"proposal_type", "greedy"}, {"speculative_tokens", c.proposals()}, {"accept_tolerance", 0.0}, {"verifier_accept_k", 1}};
  j["speculators_config"] = OrderedJson{{"algorithm", type},
                                        {"default_proposal_method", "greedy"},
                                        {"proposal_methods", OrderedJson::array({proposal})},
                                        {"verifier", OrderedJson{{"name_or_path", c.target_name}, {"architectures", c.target_architectures}}}};
  OrderedJson layers;
  put_layers(layers, c);
  j["transformer_layer_config"] = layers;
  return j.dump(2) + "\n";
}

DrafterConfig read_drafter_config(const fs::path& file, DrafterFormat* format) {
  const std::string where = file.string();
  const Json json = read_json(file);
  const Fields f(json, where);
  DrafterConfig c;
  if (f.has("speculators_model_type")) {
    *format = DrafterFormat::speculators;
    c.algorithm = f.string("speculators_model_type", "");
    DS_REQUIRE(c.algorithm == "dspark" || c.algorithm == "dflash", "{}: speculators_model_type '{}' is not dspark or dflash", where, c.algorithm);
    parse_layers(Fields(f.at("transformer_layer_config"), where + ": transformer_layer_config"), c);
    parse_heads(f, c);
    c.taps = parse_taps(f, "aux_hidden_state_layer_ids", 0);
    c.draft_vocab = f.integer("draft_vocab_size", c.vocab);
    c.target_hidden = f.integer("target_hidden_size", c.hidden);
    c.sample_from_anchor = f.boolean("sample_from_anchor", false);
    c.sliding_causal = !f.boolean("sliding_window_non_causal", false);
    const Fields speculators(f.at("speculators_config"), where + ": speculators_config");
    if (speculators.has("verifier")) {
      const Fields verifier(speculators.at("verifier"), where + ": verifier");
      c.target_name = verifier.string("name_or_path", "");
      if (verifier.has("architectures"))
        for (const Json& a : verifier.at("architectures")) c.target_architectures.push_back(a.is_string() ? a.get<std::string>() : a.dump());
    }
  } else {
    const bool known = f.has("architectures") && f.at("architectures").is_array() && !f.at("architectures").empty() &&
                       f.at("architectures")[0] == "Qwen3DSparkModel";
    DS_REQUIRE(known, "{}: neither a speculators drafter (speculators_model_type) nor a DeepSpec one (architectures [\"Qwen3DSparkModel\"])", where);
    *format = DrafterFormat::deepspec;
    parse_layers(f, c);
    parse_heads(f, c);
    c.algorithm = c.rank > 0 ? "dspark" : "dflash";
    c.taps = parse_taps(f, "target_layer_ids", 1);
    if (f.has("num_target_layers"))
      DS_REQUIRE(c.taps.back().n < f.integer("num_target_layers"), "{}: target_layer_ids ends with {}, expected layers before the last of num_target_layers {}", where, c.taps.back().n - 1,
                 f.integer("num_target_layers"));
    c.draft_vocab = c.vocab;
    c.target_hidden = c.hidden;
    c.sample_from_anchor = true;
    c.sliding_causal = !f.boolean("sliding_window_non_causal", false);
  }
  validate(c);
  return c;
}

}  // namespace dspark::model
