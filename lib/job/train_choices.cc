#include "job/train_choices.h"

#include <algorithm>
#include <set>

#include "core/error.h"
#include "model/drafter_names.h"

namespace dspark::job {

using namespace model;

std::vector<LayerType> layer_types(const TrainOptions& o) {
  std::vector<LayerType> types;
  for (const std::string& word : split_list(o.layer_types)) {
    const auto type = parse_layer_type(word);
    if (!type) fail_usage("--layer-types {}: '{}' is not full or sliding", o.layer_types, word);
    types.push_back(*type);
  }
  if (types.size() == 1) types.assign(static_cast<size_t>(std::max<int64_t>(o.layers, 0)), types.front());
  if (static_cast<int64_t>(types.size()) != o.layers) fail_usage("--layer-types {}: {} types for --layers {}", o.layer_types, types.size(), o.layers);
  return types;
}

void check_options(const TrainOptions& o) {
  const bool shape = !o.planning.shape.empty();
  if (shape && !o.plan) fail_usage("--shape {}: a shape can be planned (--plan) or measured ('dspark bench step'); training needs --store and --target", o.planning.shape);
  if (o.planning.grad_wire != "fp32" && o.planning.grad_wire != "bf16") fail_usage("--grad-wire {}: fp32 or bf16", o.planning.grad_wire);
  if (o.stores.empty() && !shape) fail_usage("train needs --store STORE (made by 'dspark extract')");
  if (!o.store_weights.empty() && o.store_weights.size() != o.stores.size()) fail_usage("--store-weights: {} weights for {} stores", o.store_weights.size(), o.stores.size());
  for (double w : o.store_weights)
    if (!(w >= 0 && w <= 1000)) fail_usage("--store-weights {}: from 0 to 1000 visits an epoch", w);
  if (o.target.empty() && !shape) fail_usage("train needs --target TARGET");
  if (o.out.empty() && !o.plan) fail_usage("train needs --out DIR");
  if (o.algorithm != "dspark" && o.algorithm != "dflash") fail_usage("--algorithm {}: dspark or dflash", o.algorithm);
  if (!parse_markov(o.markov)) fail_usage("--markov {}: vanilla, gated, rnn or none", o.markov);
  if (o.algorithm == "dflash" && o.was_given("markov") && o.markov != "none") fail_usage("--algorithm dflash has no Markov head, --markov {} asks for one: give one of them", o.markov);
  if (o.optimizer != "adamw" && o.optimizer != "muon") fail_usage("--optimizer {}: adamw or muon", o.optimizer);
  if (o.layout != "anchor" && o.layout != "bonus") fail_usage("--layout {}: anchor or bonus", o.layout);
  if (o.warm_start != "target" && o.warm_start != "none") fail_usage("--warm-start {}: target or none", o.warm_start);
  if (o.rotary != "served" && o.rotary != "reference") fail_usage("--rotary {}: served or reference", o.rotary);
  if (o.hidden < 0) fail_usage("--hidden {}: a width, or 0 for the target's", o.hidden);
  if (o.init_partial && o.init.empty()) fail_usage("--init-partial goes with --init DRAFTER");
  if (!o.init.empty() && o.was_given("warm-start") && o.warm_start == "target") fail_usage("--warm-start target starts a new drafter, --init goes on with one: give one of them");
  if (o.window_rule != "served" && o.window_rule != "anchor") fail_usage("--window-rule {}: served or anchor", o.window_rule);
  if (o.denominator != "pooled" && o.denominator != "micro" && o.denominator != "count") fail_usage("--denominator {}: pooled, micro or count", o.denominator);
  if (o.slots != "label-prefix" && o.slots != "row-mask") fail_usage("--slots {}: label-prefix or row-mask", o.slots);
  if (o.label != "data" && o.label != "target") fail_usage("--label {}: data or target", o.label);
  if (o.anchors_per != "document" && o.anchors_per != "row") fail_usage("--anchors-per {}: document or row", o.anchors_per);
  if (o.schedule != "cosine" && o.schedule != "linear" && o.schedule != "half-cosine" && o.schedule != "constant") fail_usage("--schedule {}: cosine, linear, half-cosine or constant", o.schedule);
  if (o.on_nonfinite != "skip" && o.on_nonfinite != "stop") fail_usage("--on-nonfinite {}: skip or stop", o.on_nonfinite);
  if (o.weights != "deepspec" && o.weights != "speculators") fail_usage("--weights {}: deepspec or speculators", o.weights);
  if (o.layers < 1) fail_usage("--layers {}: a drafter has at least one layer", o.layers);
  if (o.block < 1 || (o.layout == "bonus" && o.block < 2)) fail_usage("--block {}: at least 1 (2 with --layout bonus)", o.block);
  if (o.markov != "none" && o.algorithm == "dspark" && o.rank < 1) fail_usage("--rank {}: at least 1, or --markov none", o.rank);
  if (o.was_given("steps") && o.was_given("epochs")) fail_usage("--steps {} and --epochs {}: give one of them", o.steps, o.epochs);
  if (o.steps < 0 || o.epochs < 0 || (o.steps == 0 && o.epochs == 0 && !shape)) fail_usage("train needs --steps N or --epochs E");
  const auto types = layer_types(o);
  if (std::count(types.begin(), types.end(), LayerType::sliding) > 0 && o.window < 1) fail_usage("--layer-types {} needs --window W", o.layer_types);
  if (o.val_fraction < 0 || o.val_fraction >= 1) fail_usage("--val-fraction {}: in [0, 1)", o.val_fraction);
  if (o.lr <= 0) fail_usage("--lr {}: must be positive", o.lr);
  if (o.muon_lr < 0) fail_usage("--muon-lr {}: must not be negative", o.muon_lr);
  if (o.batch_docs < 0) fail_usage("--batch-docs {}: at least 1", o.batch_docs);
}

train::Objective make_objective(const TrainOptions& o, bool confidence) {
  train::Objective objective;
  std::set<size_t> said;
  const auto& names = train::kTermNames;
  for (const std::string& part : split_list(o.loss)) {
    const size_t eq = part.find('=');
    const auto it = std::find(std::begin(names), std::end(names), part.substr(0, eq));
    char* end = nullptr;
    const double v = eq == std::string::npos ? 0 : std::strtod(part.c_str() + eq + 1, &end);
    if (it == std::end(names) || eq == std::string::npos || end == part.c_str() + eq + 1 || *end != 0 || !(v >= 0))
      fail_usage("--loss {}: '{}' is not TERM=WEIGHT with a term of ce, tv, kl, rkl, jsd, nla, lk_hybrid, conf", o.loss, part);
    if (v > 1e18) fail_usage("--loss {}: '{}', expected a weight from 0 to 1e+18", o.loss, part);
    const auto term = static_cast<size_t>(it - std::begin(names));
    if (!said.insert(term).second) fail_usage("--loss {}: {} stands there twice", o.loss, *it);
    objective.coef[term] = v;
  }
  if (!confidence) objective.coef[kConf] = 0;
  if (std::all_of(objective.coef.begin(), objective.coef.end(), [](double v) { return v == 0; }))
    fail_usage("--loss {}: nothing of it trains this drafter{}; give a term a weight above 0", o.loss, confidence ? "" : " (it has no confidence head)");
  objective.gamma = o.decay;
  objective.denominator = o.denominator == "micro" ? train::Denominator::micro : o.denominator == "count" ? train::Denominator::count : train::Denominator::pooled;
  objective.slots = o.slots == "row-mask" ? SlotRule::row_mask : SlotRule::label_prefix;
  objective.label_from_target = o.label == "target";
  objective.dpace_alpha = o.dpace;
  objective.detach_confidence = o.detach_confidence;
  if (o.dpace > 0) {
    for (int t = 0; t < kConf; ++t)
      if (t != kCe && objective.coef[static_cast<size_t>(t)] != 0) fail_usage("--dpace weights come from cross-entropy: use it with --loss ce=..., and conf at most (is '{}')", o.loss);
    if (o.denominator != "count") fail_usage("--dpace {}: its weights are known after the forward only; use it with --denominator count", o.dpace);
  }
  return objective;
}

train::NewDrafter new_drafter(const TrainOptions& o) {
  train::NewDrafter d;
  d.algorithm = o.algorithm;
  d.layers = o.layers, d.hidden = o.hidden, d.block = o.block, d.window = o.window;
  d.rank = o.algorithm == "dflash" || o.markov == "none" ? 0 : o.rank;
  d.markov = d.rank == 0 ? Markov::none : *parse_markov(o.markov);
  d.confidence = d.rank > 0 && !o.no_confidence;
  d.layer_types = layer_types(o);
  d.sliding_causal = !o.non_causal;
  d.window_by_anchor = o.window_rule == "anchor";
  d.sample_from_anchor = o.layout == "anchor";
  d.mask_token = o.mask_token;
  d.rotary = o.rotary == "served" ? formats::Rotary::served : formats::Rotary::reference;
  return d;
}

train::OptimizerOptions optimizer_options(const TrainOptions& o) {
  train::OptimizerOptions optimizer;
  optimizer.weight_decay = o.weight_decay, optimizer.clip = o.clip;
  optimizer.muon = o.optimizer == "muon";
  optimizer.muon_weight_decay = o.muon_weight_decay;
  optimizer.muon_lr_factor = o.muon_lr > 0 ? o.muon_lr / o.lr : 1.0;
  return optimizer;
}

train::PackOptions pack_options(const TrainOptions& o) {
  train::PackOptions pack;
  pack.row_tokens = o.row_tokens, pack.anchors = o.anchors, pack.chunk_slots = o.chunk_slots;
  pack.anchors_per_row = o.anchors_per == "row";
  pack.slots = o.slots == "row-mask" ? SlotRule::row_mask : SlotRule::label_prefix;
  pack.gamma = o.decay, pack.tap_noise = o.tap_noise, pack.seed = o.common.seed;
  return pack;
}

train::Schedule make_schedule(const TrainOptions& o, int64_t steps) {
  using Kind = train::Schedule::Kind;
  const Kind kind = o.schedule == "cosine" ? Kind::cosine : o.schedule == "linear" ? Kind::linear : o.schedule == "half-cosine" ? Kind::half_cosine : Kind::constant;
  return {kind, o.lr, steps, train::deepspec_warmup(o.warmup, steps), 0.5};
}

std::vector<int32_t> draft_ids(const std::vector<int32_t>& kept, int64_t vocab) {
  if (kept.empty()) return {};
  std::vector<int32_t> ids(static_cast<size_t>(vocab), -1);
  for (size_t i = 0; i < kept.size(); ++i) ids[static_cast<size_t>(kept[i])] = static_cast<int32_t>(i);
  return ids;
}

}  // namespace dspark::job
