#include "job/train.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/hash.h"
#include "core/log.h"
#include "core/stop.h"
#include "formats/store.h"
#include "job/fit.h"
#include "job/gemm_choices.h"
#include "job/init_drafter.h"
#include "job/launch.h"
#include "job/ranks.h"
#include "job/recipe.h"
#include "job/store_tools.h"
#include "job/train_choices.h"
#include "job/train_plan.h"
#include "job/train_watch.h"
#include "train/plan_step.h"
#include "train/trainer.h"

namespace dspark::job {

using namespace model;

namespace {

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
  const auto weights = id.extra.find("weights");
  if (weights == id.extra.end()) return;  // made before stores said it, or by another program
  const std::string here = files.weights_hash();
  DS_REQUIRE(weights->second == here, "{} was extracted from other weights ({}, sampled {}) than {}'s ({}): it is another target's store", store.string(), id.target,
             weights->second.substr(0, 12), files.name(), here.substr(0, 12));
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

std::vector<std::unique_ptr<formats::SampleSource>> open_stores(const TrainOptions& o, const target::TargetFiles& files) {
  const std::vector<int> stated = tap_numbers(o.taps);  // of folders that do not say which layers their states are
  std::vector<std::unique_ptr<formats::SampleSource>> sources;
  for (const auto& path : o.stores) {
    sources.push_back(formats::open_store(path, {.taps = stated}));
    check_store(sources.back()->identity(), files, path);
    require_whole(*sources.back());
  }
  return sources;
}

std::vector<TapLayer> choose_taps(const TrainOptions& o, const std::optional<InitDrafter>& init, const std::vector<int>& stored, int64_t target_layers) {
  DS_REQUIRE(std::find(stored.begin(), stored.end(), formats::kUnknownTap) == stored.end(), "{} does not say which layers its {} states are of: name them with --taps", o.stores.front().string(),
             stored.size());
  if (init && !o.was_given("taps")) return init->taps(stored);
  if (o.taps != "store") return parse_taps(o.taps, target_layers);
  std::vector<TapLayer> taps;
  for (int n : stored) taps.push_back({n});
  return taps;
}

// Tokens of the draft vocabulary, ascending; empty: all of the target's.
std::vector<int32_t> choose_vocabulary(const TrainOptions& o, const std::optional<InitDrafter>& init, const train::Dataset& data, const target::TargetFiles& files) {
  if (const auto own = init ? init->kept() : std::nullopt) return *own;
  const int64_t vocab = files.config().vocab;
  if (o.draft_vocab <= 0 || o.draft_vocab >= vocab) return {};
  return train::choose_draft_vocab(train::count_labels(data, vocab), o.draft_vocab, files.tokenizer().end_tokens());
}

// The target's head (its kept rows) and final norm on the device. A drafter's frozen head that holds the same values is used as it is.
class TargetOnDevice {
 public:
  TargetOnDevice(Context& ctx, Drafter& drafter, const target::TargetFiles& files, const std::vector<float>& head, bool apply_norm) : ctx_(ctx) {
    const DrafterConfig& c = drafter.config();
    const Parameter& own = *drafter.find("lm_head.weight");
    shared_ = !own.trainable && same_values(ctx, own.value, head);
    head_.head.value = shared_ ? own.value : ctx.allocate(ctx.act_dtype(), c.draft_vocab, c.target_hidden);
    if (shared_) head_.head.first_columns_of = &drafter.head;
    else ctx.upload_now(head_.head.value, {head.data(), DType::f32, c.draft_vocab, c.target_hidden, c.target_hidden});
    refresh(ctx, {&head_.head});
    const auto norm = files.tensor("model.norm.weight");
    head_.norm = ctx.allocate(ctx.acc_dtype(), 1, c.target_hidden);
    ctx.upload_now(head_.norm, {norm.data(), DType::f32, 1, c.target_hidden, c.target_hidden});
    head_.eps = files.config().eps;
    head_.apply_norm = apply_norm;
  }
  ~TargetOnDevice() {
    if (!shared_) ctx_.free(head_.head.value);
    ctx_.free(head_.norm);
  }
  TargetOnDevice(const TargetOnDevice&) = delete;
  TargetOnDevice& operator=(const TargetOnDevice&) = delete;
  train::TargetHead& head() { return head_; }

 private:
  Context& ctx_;
  train::TargetHead head_;
  bool shared_ = false;
};

// What must be equal to go on with a run.
OrderedJson run_identity(const TrainOptions& o, const DrafterConfig& c, const std::vector<int32_t>& kept, const train::Dataset& data, int64_t steps, int64_t batch_docs) {
  std::string ids;
  for (const auto& d : data.training()) ids += fmt::format("{:016x}", d.id);
  OrderedJson states;
  for (const auto& s : data.sources()) states[fmt::format("store {}", states.size() + 1)] = OrderedJson::parse(formats::identity_text(s->identity()));
  std::string kept_text;
  for (int32_t id : kept) kept_text += fmt::format("{},", id);
  return OrderedJson{{"drafter", OrderedJson::parse(drafter_config_json(c, {}))}, {"draft_vocabulary", sha256_hex(kept_text)}, {"documents", sha256_hex(ids)}, {"states", states},
                     {"algorithm", o.algorithm}, {"loss", o.loss}, {"layers", o.layers}, {"block", o.block}, {"rank", c.rank}, {"steps", steps}, {"batch_docs", batch_docs},
                     {"row_tokens", o.row_tokens}, {"chunk_slots", o.chunk_slots}, {"anchors", o.anchors}, {"optimizer", o.optimizer}, {"lr", o.lr}, {"muon_lr", o.muon_lr}, {"weight_decay", o.weight_decay}, {"muon_weight_decay", o.muon_weight_decay}, {"clip", o.clip}, {"decay", o.decay},
                     {"warmup", o.warmup}, {"denominator", o.denominator}, {"slots", o.slots}, {"label", o.label}, {"dpace", o.dpace}, {"detach_confidence", o.detach_confidence}, {"tap_noise", o.tap_noise},
                     {"anchors_per", o.anchors_per}, {"schedule", o.schedule}, {"weights", o.weights}, {"precision", o.common.precision}, {"seed", o.common.seed}, {"warm_start", o.warm_start},
                     {"store_weights", o.store_weights}, {"rotary", o.rotary}, {"hidden", c.hidden}, {"init", printable(o.init.string())}, {"init_partial", o.init_partial}};
}

// What differs, objects by their fields: "loss: "ce=1" now, "tv=1" there; ...".
std::string run_difference(const Json& saved, const Json& now, const std::string& prefix = "") {
  std::string text;
  for (const auto& [key, value] : now.items()) {
    const Json there = saved.is_object() ? saved.value(key, Json()) : Json();
    if (there == value) continue;
    const std::string part = value.is_object() && there.is_object() ? run_difference(there, value, prefix + key + ".")
                                                                    : fmt::format("{}{}: {} now, {} there", prefix, key, value.dump(), there.is_null() ? "nothing" : there.dump());
    if (!part.empty()) text += (text.empty() ? "" : "; ") + part;
  }
  return text;
}

void check_same_run(const Json& saved, const OrderedJson& now, const fs::path& out) {
  const std::string difference = run_difference(saved, Json::parse(now.dump()));
  DS_REQUIRE(difference.empty(), "{} holds another run ({}); choose another --out or remove it", out.string(), difference);
}

void train_as(RankSession& session, const TrainOptions& given) {
  TrainOptions o = given;
  std::optional<InitDrafter> init = InitDrafter::open(o);
  const std::vector<Setting> settings = apply_recipe(o, init ? &init->config() : nullptr);
  if (o.print_config) {
    JsonLines json(o.common.json);
    for (const Setting& s : settings) {
      json.write(OrderedJson{{"option", s.name}, {"value", s.is_text ? OrderedJson(s.value) : OrderedJson::parse(s.value)}, {"from", s.source}});
      if (o.common.json != "-") fmt::print("{:<20} {:<24} {}\n", s.name, s.value.empty() ? "-" : s.value, s.source);
    }
    return json.finish();
  }
  if (o.plan && !o.planning.shape.empty()) adopt_shape(o);
  check_options(o);
  make_objective(o, new_drafter(o).confidence);  // wrong --loss terms are said before anything is read
  if (o.plan && !o.planning.shape.empty()) return plan_shape(o, make_objective(o, true));
  if (!o.out.empty()) require_outside_stores(o.out, false, o.stores);
  check_watch_paths(o);
  const bool trains = !o.plan && !o.common.dry_run;
  if (trains && session.launches()) return launch_ranks(o.planning.ranks, o.common.device);
  if (trains) session.meet(o.common, o.rank_timeout_s);
  const double start = now_s();
  const target::TargetFiles files(o.target);
  const train::Dataset data(open_stores(o, files), o.val_fraction, o.common.seed, o.store_weights);
  const auto& identity = data.identity();
  const bool apply_norm = identity.last_state == formats::LastState::pre_norm;
  if (o.val_fraction > 0 && data.validation().empty())
    log_warn("--val-fraction {}: none of the {} documents came to it; nothing is validated (documents go by whole conversations, drawn by the seed)", o.val_fraction, data.training().size());
  if (init) init->check(o, files);
  const std::vector<TapLayer> taps = choose_taps(o, init, identity.taps, files.config().layers);
  const std::vector<int32_t> kept = choose_vocabulary(o, init, data, files);
  train::NewDrafter choice = new_drafter(o);
  if (init && o.mask_token < 0) choice.mask_token = init->mask_token();
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
  if (!o.plan) require_heads(*backend, config.head_dim, "the drafter");
  if (o.plan) return plan_run(o, config, objective, data, kept, steps, batch_docs);
  if (o.common.dry_run) {
    const auto plan = train::plan_step(config, objective, apply_norm, parse_precision(o.common.precision),
                                       train::largest_row(config, data, pack_options(o)));
    JsonLines json(o.common.json);
    json.write(OrderedJson{{"weight_bytes", plan.weight_bytes}, {"arena_bytes", plan.arena_bytes}, {"flops", plan.counts.flops}, {"steps", steps}});
    json.finish();
    if (o.common.json == "-") return;
    fmt::print("weights, masters, gradients  {:>12}\narena of the largest row     {:>12}\nFLOPs of that row            {:>12.4g}\nsteps                        {:>12}\n",
               format_bytes(static_cast<double>(plan.weight_bytes)), format_bytes(static_cast<double>(plan.arena_bytes)), plan.counts.flops, steps);
    return;
  }

  if (!backend->context().device().name().starts_with("cuda")) require_memory(config, parse_precision(o.common.precision), optimizer_options(o));
  Context& ctx = backend->context();
  const std::unique_ptr<Collectives> joined = session.join(ctx);
  Collectives& ranks = joined ? *joined : one_rank();
  JsonLines json(session.first() ? o.common.json : "", JsonLines::Kind::stream);
  make_folder(o.out);
  std::optional<FolderLock> lock;
  if (session.first()) lock.emplace(o.out);
  const OrderedJson run = run_identity(o, config, kept, data, steps, batch_docs);
  const auto checkpoint = train::newest_checkpoint(o.out, ranks);
  if (checkpoint) check_same_run(train::read_checkpoint_state(*checkpoint).value("run", Json::object()), run, o.out);
  else
    DS_REQUIRE(!fs::exists(o.out / "config.json"), "{} holds a drafter but no checkpoint of this run; choose another --out", o.out.string());

  train::Sharing sharing{&ranks, {}, o.planning.grad_wire == "bf16"};
  if (session.several()) sharing.owners = train::plan_owners(config, parse_precision(o.common.precision), optimizer_options(o), ranks.group());
  Drafter drafter(ctx, config, DrafterOptions{.train_embeddings = config.own_embeddings(), .owns = [&](const std::string& name) { return sharing.owns(name); }});
  const TensorValues from_target = train::target_values(files, kept);
  if (init) {
    init->load(drafter, o, from_target);
  } else {
    train::init_random(drafter, from_target, o.common.seed, o.weights == "speculators" ? train::NewWeights::speculators : train::NewWeights::deepspec);
    if (o.warm_start == "target") train::warm_start(drafter, files);
  }
  TargetOnDevice target(ctx, drafter, files, from_target("lm_head.weight"), apply_norm);
  const train::PackTarget pack{&config, draft_ids(kept, config.vocab), select_parts(identity, taps)};
  train::TrainerOptions t;
  t.out = o.out, t.steps = steps, t.batch_docs = batch_docs;
  t.pack = pack_options(o);
  t.schedule = make_schedule(o, steps);
  t.save_every = o.save_every, t.keep = o.keep, t.validate_every = o.validate_every, t.time_limit_s = o.time_limit_s;
  t.max_validation_docs = o.max_validation_docs;
  t.stop_on_nonfinite = o.on_nonfinite == "stop";
  t.config = [&] { return OrderedJson{{"run", run}, {"backend", backend->describe()}, {"kernels", kernels_json(*backend)}}.dump(); };
  t.write_drafter = [&](const fs::path& folder) {
    WriteOptions w;
    w.leave_out = {"embed_tokens.weight", "lm_head.weight"};  // the target's own
    write_drafter(folder, config, kept, device_values(drafter), w);
  };
  t.sharing = sharing;
  std::optional<TrainWatch> watch;  // the first rank's
  t.on_step = [&](const train::StepRecord& r) { watch->step(r); };
  train::Trainer trainer(drafter, target.head(), data, pack, objective, optimizer_options(o), t);
  if (checkpoint) trainer.resume(*checkpoint);
  else choose_kernels(*backend, ranks, [&] { trainer.rehearse(); });
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
  facts.title = printable(fmt::format("{} drafter for {}", config.algorithm, files.name()));
  facts.objective = objective, facts.first_slot = first_slot(config.sample_from_anchor), facts.total_steps = steps, facts.settings = settings;
  facts.run = {{"drafter", drafter_text}, {"data", data_text}};
  facts.machine = {{"backend", backend->describe()}};
  if (session.first()) watch.emplace(o, *backend, json, std::move(facts), checkpoint ? checkpoint->step : 0);
  const auto result = watch ? watch->run(trainer) : trainer.run();
  if (watch) watch->write_json(OrderedJson{{"phase", result.stopped ? "stopped" : "done"}, {"steps", result.steps}, {"skipped", result.skipped}, {"seconds", now_s() - start},
                         {"train_seconds", result.seconds}, {"validation_tau", result.has_validation ? OrderedJson(result.validation.tau()) : OrderedJson()},
                         {"best_step", result.best ? OrderedJson(result.best->checkpoint.step) : OrderedJson()}, {"parameters", parameters}, {"trainable", trainable}, {"peak_rss_bytes", peak_rss_bytes()}});
  if (watch) watch->finish(result);
  if (result.stopped) {
    const std::string saved = fmt::format("checkpoint of step {} written; start the same command again to go on", result.steps);
    if (result.out_of_time) throw Error(fmt::format("stopped after --time-limit {:g}; {}", o.time_limit_s, saved), ExitCode::stopped);
    stopped(saved.c_str());
  }
  if (result.best && o.validate_every > 0)
    log_info("best validation: tau {:.3f} at step {}, kept in {}", result.best->tau, result.best->checkpoint.step, result.best->checkpoint.folder.string());
  log_info("{}: done in {}, drafter in {}", o.out.string(), format_seconds(result.seconds), o.out.string());
}

}  // namespace

void run_train(const TrainOptions& options) {
  RankSession session(options.planning.ranks);
  try {
    train_as(session, options);
  } catch (const std::exception& e) {
    session.abort(e.what());
    throw;
  }
}

}  // namespace dspark::job
