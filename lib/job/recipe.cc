#include "job/recipe.h"

#include <algorithm>
#include <type_traits>

#include "core/error.h"

namespace dspark::job {

namespace {

class Settings {
 public:
  explicit Settings(TrainOptions& o) : o_(o), speculators_(o.recipe == "speculators") {}

  // A field that both recipes decide.
  template <typename T>
  void both(const char* name, T& field, const std::type_identity_t<T>& deepspec, const std::type_identity_t<T>& speculators) {
    const bool is_given = given(name);
    if (!is_given) field = speculators_ ? speculators : deepspec;
    list_.push_back({name, fmt::format("{}", field), is_given ? "given" : "recipe " + o_.recipe});
  }
  // One that no recipe decides.
  template <typename T>
  void plain(const char* name, const T& field) {
    list_.push_back({name, fmt::format("{}", field), given(name) ? "given" : "default"});
  }
  std::vector<Setting> list() { return std::move(list_); }

 private:
  bool given(const std::string& name) const { return std::find(o_.given.begin(), o_.given.end(), name) != o_.given.end(); }

  TrainOptions& o_;
  bool speculators_;
  std::vector<Setting> list_;
};

}  // namespace

std::vector<Setting> apply_recipe(TrainOptions& o) {
  if (o.recipe != "deepspec" && o.recipe != "speculators") fail_usage("--recipe {}: deepspec or speculators", o.recipe);
  const bool dflash = o.algorithm == "dflash";
  Settings s(o);
  s.plain("algorithm", o.algorithm);
  s.plain("layers", o.layers);
  s.both("block", o.block, 7, dflash ? 16 : 8);
  s.both("layer-types", o.layer_types, "full", "sliding");
  s.both("window", o.window, 0, 2048);
  s.both("window-rule", o.window_rule, "served", "anchor");
  s.both("layout", o.layout, "anchor", dflash ? "bonus" : "anchor");
  s.plain("markov", o.markov);
  s.plain("rank", o.rank);
  s.plain("draft-vocab", o.draft_vocab);
  s.both("warm-start", o.warm_start, "target", "none");
  s.both("weights", o.weights, "deepspec", "speculators");
  // DeepSpec's dflash preset is cross-entropy alone; speculators' is that with D-PACE.
  s.both("loss", o.loss, dflash ? "ce=1" : "ce=0.1,tv=1.8,conf=1", dflash ? "ce=1" : "kl=1,conf=1");
  s.both("decay", o.decay, 4.0, 4.0);
  s.both("dpace", o.dpace, 0.0, dflash ? 0.5 : 0.0);
  s.both("denominator", o.denominator, "pooled", "count");
  s.both("slots", o.slots, "label-prefix", "row-mask");
  s.both("label", o.label, "data", "target");
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
  s.plain("batch-docs", o.batch_docs);
  s.plain("row-tokens", o.row_tokens);
  s.plain("seed", o.common.seed);
  s.plain("precision", o.common.precision);
  return s.list();
}

}  // namespace dspark::job
