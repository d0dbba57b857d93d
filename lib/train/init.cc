#include "train/init.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "core/hash.h"
#include "core/rng.h"

namespace dspark::train {

using namespace model;

DrafterConfig drafter_config_for(const target::TargetFiles& files, const NewDrafter& choice, const std::vector<TapLayer>& taps, int64_t draft_vocab) {
  const auto& t = files.config();
  DrafterConfig c;
  c.algorithm = choice.algorithm;
  c.hidden = c.target_hidden = t.hidden;
  c.ffn = t.ffn;
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
  c.confidence_with_markov = choice.rank > 0;
  c.sample_from_anchor = choice.sample_from_anchor;
  c.eps = t.eps;
  c.max_position = t.max_position;
  c.rope = t.rope;
  c.mask_token = choice.mask_token >= 0 ? choice.mask_token : files.tokenizer().default_mask_token();
  DS_REQUIRE(c.mask_token >= 0, "the target's tokenizer has no token that could be the mask; name one with --mask-token");
  c.target_name = files.name();
  c.target_architectures = {std::string(formats::hf_class_name(t.architecture))};
  c.tokenizer_hash = files.tokenizer().identity();
  c.trained_on = files.quantisation();
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

// The drafter norms q and k per head where the target does not. Weights that give them back their size on white input, a channel's
// root mean square over heads: without them every score is a cosine and attention starts nearly flat. w [heads*HD, E].
std::vector<float> norm_like(const std::vector<float>& w, const std::vector<float>& input_norm, int64_t heads, int64_t head_dim) {
  const auto e = static_cast<int64_t>(input_norm.size());
  std::vector<float> out;
  for (int64_t j = 0; j < head_dim; ++j) {
    double sum = 0;
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t i = 0; i < e; ++i) {
        const double x = static_cast<double>(w[static_cast<size_t>((h * head_dim + j) * e + i)]) * static_cast<double>(input_norm[static_cast<size_t>(i)]);
        sum += x * x;
      }
    out.push_back(static_cast<float>(std::sqrt(sum / static_cast<double>(heads))));
  }
  return out;
}

// markov_w1 as a random projection of the target's embeddings, so that what is learnt after one token holds for tokens like it:
// with little data most tokens are seen too rarely to learn a row of their own.
void project_embeddings(Drafter& drafter) {
  constexpr double kRms = 0.1;  // of a row of markov_w1
  Parameter& p = *drafter.find("markov_head.markov_w1.weight");
  Context& ctx = drafter.context();
  const int64_t e = drafter.embed.cols, rank = p.value.cols;
  const Tensor square = ctx.allocate(ctx.acc_dtype(), 1, 1), embed = ctx.allocate(ctx.acc_dtype(), drafter.embed.rows, e);
  copy(ctx, {embed, drafter.embed});
  sum_squares(ctx, {square, embed});
  double sum = 0;
  ctx.download_now({&sum, DType::f64, 1, 1, 1}, square);
  ctx.free(square);
  ctx.free(embed);
  if (sum == 0) return;
  const double deviation = kRms / (std::sqrt(sum / static_cast<double>(drafter.embed.rows * e)) * std::sqrt(static_cast<double>(e)));
  const Rng rng(0, RngStream::init, 0x4d61726b6f76);
  std::vector<float> v(static_cast<size_t>(rank * e));
  for (size_t i = 0; i < v.size(); ++i) v[i] = static_cast<float>(deviation * rng.normal(i));
  Weight projection;
  projection.value = ctx.allocate(ctx.act_dtype(), rank, e);
  ctx.upload_now(projection.value, {v.data(), DType::f32, rank, e, e});
  refresh(ctx, {&projection});
  const Tensor rows = ctx.allocate(ctx.acc_dtype(), p.value.rows, rank);
  linear(ctx, {rows, drafter.embed, &projection});
  copy(ctx, {p.value, rows});
  if (p.cast_on_update()) copy(ctx, {p.master, rows});
  ctx.free(rows);
  ctx.free(projection.value);
}

}  // namespace

void init_random(Drafter& drafter, const TensorValues& target, uint64_t seed, NewWeights rule) {
  for (Parameter& p : drafter.parameters()) {
    if (!p.trainable) {
      set_values(drafter, p.name, target(p.name));
      continue;
    }
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
    set_values(drafter, p.name, v);
  }
  drafter.refresh();
}

void warm_start(Drafter& drafter, const target::TargetFiles& files) {
  const DrafterConfig& c = drafter.config();
  const auto& t = files.config();
  DS_REQUIRE(c.n_layers() <= t.layers, "a warm start of {} layers needs a target of at least as many, it has {}; use --warm-start none", c.n_layers(), t.layers);
  std::vector<float> context_norm(static_cast<size_t>(c.hidden), 0.0f);
  for (int64_t i = 0; i < c.n_layers(); ++i) {
    const std::string from = fmt::format("model.layers.{}.", t.layers - c.n_layers() + i), to = fmt::format("layers.{}.", i);
    for (const char* name : {"input_layernorm.weight", "post_attention_layernorm.weight", "self_attn.q_proj.weight", "self_attn.k_proj.weight",
                             "self_attn.v_proj.weight", "self_attn.o_proj.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight"})
      set_values(drafter, to + name, files.tensor(from + name));
    const auto norm = files.tensor(from + "input_layernorm.weight");
    for (const char* side : {"q", "k"}) {
      const std::string name = fmt::format("self_attn.{}_norm.weight", side);
      set_values(drafter, to + name,
                 t.qk_norm ? files.tensor(from + name)
                           : norm_like(files.tensor(fmt::format("{}self_attn.{}_proj.weight", from, side)), norm, side[0] == 'q' ? t.heads : t.kv_heads, t.head_dim));
    }
    for (size_t j = 0; j < norm.size(); ++j) context_norm[j] += norm[j] / static_cast<float>(c.n_layers());
  }
  // The context goes into k and v without the layers' own input norms: their mean stands in for them.
  set_values(drafter, "hidden_norm.weight", context_norm);
  set_values(drafter, "norm.weight", files.tensor("model.norm.weight"));
  const int64_t width = c.n_taps() * c.target_hidden;
  std::vector<float> fc(static_cast<size_t>(c.hidden * width), 0.0f);
  for (int64_t i = 0; i < c.hidden; ++i) fc[static_cast<size_t>(i * width + (c.n_taps() - 1) * c.target_hidden + i)] = 1.0f;
  set_values(drafter, "fc.weight", fc);
  if (c.rank > 0) project_embeddings(drafter);
  if (c.rank > 0) set_values(drafter, "markov_head.markov_w2.weight", std::vector<float>(static_cast<size_t>(c.draft_vocab * c.rank), 0.0f));
  drafter.refresh();
}

}  // namespace dspark::train
