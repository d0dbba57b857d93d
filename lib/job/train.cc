#include "job/train.h"

#include "job/gemm_choices.h"
#include "job/init_drafter.h"
#include "job/recipe.h"
#include "job/train_watch.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <sstream>

#include "core/error.h"
#include "core/hash.h"
#include "core/log.h"
#include "core/stop.h"
#include "formats/store.h"
#include "job/train_plan.h"
#include "train/init.h"
#include "train/plan_step.h"
#include "train/trainer.h"

namespace dspark::job {

using namespace model;

namespace {

// `--layer-types`: one word for all layers, or one for each, in order.
std::vector<LayerType> layer_types(const TrainOptions& o) {
  std::vector<LayerType> types;
  std::istringstream in(o.layer_types);
  for (std::string word; std::getline(in, word, ',');) {
    if (word != "full" && word != "sliding") fail_usage("--layer-types {}: '{}' is not full or sliding", o.layer_types, word);
    types.push_back(word == "full" ? LayerType::full : LayerType::sliding);
  }
  if (types.size() == 1) types.assign(static_cast<size_t>(std::max<int64_t>(o.layers, 0)), types.front());
  if (static_cast<int64_t>(types.size()) != o.layers) fail_usage("--layer-types {}: {} types for --layers {}", o.layer_types, types.size(), o.layers);
  return types;
}

void check_options(const TrainOptions& o) {
  const bool shape = !o.planning.shape.empty();
  if (shape && !o.plan) fail_usage("--shape {}: a shape can be planned (--plan) or measured ('dspark bench step'); training needs --store and --target", o.planning.shape);
  if (o.planning.ranks != 1 && !o.plan) fail_usage("--ranks {}: this version trains on one rank; --plan says what several would do", o.planning.ranks);
  if (o.stores.empty() && !shape) fail_usage("train needs --store STORE (made by 'dspark extract')");
  if (!o.store_weights.empty() && o.store_weights.size() != o.stores.size()) fail_usage("--store-weights: {} weights for {} stores", o.store_weights.size(), o.stores.size());
  for (double w : o.store_weights)
    if (!(w >= 0 && w <= 1000)) fail_usage("--store-weights {}: from 0 to 1000 visits an epoch", w);
  if (o.target.empty() && !shape) fail_usage("train needs --target TARGET");
  if (o.out.empty() && !o.plan) fail_usage("train needs --out DIR");
  if (o.algorithm != "dspark" && o.algorithm != "dflash") fail_usage("--algorithm {}: dspark or dflash", o.algorithm);
  if (o.markov != "vanilla" && o.markov != "gated" && o.markov != "rnn" && o.markov != "none") fail_usage("--markov {}: vanilla, gated, rnn or none", o.markov);
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
  {
    const auto& names = train::kTermNames;
    std::istringstream in(o.loss);
    for (std::string part; std::getline(in, part, ',');) {
      const size_t eq = part.find('=');
      const auto it = std::find(std::begin(names), std::end(names), part.substr(0, eq));
      char* end = nullptr;
      const double v = eq == std::string::npos ? 0 : std::strtod(part.c_str() + eq + 1, &end);
      if (it == std::end(names) || eq == std::string::npos || end == part.c_str() + eq + 1 || *end != 0 || !(v >= 0))
        fail_usage("--loss {}: '{}' is not TERM=WEIGHT with a term of ce, tv, kl, rkl, jsd, nla, lk_hybrid, conf", o.loss, part);
      objective.coef[static_cast<size_t>(it - std::begin(names))] = v;
    }
    if (!confidence) objective.coef[kConf] = 0;
  }
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

// Which store columns are the drafter's taps, and the last state.
std::vector<int> select_parts(const formats::StoreIdentity& id, const std::vector<TapLayer>& taps) {
  std::vector<int> parts;
  for (TapLayer t : taps) {
    const auto it = std::find(id.taps.begin(), id.taps.end(), t.n);
    DS_REQUIRE(it != id.taps.end(), "the store does not hold the state after {} layers; it has {}", t.n, fmt::join(id.taps, " "));
    parts.push_back(static_cast<int>(it - id.taps.begin()));
  }
  parts.push_back(static_cast<int>(id.taps.size()));
  return parts;
}

void check_store(const formats::StoreIdentity& id, const target::TargetFiles& files, const fs::path& store) {
  const auto& c = files.config();
  DS_REQUIRE(id.hidden_size == c.hidden, "{} holds states of width {}, the target {} has {}: it is another target's store", store.string(), id.hidden_size, files.name(), c.hidden);
  DS_REQUIRE(id.config_hash.empty() || id.config_hash == files.config_hash(), "{} was extracted from {} (config {}), not from {} (config {})", store.string(), id.target,
             id.config_hash.substr(0, 12), files.name(), files.config_hash().substr(0, 12));
  DS_REQUIRE(id.tokenizer_hash.empty() || id.tokenizer_hash == files.tokenizer().identity(), "{} was made with another tokenizer ({}) than {}'s ({})", store.string(),
             id.tokenizer_hash.substr(0, 12), files.name(), files.tokenizer().identity().substr(0, 12));
}

// Whether a tensor holds these values as its dtype rounds them.
bool same_values(Context& ctx, const Tensor& t, const std::vector<float>& values) {
  if (t.size() != static_cast<int64_t>(values.size())) return false;
  std::vector<float> there(values.size());
  ctx.download_now({there.data(), DType::f32, t.rows, t.cols, t.cols}, t);
  const bool half = t.dtype == DType::bf16;
  for (size_t i = 0; i < values.size(); ++i)
    if (there[i] != (half ? to_float(to_bf16(values[i])) : values[i])) return false;
  return true;
}

// What must be equal to go on with a run.
OrderedJson run_identity(const TrainOptions& o, const DrafterConfig& c, const std::vector<int32_t>& kept, const train::Dataset& data, int64_t steps, int64_t batch_docs) {
  WriteOptions w;
  std::string ids;
  for (const auto& d : data.training()) ids += fmt::format("{:016x}", d.id);
  std::string kept_text;
  for (int32_t id : kept) kept_text += fmt::format("{},", id);
  return OrderedJson{{"drafter", sha256_hex(drafter_config_json(c, w))}, {"draft_vocabulary", sha256_hex(kept_text)}, {"documents", sha256_hex(ids)},
                     {"algorithm", o.algorithm}, {"loss", o.loss}, {"layers", o.layers}, {"block", o.block}, {"rank", c.rank}, {"steps", steps}, {"batch_docs", batch_docs},
                     {"row_tokens", o.row_tokens}, {"chunk_slots", o.chunk_slots}, {"anchors", o.anchors}, {"optimizer", o.optimizer}, {"lr", o.lr}, {"muon_lr", o.muon_lr}, {"weight_decay", o.weight_decay}, {"muon_weight_decay", o.muon_weight_decay}, {"clip", o.clip}, {"decay", o.decay},
                     {"warmup", o.warmup}, {"denominator", o.denominator}, {"slots", o.slots}, {"label", o.label}, {"dpace", o.dpace}, {"detach_confidence", o.detach_confidence}, {"tap_noise", o.tap_noise},
                     {"anchors_per", o.anchors_per}, {"schedule", o.schedule}, {"weights", o.weights}, {"precision", o.common.precision}, {"seed", o.common.seed}, {"warm_start", o.warm_start},
                     {"store_weights", o.store_weights}, {"rotary", o.rotary}, {"hidden", c.hidden}, {"init", o.init.string()}, {"init_partial", o.init_partial}};
}

void check_same_run(const Json& saved, const OrderedJson& now, const fs::path& out) {
  std::string difference;
  for (const auto& [key, value] : now.items()) {
    const Json wanted = Json::parse(value.dump());
    if (!saved.contains(key) || saved.at(key) != wanted)
      difference += fmt::format("{}{}: {} now, {} there", difference.empty() ? "" : "; ", key, value.dump(), saved.contains(key) ? saved.at(key).dump() : "nothing");
  }
  DS_REQUIRE(difference.empty(), "{} holds another run ({}); choose another --out or remove it", out.string(), difference);
}

}  // namespace

void run_train(const TrainOptions& given) {
  TrainOptions o = given;
  std::optional<InitDrafter> init = InitDrafter::open(o);
  const std::vector<Setting> settings = apply_recipe(o, init ? &init->config() : nullptr);
  if (o.print_config) {
    for (const Setting& s : settings) fmt::print("{:<20} {:<24} {}\n", s.name, s.value.empty() ? "-" : s.value, s.source);
    return;
  }
  if (o.plan && !o.planning.shape.empty()) adopt_shape(o);
  check_options(o);
  make_objective(o, true);  // wrong --loss terms are said before anything is read
  if (o.plan && !o.planning.shape.empty()) return plan_shape(o, make_objective(o, true), layer_types(o));
  check_watch_paths(o);
  const double start = now_s();
  const target::TargetFiles files(o.target);
  std::vector<std::unique_ptr<formats::SampleSource>> sources;
  for (const auto& path : o.stores) {
    sources.push_back(formats::open_store(path));
    check_store(sources.back()->identity(), files, path);
    for (const auto& p : sources.back()->problems()) log_warn("{}: {}", path.string(), p.text());
  }
  const train::Dataset data(std::move(sources), o.val_fraction, o.common.seed, o.store_weights);
  const auto& identity = data.identity();
  std::vector<TapLayer> taps;
  if (init) init->check(o, files);
  if (init && !o.was_given("taps")) taps = init->taps(identity.taps);
  else if (o.taps == "store")
    for (int n : identity.taps) taps.push_back({n});
  else taps = parse_taps(o.taps, files.config().layers);

  std::vector<int32_t> kept;
  const auto own_vocabulary = init ? init->kept() : std::nullopt;
  if (own_vocabulary) kept = *own_vocabulary;
  else if (o.draft_vocab > 0 && o.draft_vocab < files.config().vocab)
    kept = train::choose_draft_vocab(train::count_labels(data, files.config().vocab), o.draft_vocab, files.tokenizer().end_tokens());
  train::NewDrafter choice;
  const bool dflash = o.algorithm == "dflash";
  choice.algorithm = o.algorithm;
  choice.layers = o.layers, choice.block = o.block, choice.window = o.window;
  choice.rank = dflash || o.markov == "none" ? 0 : o.rank;
  choice.markov = o.markov == "gated" ? Markov::gated : o.markov == "rnn" ? Markov::rnn : Markov::vanilla;
  choice.confidence = choice.rank > 0 && !o.no_confidence;
  choice.layer_types = layer_types(o);
  choice.sliding_causal = !o.non_causal;
  choice.window_by_anchor = o.window_rule == "anchor";
  choice.sample_from_anchor = o.layout == "anchor";
  choice.mask_token = init && o.mask_token < 0 ? init->mask_token() : o.mask_token;
  choice.hidden = o.hidden;
  choice.rotary = o.rotary == "served" ? formats::Rotary::served : formats::Rotary::reference;
  choice.like = init ? &init->config() : nullptr;
  const DrafterConfig config = train::drafter_config_for(files, choice, taps, static_cast<int64_t>(kept.size()));
  if (init) init->check_fit(o, config);
  if (config.own_embeddings() && !o.was_given("warm-start")) o.warm_start = "none";  // nothing of the target's has this width
  const train::Objective objective = make_objective(o, config.confidence);

  const int64_t batch_docs = o.batch_docs > 0 ? o.batch_docs : std::min<int64_t>(512, std::max<int64_t>(1, static_cast<int64_t>(data.training().size()) / 8));
  const auto n_docs = static_cast<int64_t>(data.training().size());
  const int64_t steps = o.steps > 0 ? o.steps : std::max<int64_t>(1, static_cast<int64_t>(std::llround(o.epochs * static_cast<double>(data.epoch_size()) / static_cast<double>(batch_docs))));
  if (!o.plan) adopt_kernels(o.common, o.out);
  auto backend = make_job_backend(o.common);
  if (o.plan) return plan_run(o, config, objective, data, kept, steps, batch_docs);
  if (o.common.dry_run) {
    const int64_t context = std::max(o.row_tokens, data.longest());
    const auto plan = train::plan_step(config, objective, identity.last_state == formats::LastState::pre_norm,
                                       o.common.precision == "bf16" ? Precision::bf16 : o.common.precision == "fp32" ? Precision::fp32 : Precision::fp64, context, context, o.chunk_slots);
    fmt::print("weights, masters, gradients  {:>12}\narena of the largest row     {:>12}\nFLOPs of that row            {:>12.4g}\nsteps                        {:>12}\n",
               format_bytes(static_cast<double>(plan.weight_bytes)), format_bytes(static_cast<double>(plan.arena_bytes)), plan.counts.flops, steps);
    return;
  }

  make_folder(o.out);
  const FolderLock lock(o.out);
  const OrderedJson run = run_identity(o, config, kept, data, steps, batch_docs);
  const auto checkpoint = train::newest_checkpoint(o.out);
  if (checkpoint) check_same_run(train::read_checkpoint_state(*checkpoint).at("run"), run, o.out);
  else
    DS_REQUIRE(!fs::exists(o.out / "config.json"), "{} holds a drafter but no checkpoint of this run; choose another --out", o.out.string());
  JsonLines json(o.common.json);

  Context& ctx = backend->context();
  Drafter drafter(ctx, config, DrafterOptions{.train_embeddings = config.own_embeddings()});
  const TensorValues from_target = train::target_values(files, kept);
  if (init) {
    init->load(drafter, o, from_target);
  } else {
    train::init_random(drafter, from_target, o.common.seed, o.weights == "speculators" ? train::NewWeights::speculators : train::NewWeights::deepspec);
    if (o.warm_start == "target") train::warm_start(drafter, files);
  }
  train::TargetHead target;
  const auto head = from_target("lm_head.weight");
  const Tensor own_head = drafter.find("lm_head.weight")->value;
  const bool shared = !drafter.find("lm_head.weight")->trainable && same_values(ctx, own_head, head);  // its copy of the target's head
  target.head.value = shared ? own_head : ctx.allocate(ctx.act_dtype(), config.draft_vocab, config.target_hidden);
  if (!shared) ctx.upload_now(target.head.value, {head.data(), DType::f32, config.draft_vocab, config.target_hidden, config.target_hidden});
  if (shared) target.head.first_columns_of = &drafter.head;
  refresh(ctx, {&target.head});
  const auto norm = files.tensor("model.norm.weight");
  target.norm = ctx.allocate(ctx.acc_dtype(), 1, config.target_hidden);
  ctx.upload_now(target.norm, {norm.data(), DType::f32, 1, config.target_hidden, config.target_hidden});
  target.eps = files.config().eps;
  target.apply_norm = identity.last_state == formats::LastState::pre_norm;

  train::PackTarget pack{&config, {}, select_parts(identity, taps)};
  if (!kept.empty()) {
    pack.draft_id.assign(static_cast<size_t>(config.vocab), -1);
    for (size_t i = 0; i < kept.size(); ++i) pack.draft_id[static_cast<size_t>(kept[i])] = static_cast<int32_t>(i);
  }
  train::OptimizerOptions optimizer;
  optimizer.weight_decay = o.weight_decay, optimizer.clip = o.clip;
  optimizer.muon = o.optimizer == "muon";
  optimizer.muon_weight_decay = o.muon_weight_decay;
  optimizer.muon_lr_factor = o.muon_lr > 0 ? o.muon_lr / o.lr : 1.0;
  train::TrainerOptions t;
  t.out = o.out, t.steps = steps, t.batch_docs = batch_docs;
  t.pack = {o.row_tokens, o.anchors, o.chunk_slots, o.decay, o.common.seed, objective.slots, o.anchors_per == "row", o.tap_noise};
  using Kind = train::Schedule::Kind;
  const Kind kind = o.schedule == "cosine" ? Kind::cosine : o.schedule == "linear" ? Kind::linear : o.schedule == "half-cosine" ? Kind::half_cosine : Kind::constant;
  t.schedule = {kind, o.lr, steps, train::deepspec_warmup(o.warmup, steps), 0.5};
  t.save_every = o.save_every, t.keep = o.keep, t.validate_every = o.validate_every, t.time_limit_s = o.time_limit_s;
  t.max_validation_docs = o.max_validation_docs;
  t.stop_on_nonfinite = o.on_nonfinite == "stop";
  t.config = OrderedJson{{"run", run}, {"backend", backend->describe()}, {"kernels", kernels_json(*backend)}}.dump();
  t.write_drafter = [&](const fs::path& folder) {
    WriteOptions w;
    w.leave_out = {"embed_tokens.weight", "lm_head.weight"};  // the target's own
    write_drafter(folder, config, kept, device_values(drafter), w);
  };
  std::optional<TrainWatch> watch;
  t.on_step = [&](const train::StepRecord& r) { watch->step(r); };
  train::Trainer trainer(drafter, target, data, pack, objective, optimizer, t);
  if (checkpoint) trainer.resume(*checkpoint);
  int64_t trainable = 0, parameters = 0;
  for (const auto& p : drafter.parameters()) {
    parameters += p.value.size();
    trainable += p.trainable ? p.value.size() : 0;
  }
  const std::string drafter_text = fmt::format("{} layers, block {}, rank {}, {} of {} tokens; {} parameters, {} trained", config.n_layers(), config.block, config.rank,
                                               config.draft_vocab, config.vocab, parameters, trainable);
  const std::string data_text = fmt::format("{} documents ({} for validation, {} without an anchor), {} steps of {} documents, arena {}", n_docs, data.validation().size(), data.unused(), steps, batch_docs,
                                            format_bytes(static_cast<double>(trainer.arena_bytes())));
  log_info("{}: {}; {}", config.algorithm, drafter_text, backend->describe());
  log_info("{}", data_text);
  if (checkpoint) log_info("resuming {} at step {}", o.out.string(), checkpoint->step);
  ReportFacts facts;
  facts.title = fmt::format("{} drafter for {}", config.algorithm, files.name());
  facts.objective = objective, facts.first_slot = first_slot(config.sample_from_anchor), facts.total_steps = steps, facts.settings = settings;
  facts.run = {{"drafter", drafter_text}, {"data", data_text}};
  facts.machine = {{"backend", backend->describe()}};
  watch.emplace(o, json, std::move(facts), checkpoint ? checkpoint->step : 0);
  const auto result = watch->run(trainer);
  if (!shared) ctx.free(target.head.value);
  ctx.free(target.norm);
  json.write(OrderedJson{{"phase", result.stopped ? "stopped" : "done"}, {"steps", result.steps}, {"skipped", result.skipped}, {"seconds", now_s() - start},
                         {"train_seconds", result.seconds}, {"validation_tau", result.has_validation ? result.validation.tau() : 0.0},
                         {"best_step", result.best ? result.best->checkpoint.step : -1}, {"parameters", parameters}, {"trainable", trainable}, {"peak_rss_bytes", peak_rss_bytes()}});
  watch->finish(result);
  if (result.stopped) stopped(fmt::format("checkpoint of step {} written; start the same command again to go on", result.steps).c_str());
  if (result.best && o.validate_every > 0)
    log_info("best validation: tau {:.3f} at step {}, kept in {}", result.best->tau, result.best->checkpoint.step, result.best->checkpoint.folder.string());
  log_info("{}: done in {}, drafter in {}", o.out.string(), format_seconds(result.seconds), o.out.string());
}

}  // namespace dspark::job
