#include "job/train.h"

#include <nlohmann/json.hpp>
#include <optional>

#include "core/error.h"
#include "core/log.h"
#include "core/stop.h"
#include "job/fit.h"
#include "job/gemm_choices.h"
#include "job/init_drafter.h"
#include "job/launch.h"
#include "job/ranks.h"
#include "job/recipe.h"
#include "job/store_tools.h"
#include "job/train_choices.h"
#include "job/train_plan.h"
#include "job/train_setup.h"
#include "job/train_watch.h"
#include "train/plan_step.h"
#include "train/trainer.h"

namespace dspark::job {

using namespace model;

namespace {

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

void print_settings(const TrainOptions& o, const std::vector<Setting>& settings) {
  JsonLines json(o.common.json);
  for (const Setting& s : settings) {
    json.write(OrderedJson{{"option", s.name}, {"value", s.is_text ? OrderedJson(s.value) : OrderedJson::parse(s.value)}, {"from", s.source}});
    if (o.common.json != "-") fmt::print("{:<20} {:<24} {}\n", s.name, s.value.empty() ? "-" : s.value, s.source);
  }
  json.finish();
}

void print_dry_run(const TrainOptions& o, const TrainSetup& setup) {
  const auto plan = train::plan_step(setup.config, setup.objective, setup.apply_norm, parse_precision(o.common.precision),
                                     train::largest_row(setup.config, setup.data, pack_options(o)));
  JsonLines json(o.common.json);
  json.write(OrderedJson{{"weight_bytes", plan.weight_bytes}, {"arena_bytes", plan.memory.total()}, {"flops", plan.counts.flops}, {"steps", setup.steps}});
  json.finish();
  if (o.common.json == "-") return;
  fmt::print("weights, masters, gradients  {:>12}\narena of the largest row     {:>12}\nFLOPs of that row            {:>12.4g}\nsteps                        {:>12}\n",
             format_bytes(static_cast<double>(plan.weight_bytes)), format_bytes(static_cast<double>(plan.memory.total())), plan.counts.flops, setup.steps);
}

train::TrainerOptions trainer_options(const TrainOptions& o, const TrainSetup& setup) {
  train::TrainerOptions t;
  t.out = o.out, t.steps = setup.steps, t.batch_docs = setup.batch_docs;
  t.pack = pack_options(o);
  t.schedule = make_schedule(o, setup.steps);
  t.save_every = o.save_every, t.keep = o.keep, t.validate_every = o.validate_every, t.time_limit_s = o.time_limit_s;
  t.max_validation_docs = o.max_validation_docs;
  t.stop_on_nonfinite = o.on_nonfinite == "stop";
  return t;
}

void train_as(RankSession& session, const TrainOptions& given) {
  TrainOptions o = given;
  std::optional<InitDrafter> init = InitDrafter::open(o);
  const std::vector<Setting> settings = apply_recipe(o, init ? &init->config() : nullptr);
  if (o.print_config) return print_settings(o, settings);
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
  const TrainSetup setup(o, std::move(init));
  const DrafterConfig& config = setup.config;
  if (!o.plan) adopt_kernels(o.common, o.out);
  auto backend = make_job_backend(o.common);
  if (!o.plan) require_heads(*backend, config.head_dim, "the drafter");
  if (o.plan) return plan_run(o, config, setup.objective, setup.data, setup.kept, setup.steps, setup.batch_docs);
  if (o.common.dry_run) return print_dry_run(o, setup);
  if (!backend->context().device().name().starts_with("cuda")) require_memory(config, parse_precision(o.common.precision), optimizer_options(o));
  Context& ctx = backend->context();
  const std::unique_ptr<Collectives> joined = session.join(ctx);
  Collectives& ranks = joined ? *joined : one_rank();
  JsonLines json(session.first() ? o.common.json : "", JsonLines::Kind::stream);
  make_folder(o.out);
  std::optional<FolderLock> lock;
  if (session.first()) lock.emplace(o.out);
  const OrderedJson run = run_identity(o, setup);
  const auto checkpoint = train::newest_checkpoint(o.out, ranks);
  if (checkpoint) check_same_run(train::read_checkpoint_state(*checkpoint).value("run", Json::object()), run, o.out);
  else
    DS_REQUIRE(!fs::exists(o.out / "config.json"), "{} holds a drafter but no checkpoint of this run; choose another --out", o.out.string());

  train::Sharing sharing{&ranks, {}, o.planning.grad_wire == "bf16"};
  if (session.several()) sharing.owners = train::plan_owners(config, parse_precision(o.common.precision), optimizer_options(o), ranks.group());
  Drafter drafter(ctx, config, DrafterOptions{.train_embeddings = config.own_embeddings(), .owns = [&](const std::string& name) { return sharing.owns(name); }});
  const TensorValues from_target = train::target_values(setup.files, setup.kept);
  if (setup.init) {
    setup.init->load(drafter, o, from_target);
  } else {
    train::init_random(drafter, from_target, o.common.seed, o.weights == "speculators" ? train::NewWeights::speculators : train::NewWeights::deepspec);
    if (o.warm_start == "target") train::warm_start(drafter, setup.files);
  }
  TargetOnDevice target(ctx, drafter, setup.files, from_target("lm_head.weight"), setup.apply_norm);
  const train::PackTarget pack{&config, draft_ids(setup.kept, config.vocab), setup.state_parts()};
  train::TrainerOptions t = trainer_options(o, setup);
  t.config = [&] { return OrderedJson{{"run", run}, {"backend", backend->describe()}, {"kernels", kernels_json(*backend)}}.dump(); };
  t.write_drafter = [&](const fs::path& folder) {
    WriteOptions w;
    w.leave_out = {"embed_tokens.weight", "lm_head.weight"};  // the target's own
    write_drafter(folder, config, setup.kept, device_values(drafter), w);
  };
  t.sharing = sharing;
  std::optional<TrainWatch> watch;  // the first rank's
  t.on_step = [&](const train::StepRecord& r) { watch->step(r); };
  train::Trainer trainer(drafter, target.head(), setup.data, pack, setup.objective, optimizer_options(o), t);
  try {
    if (checkpoint) trainer.resume(*checkpoint);
    else choose_kernels(*backend, ranks, [&] { trainer.rehearse(); });
  } catch (const std::exception& e) {
    ranks.abort(e.what());  // now: a GPU that waits for the others would hold up the way back
    throw;
  }
  int64_t trainable = 0, parameters = 0;
  for (const auto& p : drafter.parameters()) {
    parameters += p.value.size();
    trainable += p.trainable ? p.value.size() : 0;
  }
  const std::string drafter_text = fmt::format("{} layers, block {}, rank {}, {} of {} tokens; {} parameters, {} trained", config.n_layers(), config.block, config.rank,
                                               config.draft_vocab, config.vocab, parameters, trainable);
  const std::string data_text = fmt::format("{} documents ({} for validation, {} without an anchor), {} steps of {} documents, arena {}", setup.data.training().size(), setup.data.validation().size(), setup.data.unused(), setup.steps, setup.batch_docs,
                                            format_bytes(static_cast<double>(trainer.arena_bytes())));
  log_info("{}: {}; {}", config.algorithm, drafter_text, backend->describe());
  log_info("{}", data_text);
  if (checkpoint) log_info("resuming {} at step {}", o.out.string(), checkpoint->step);
  ReportFacts facts;
  facts.title = printable(fmt::format("{} drafter for {}", config.algorithm, setup.files.name()));
  facts.objective = setup.objective, facts.first_slot = first_slot(config.sample_from_anchor), facts.total_steps = setup.steps, facts.settings = settings;
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
