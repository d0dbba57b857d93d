#include "job/train_plan.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "job/bench_machine.h"
#include "job/plan.h"
#include "job/shapes.h"
#include "job/train_choices.h"
#include "model/drafter_names.h"

namespace dspark::job {

using namespace model;

namespace {

constexpr double kZstdRatio = 1.42;  // of bf16 states in byte planes (DESIGN 12)

Precision precision_of(const TrainOptions& o) {
  if (o.common.precision != "bf16" && o.common.precision != "fp32") fail_usage("--plan predicts bf16 and fp32, not --precision {}", o.common.precision);
  return parse_precision(o.common.precision);
}

void print_plan(const TrainOptions& o, PlanInput in) {
  PlanOptions options = o.planning;
  if (options.ranks < 1) fail_usage("--ranks {}: at least 1", options.ranks);
  if (options.codec_ratio > 0) in.codec_ratio = options.codec_ratio, in.codec = "given";
  in.precision = precision_of(o);
  in.optimizer = optimizer_options(o);
  JsonLines json(o.common.json);
  const Machine machine = options.machine == "this" ? measure_machine(o.common) : find_machine(options.machine, in.precision);
  const Plan plan = make_plan(in, options, machine);
  json.write(plan_json(plan, in, options, machine));
  json.finish();
  if (o.common.json != "-") fmt::print("{}", plan_text(plan, in, options, machine));
}

}  // namespace

void adopt_shape(TrainOptions& o) {
  const Shape shape = find_shape(o.planning.shape, o.row_tokens, o.anchors);
  const DrafterConfig& c = shape.config;
  const auto adopt = [&](const char* name, auto& field, auto value) {
    if (!o.was_given(name)) field = value;
  };
  adopt("layers", o.layers, c.n_layers());
  if (!o.was_given("layer-types") && !o.was_given("layers")) {
    o.layer_types = layer_type_names(c.layers);
  } else if (!o.was_given("layer-types")) {
    o.layer_types = layer_type_name(c.layers.front());
  }
  adopt("window", o.window, c.window);
  adopt("block", o.block, c.block);
  adopt("rank", o.rank, c.rank > 0 ? c.rank : o.rank);
  adopt("markov", o.markov, std::string(markov_name(c.markov)));
  adopt("no-confidence", o.no_confidence, !c.confidence);
  adopt("draft-vocab", o.draft_vocab, c.draft_vocab);
  adopt("layout", o.layout, std::string(layout_name(c.sample_from_anchor)));
  adopt("row-tokens", o.row_tokens, shape.row_tokens);
  adopt("anchors", o.anchors, shape.anchors);
}

void plan_shape(const TrainOptions& o, const train::Objective& objective) {
  if (o.epochs > 0) fail_usage("--epochs needs the documents of a store; give --steps with --shape");
  if (!o.stores.empty() || !o.target.empty()) fail_usage("--shape stands for a target and a store; leave out --target and --store, or --shape");
  Shape shape = find_shape(o.planning.shape, o.row_tokens, o.anchors);
  DrafterConfig& c = shape.config;
  const train::NewDrafter d = new_drafter(o);
  c.algorithm = d.algorithm;
  c.layers = d.layer_types, c.window = d.window, c.block = d.block;
  c.rank = d.rank, c.markov = d.markov, c.confidence = d.confidence;
  c.confidence_with_markov = c.confidence_with_markov && c.rank > 0;
  c.sample_from_anchor = d.sample_from_anchor;
  c.sliding_causal = d.sliding_causal;
  c.draft_vocab = o.draft_vocab > 0 ? std::min(o.draft_vocab, c.vocab) : c.vocab;
  validate(c);
  if (o.anchors >= o.row_tokens) fail_usage("--anchors {}: fewer than the row's tokens ({})", o.anchors, o.row_tokens);
  PlanInput in;
  in.name = o.planning.shape;
  in.config = c;
  in.objective = objective;
  if (!c.confidence) in.objective.coef[kConf] = 0;
  in.rows = {train::full_row(c, o.row_tokens, o.anchors, o.chunk_slots)};
  in.largest = in.rows.front();
  in.rows_per_step = static_cast<double>(o.planning.rows > 0 ? o.planning.rows : std::max<int64_t>(1, o.planning.ranks));
  in.steps = o.steps;
  in.codec_ratio = kZstdRatio, in.codec = "zstd's usual";
  print_plan(o, std::move(in));
}

void plan_run(const TrainOptions& o, const DrafterConfig& config, const train::Objective& objective, const train::Dataset& data, const std::vector<int32_t>& kept,
              int64_t steps, int64_t batch_docs) {
  const train::PackTarget target{&config, draft_ids(kept, config.vocab), {}};
  train::PackOptions pack = pack_options(o);
  pack.tap_noise = 0;
  pack.states = false;
  std::vector<train::Dataset::Draw> documents;
  for (int64_t i = 0; i < batch_docs; ++i) documents.push_back(data.draw(i));
  PlanInput in;
  in.name = o.out.empty() ? "run" : o.out.string();
  in.config = config;
  in.objective = objective;
  in.apply_norm = data.identity().last_state == formats::LastState::pre_norm;
  for (const auto& row : train::make_step_batch(documents, target, pack).rows)
    if (row->batch.plan.n_slots() > 0) in.rows.push_back(row->batch.plan);
  DS_REQUIRE(!in.rows.empty(), "the first step's {} documents hold no supervised slot: nothing to plan", batch_docs);
  in.largest = train::largest_row(config, data, pack);
  in.rows_per_step = static_cast<double>(o.planning.rows > 0 ? o.planning.rows : static_cast<int64_t>(in.rows.size()));
  in.steps = steps;
  double raw = 0, stored = 0;
  for (const auto& d : data.training()) {
    raw += static_cast<double>(d.n_tokens * d.source->row_width() * 2);
    stored += static_cast<double>(d.source->info(d.index).stored_bytes);
  }
  in.codec_ratio = stored > 0 ? raw / stored : 1, in.codec = "the store's";
  print_plan(o, std::move(in));
}

}  // namespace dspark::job
