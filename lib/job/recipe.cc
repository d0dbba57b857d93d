#include "job/recipe.h"

#include <algorithm>
#include <type_traits>

#include "core/error.h"
#include "model/drafter_names.h"

namespace dspark::job {

namespace {

class Settings {
 public:
  Settings(TrainOptions& o, const model::DrafterConfig* init) : o_(o), init_(init), speculators_(o.recipe == "speculators") {}

  // A field of the drafter itself, which one to continue from decides; `there` is its value.
  template <typename T, typename There>
  void drafter(const char* name, T& field, const There& there) {
    if (!init_ || o_.was_given(name)) return;
    field = there(*init_);
    from_init_.push_back(name);
  }

  // A field that both recipes decide.
  template <typename T>
  void both(const char* name, T& field, const std::type_identity_t<T>& deepspec, const std::type_identity_t<T>& speculators) {
    const bool fixed = o_.was_given(name) || from_init(name);
    if (!fixed) field = speculators_ ? speculators : deepspec;
    list_.push_back({name, fmt::format("{}", field), fixed ? source(name) : "recipe " + o_.recipe, !std::is_arithmetic_v<T>});
  }
  // One that no recipe decides.
  template <typename T>
  void plain(const char* name, const T& field) {
    list_.push_back({name, fmt::format("{}", field), source(name), !std::is_arithmetic_v<T>});
  }
  std::vector<Setting> list() { return std::move(list_); }

 private:
  bool from_init(const std::string& name) const { return std::find(from_init_.begin(), from_init_.end(), name) != from_init_.end(); }
  std::string source(const std::string& name) const { return o_.was_given(name) ? "given" : from_init(name) ? "init" : "default"; }

  TrainOptions& o_;
  const model::DrafterConfig* init_;
  std::vector<std::string> from_init_;
  bool speculators_;
  std::vector<Setting> list_;
};

// Everything that a drafter's weights were trained as.
void continue_drafter(Settings& s, TrainOptions& o) {
  using C = model::DrafterConfig;
  s.drafter("algorithm", o.algorithm, [](const C& c) { return std::string(c.rank > 0 ? "dspark" : "dflash"); });
  s.drafter("layers", o.layers, [](const C& c) { return c.n_layers(); });
  // The target's width is not the drafter's choice.
  s.drafter("hidden", o.hidden, [](const C& c) { return c.own_embeddings() ? c.hidden : 0; });
  s.drafter("block", o.block, [](const C& c) { return c.block; });
  // Of layers that are all alike another number can be asked for.
  s.drafter("layer-types", o.layer_types, [](const C& c) {
    const bool alike = std::all_of(c.layers.begin(), c.layers.end(), [&](model::LayerType t) { return t == c.layers.front(); });
    return model::layer_type_names(alike ? std::vector{c.layers.front()} : c.layers);
  });
  s.drafter("window", o.window, [](const C& c) { return c.window; });
  s.drafter("window-rule", o.window_rule, [](const C& c) { return std::string(c.window_by_anchor ? "anchor" : "served"); });
  s.drafter("non-causal", o.non_causal, [](const C& c) { return !c.sliding_causal; });
  s.drafter("layout", o.layout, [](const C& c) { return std::string(model::layout_name(c.sample_from_anchor)); });
  s.drafter("markov", o.markov, [](const C& c) { return std::string(model::markov_name(c.markov)); });
  s.drafter("rank", o.rank, [](const C& c) { return c.rank; });
  s.drafter("no-confidence", o.no_confidence, [](const C& c) { return !c.confidence; });
  s.drafter("draft-vocab", o.draft_vocab, [](const C& c) { return c.draft_vocab < c.vocab ? c.draft_vocab : 0; });
}

}  // namespace

std::vector<Setting> apply_recipe(TrainOptions& o, const model::DrafterConfig* init) {
  if (o.recipe != "deepspec" && o.recipe != "speculators") fail_usage("--recipe {}: deepspec or speculators", o.recipe);
  Settings s(o, init);
  continue_drafter(s, o);
  // Where its config does not say how it was turned, the recipe decides; train refuses what that would change.
  if (init && init->rotary != formats::Rotary::unknown)
    s.drafter("rotary", o.rotary, [](const model::DrafterConfig& c) { return std::string(model::rotary_name(c.rotary)); });
  const bool dflash = o.algorithm == "dflash";
  s.plain("algorithm", o.algorithm);
  s.plain("layers", o.layers);
  s.plain("hidden", o.hidden);
  s.both("block", o.block, 7, dflash ? 16 : 8);
  s.both("layer-types", o.layer_types, "full", "sliding");
  s.both("window", o.window, 0, 2048);
  s.both("window-rule", o.window_rule, "served", "anchor");
  s.plain("non-causal", o.non_causal);
  s.both("rotary", o.rotary, "served", "reference");
  s.both("layout", o.layout, "anchor", dflash ? "bonus" : "anchor");
  s.plain("markov", o.markov);
  s.plain("rank", o.rank);
  s.plain("no-confidence", o.no_confidence);
  s.plain("draft-vocab", o.draft_vocab);
  s.plain("taps", o.taps);
  s.plain("mask-token", o.mask_token);
  s.plain("init", o.init.string());
  s.plain("init-partial", o.init_partial);
  s.both("warm-start", o.warm_start, "target", "none");
  s.both("weights", o.weights, "deepspec", "speculators");
  // DeepSpec's dflash preset is cross-entropy alone; speculators' is that with D-PACE.
  s.both("loss", o.loss, dflash ? "ce=1" : "ce=0.1,tv=1.8,conf=1", dflash ? "ce=1" : "kl=1,conf=1");
  s.both("decay", o.decay, 4.0, 4.0);
  s.both("dpace", o.dpace, 0.0, dflash ? 0.5 : 0.0);
  s.both("denominator", o.denominator, "pooled", "count");
  s.both("slots", o.slots, "label-prefix", "row-mask");
  s.both("label", o.label, "data", "target");
  s.plain("detach-confidence", o.detach_confidence);
  s.both("anchors", o.anchors, 512, 512);
  s.both("anchors-per", o.anchors_per, "document", "row");
  s.both("tap-noise", o.tap_noise, 0.0, 0.0);
  s.both("optimizer", o.optimizer, "adamw", "muon");
  s.both("lr", o.lr, 6e-4, 1e-3);
  s.both("weight-decay", o.weight_decay, 0.0, 0.01);
  s.plain("muon-lr", o.muon_lr);
  s.both("muon-weight-decay", o.muon_weight_decay, 0.0, 0.1);
  s.both("clip", o.clip, 1.0, 1.0);
  s.both("schedule", o.schedule, "cosine", "linear");
  s.both("warmup", o.warmup, 0.04, 0.01);
  s.plain("steps", o.steps);
  s.plain("epochs", o.epochs);
  s.plain("batch-docs", o.batch_docs);
  s.plain("row-tokens", o.row_tokens);
  s.plain("chunk-slots", o.chunk_slots);
  s.plain("store-weights", fmt::format("{}", fmt::join(o.store_weights, ",")));
  s.plain("seed", o.common.seed);
  s.plain("precision", o.common.precision);
  s.plain("ranks", o.planning.ranks);
  s.plain("rank-timeout", o.rank_timeout_s);
  s.plain("grad-wire", o.planning.grad_wire);
  s.plain("val-fraction", o.val_fraction);
  s.plain("validate-every", o.validate_every);
  s.plain("save-every", o.save_every);
  s.plain("keep", o.keep);
  s.plain("time-limit", o.time_limit_s);
  s.plain("on-nonfinite", o.on_nonfinite);
  s.plain("device", o.common.device);
  s.plain("threads", o.common.threads);
  s.plain("cpu-kernel", o.common.cpu_kernel);
  s.plain("gemm-table", o.common.gemm_table.string());
  return s.list();
}

}  // namespace dspark::job
