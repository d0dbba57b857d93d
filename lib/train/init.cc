#include "train/init.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "core/error.h"
#include "core/hash.h"
#include "core/log.h"
#include "core/rng.h"
#include "model/rope.h"

namespace dspark::train {

using namespace model;

namespace {

// The target's rope as a drafter's config can say it.
formats::RopeConfig target_rope(const target::TargetFiles& files) {
  const auto& t = files.config();
  formats::RopeConfig rope = t.rope;
  if (!t.rope_divisors.empty()) {
    const auto named = rope_from_divisors(rope, t.rope_divisors, t.head_dim, t.max_position);
    if (named) rope = *named;
    else log_warn("{}: no drafter config can say the frequencies in its 'rope_freqs.weight'; the drafter is trained with the plain ones", files.name());
  }
  // Loaders want it said.
  if (rope.original_max_position == 0 && (rope.type == "yarn" || rope.type == "llama3")) rope.original_max_position = t.max_position;
  return rope;
}

}  // namespace

DrafterConfig drafter_config_for(const target::TargetFiles& files, const NewDrafter& choice, const std::vector<TapLayer>& taps, int64_t draft_vocab) {
  const auto& t = files.config();
  DrafterConfig c;
  c.algorithm = choice.algorithm;
  c.target_hidden = t.hidden;
  c.hidden = choice.hidden > 0 ? choice.hidden : t.hidden;
  // Heads stay as they are, so that a server's pages of keys and values fit both; the FFN keeps its ratio, in steps of 16.
  c.ffn = c.own_embeddings() ? std::max<int64_t>(16, (t.ffn * c.hidden / t.hidden + 8) / 16 * 16) : t.ffn;
  c.heads = t.heads, c.kv_heads = t.kv_heads, c.head_dim = t.head_dim;
  c.vocab = t.vocab;
  c.draft_vocab = draft_vocab > 0 ? draft_vocab : t.vocab;
  c.layers = choice.layer_types;
  if (c.layers.empty()) c.layers.assign(static_cast<size_t>(std::max<int64_t>(choice.layers, 0)), LayerType::full);
  c.window = std::count(c.layers.begin(), c.layers.end(), LayerType::sliding) > 0 ? choice.window : 0;
  c.sliding_causal = choice.sliding_causal;
  c.window_by_anchor = choice.window_by_anchor;
  c.taps = taps;
  c.block = choice.block;
  c.rank = choice.rank;
  c.markov = choice.rank > 0 ? choice.markov : Markov::none;
  c.confidence = choice.confidence;
  c.confidence_with_markov = choice.rank > 0 && (!choice.like || choice.like->rank == 0 || choice.like->confidence_with_markov);
  c.sample_from_anchor = choice.sample_from_anchor;
  c.eps = t.eps;
  c.max_position = t.max_position;
  if (const DrafterConfig* like = choice.like) {
    c.ffn = like->ffn, c.eps = like->eps, c.attention_bias = like->attention_bias;
    c.heads = like->heads, c.kv_heads = like->kv_heads, c.head_dim = like->head_dim;
    c.max_position = like->max_position;
  }
  c.rope = trained_rope(choice.like ? choice.like->rope : target_rope(files), choice.rotary);
  c.rotary = choice.rotary;
  c.mask_token = choice.mask_token >= 0 ? choice.mask_token : files.tokenizer().default_mask_token();
  DS_REQUIRE(c.mask_token >= 0, "the target's tokenizer has no token that could be the mask; name one with --mask-token");
  c.target_name = printable(files.name());  // a name in JSON
  c.target_architectures = {std::string(formats::hf_class_name(t.architecture))};
  c.tokenizer_hash = files.tokenizer().identity();
  c.trained_on = files.quantisation();
  c.target_id = files.id();
  return c;
}

TensorValues target_values(const target::TargetFiles& files, const std::vector<int32_t>& kept) {
  return [&files, kept](const std::string& name) {
    if (name == "embed_tokens.weight") return files.tensor("model.embed_tokens.weight");
    DS_ASSERT(name == "lm_head.weight", "the target has no '{}'", name);
    std::vector<float> all = files.tensor(files.config().tied ? "model.embed_tokens.weight" : "lm_head.weight");
    if (kept.empty()) return all;
    const int64_t e = files.config().hidden;
    std::vector<float> rows;
    rows.reserve(kept.size() * static_cast<size_t>(e));
    for (int32_t id : kept) rows.insert(rows.end(), all.begin() + id * e, all.begin() + (id + 1) * e);
    return rows;
  };
}

namespace {

void set_values(Drafter& drafter, const std::string& name, const std::vector<float>& v) {
  Parameter* p = drafter.find(name);
  DS_ASSERT(p != nullptr, "no parameter '{}'", name);
  drafter.set(*p, {v.data(), DType::f32, p->value.rows, p->value.cols, p->value.cols});
}

std::vector<float> new_values(Drafter& drafter, const Parameter& p, uint64_t seed, NewWeights rule) {
  std::vector<float> v(static_cast<size_t>(p.value.size()), 0.0f);
  const bool norm = p.is_vector && p.name.ends_with("norm.weight");
  const bool bias = p.name.ends_with(".bias");
  if (norm) std::fill(v.begin(), v.end(), 1.0f);
  const Rng rng(seed, RngStream::init, std::stoull(sha256_hex(p.name).substr(0, 16), nullptr, 16));
  const bool head = p.name.starts_with("markov_head.") || p.name.starts_with("confidence_head.");
  if (rule == NewWeights::speculators && head && !p.name.ends_with("markov_w1.weight")) {
    // A bias has its matrix's fan-in.
    const Parameter* matrix = bias ? drafter.find(p.name.substr(0, p.name.size() - 4) + "weight") : &p;
    const double limit = 1 / std::sqrt(static_cast<double>(matrix->value.cols));
    for (size_t i = 0; i < v.size(); ++i) v[i] = static_cast<float>(limit * (2 * rng.uniform(i) - 1));
  } else if (!norm && !bias) {
    const double deviation = rule == NewWeights::speculators && head ? 0.01 : 0.02;
    for (size_t i = 0; i < v.size(); ++i) v[i] = static_cast<float>(deviation * rng.normal(i));
  }
  return v;
}

bool is_embedding(const std::string& name) { return name == "embed_tokens.weight" || name == "lm_head.weight"; }

}  // namespace

void init_random(Drafter& drafter, const TensorValues& target, uint64_t seed, NewWeights rule) {
  for (Parameter& p : drafter.parameters()) set_values(drafter, p.name, p.trainable ? new_values(drafter, p, seed, rule) : target(p.name));
  drafter.refresh();
}

std::vector<Mismatch> init_mismatches(const DrafterConfig& config, const DrafterFiles& init, const SameTokens& same) {
  const std::string none = "none";
  std::map<std::string, std::pair<std::string, std::string>> shapes;  // there, here
  const auto add = [&](const DrafterConfig& c, bool here) {
    for (const auto& spec : expected_tensors(c)) {
      if (is_embedding(spec.name) && !c.own_embeddings()) continue;
      auto& both = shapes.try_emplace(spec.name, none, none).first->second;
      (here ? both.second : both.first) = formats::shape_text(spec.shape);
    }
  };
  add(init.config, false);
  add(config, true);
  std::vector<Mismatch> out;
  for (auto& [name, both] : shapes) {
    auto& [there, here] = both;
    if (there == here) {
      const bool draft_rows = name.ends_with("markov_w2.weight") || name == "lm_head.weight";
      const bool token_rows = draft_rows || name.ends_with("markov_w1.weight") || name == "embed_tokens.weight";
      if (token_rows && !same.tokenizer) there += " of another tokenizer";
      else if (draft_rows && !same.draft_vocab) there += " of another draft vocabulary";
      else continue;
    }
    out.push_back({name, there, here});
  }
  return out;
}

void init_from_drafter(Drafter& drafter, const DrafterFiles& init, const std::vector<Mismatch>& mismatches, const TensorValues& target, uint64_t seed,
                       NewWeights rule) {
  for (Parameter& p : drafter.parameters()) {
    const bool fresh = std::any_of(mismatches.begin(), mismatches.end(), [&](const Mismatch& m) { return m.name == p.name; });
    set_values(drafter, p.name, !p.trainable ? target(p.name) : fresh ? new_values(drafter, p, seed, rule) : drafter_values(init, p.name));
  }
  drafter.refresh();
}

}  // namespace dspark::train
