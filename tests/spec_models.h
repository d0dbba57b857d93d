// Tiny random targets and drafters for the tests of lib/spec.
//
// The drafter shares the target's embeddings and output matrix, and its Markov head is (when there is one) nearly the target's own
// map from a token to the next: so that proposals are accepted often, rejected often, and never all.
#pragma once

#include <memory>

#include "core/hash.h"
#include "core/rng.h"
#include "model/backends.h"
#include "spec/decoder.h"

namespace dspark::test {

// Philox normals times `scale` plus `mean`; a name's numbers never depend on other names.
inline std::vector<float> random_values(const std::string& name, int64_t n, double scale, double mean = 0) {
  const Rng rng(17, RngStream::test, crc32c(std::as_bytes(std::span(name))));
  std::vector<float> v(static_cast<size_t>(n));
  for (size_t i = 0; i < v.size(); ++i) v[i] = static_cast<float>(mean + scale * rng.normal(i));
  return v;
}

struct SpecModel {
  int64_t vocab = 24, target_layers = 3;
  bool sample_from_anchor = true;
  bool markov = true;
  std::vector<int32_t> kept{};  // empty: the whole vocabulary
  std::vector<model::LayerType> layers{model::LayerType::full};
  int64_t block = 5;
  formats::RopeConfig rope{};
  int64_t max_position = 512;
};

// Everything on one backend.
struct SpecRun {
  static constexpr int64_t kWidth = 32, kFfn = 48, kHeads = 2, kHeadDim = 16;

  explicit SpecRun(const SpecModel& m, model::Precision precision, int64_t capacity = 128) {
    backend = model::make_cpu_backend({.precision = precision, .threads = 1});
    formats::TargetConfig t;
    t.hidden = kWidth, t.layers = m.target_layers, t.ffn = kFfn, t.vocab = m.vocab, t.max_position = 512;
    t.heads = kHeads, t.kv_heads = 1, t.head_dim = kHeadDim;
    t.windows.assign(static_cast<size_t>(t.layers), 0);
    target = std::make_unique<target::TargetModel>(backend->context(), t, [&](const std::string& name) { return target_values(t, name); });

    model::DrafterConfig c;
    c.hidden = c.target_hidden = kWidth, c.ffn = kFfn, c.heads = kHeads, c.kv_heads = 1, c.head_dim = kHeadDim;
    c.vocab = m.vocab;
    c.draft_vocab = m.kept.empty() ? m.vocab : static_cast<int64_t>(m.kept.size());
    c.layers = m.layers;
    c.window = 4;
    c.taps = {{1}, {static_cast<int>(m.target_layers)}};
    c.block = m.block;
    c.rank = m.markov ? kWidth : 0;
    c.markov = m.markov ? model::Markov::vanilla : model::Markov::none;
    c.confidence = false;
    c.sample_from_anchor = m.sample_from_anchor;
    c.mask_token = m.vocab - 1;
    c.rope = m.rope;
    c.max_position = m.max_position;
    drafter = std::make_unique<model::Drafter>(backend->context(), c, model::DrafterOptions{.trainable = false});
    for (model::Parameter& p : drafter->parameters()) {
      const std::vector<float> v = drafter_values(t, m.kept, p);
      drafter->set(p, {v.data(), DType::f32, p.value.rows, p.value.cols, p.value.cols});
    }
    drafter->refresh();
    decoder = std::make_unique<spec::Decoder>(*target, *drafter, m.kept, capacity);
  }

  static std::vector<float> target_values(const formats::TargetConfig& t, const std::string& name) {
    const auto has = [&](const char* part) { return name.find(part) != std::string::npos; };
    const int64_t e = t.hidden, q = t.heads * t.head_dim, kv = t.kv_heads * t.head_dim;
    if (has("norm.weight") || has("layernorm.weight")) return random_values(name, e, 0.1, 1);
    if (has("embed_tokens")) return random_values(name, t.vocab * e, 1);
    if (has("lm_head")) return random_values(name, t.vocab * e, 0.35);
    if (has("q_proj")) return random_values(name, q * e, 0.3);
    if (has("k_proj")) return random_values(name, kv * e, 0.3);
    if (has("v_proj")) return random_values(name, kv * e, 0.2);
    if (has("o_proj")) return random_values(name, e * q, 0.15);
    if (has("down_proj")) return random_values(name, e * t.ffn, 0.08);
    return random_values(name, t.ffn * e, 0.2);  // gate, up
  }

  static std::vector<float> drafter_values(const formats::TargetConfig& t, const std::vector<int32_t>& kept, const model::Parameter& p) {
    const int64_t e = t.hidden;
    const auto has = [&](const char* part) { return p.name.find(part) != std::string::npos; };
    if (has("embed_tokens") || has("markov_w1")) return target_values(t, "model.embed_tokens.weight");
    if (has("lm_head") || has("markov_w2")) {
      const std::vector<float> all = target_values(t, "lm_head.weight");
      if (kept.empty()) return all;
      std::vector<float> rows;
      for (const int32_t id : kept) rows.insert(rows.end(), all.begin() + id * e, all.begin() + (id + 1) * e);
      return rows;
    }
    if (has("norm")) return random_values("drafter." + p.name, p.value.size(), 0.1, 1);
    return random_values("drafter." + p.name, p.value.size(), has("o_proj") || has("down_proj") ? 0.08 : 0.2);
  }

  std::unique_ptr<model::Backend> backend;
  std::unique_ptr<target::TargetModel> target;
  std::unique_ptr<model::Drafter> drafter;
  std::unique_ptr<spec::Decoder> decoder;
};

}  // namespace dspark::test
