#include <nlohmann/json.hpp>

#include "commands.h"
#include "core/error.h"
#include "core/stop.h"
#include "job/bench_gemm.h"
#include "job/bench_gemm_table.h"
#include "job/bench_loss.h"
#include "job/bench_optimizer.h"
#include "job/bench_products.h"
#include "job/bench_step.h"
#include "job/common.h"
#include "job/shapes.h"

namespace dspark::cmd {

namespace {

OrderedJson json_of(const job::BenchResult& r) {
  OrderedJson j{{"what", r.what}, {"value", r.value}, {"unit", r.unit}, {"limit", r.limit}, {"share_of_limit", r.share_of_limit}, {"samples", r.samples}, {"kernel", r.kernel}, {"device", r.device}};
  if (r.memory_bytes > 0) j["memory_bytes"] = r.memory_bytes;
  return j;
}

struct Options {
  std::string what, json;
  job::BenchStepOptions step;
  std::vector<std::string> chunk_slot_lists;
  std::vector<int64_t> chunk_slots;
  std::string save;
  double seconds = 0;  // 0: 0.5, or 0.1 with --save
};

void step(const Options& o, job::JsonLines& json) {
  job::BenchStepOptions options = o.step;
  if (o.chunk_slots.size() == 1) options.chunk_slots = o.chunk_slots.front();
  const auto result = job::bench_step(options);
  for (const auto& r : result.results) json.write(json_of(r));
  OrderedJson j{{"what", "memory"}, {"peak_rss_bytes", result.peak_rss_bytes}, {"parameters", result.parameters}, {"trainable", result.trainable},
                {"step_s", result.step_seconds}, {"forward_backward_s", result.forward_backward_seconds}, {"optimizer_s", result.optimizer_seconds}, {"host_s", result.host_seconds}};
  j["predicted"] = OrderedJson{{"step_s", result.predicted_step_seconds}, {"forward_backward_s", result.predicted_forward_backward_seconds}, {"optimizer_s", result.predicted_optimizer_seconds}};
  for (const auto& p : result.parts) j["parts"].push_back({{"part", p.name}, {"measured_s", p.measured}, {"predicted_s", p.predicted}, {"share_of_limit", p.measured > 0 ? p.at_limit / p.measured : 0.0}});
  json.write(j);
  if (o.json != "-") fmt::print("{}", result.text);
}

void print(const Options& o, job::JsonLines& json, const std::vector<job::BenchResult>& results) {
  for (const auto& r : results) json.write(json_of(r));
  if (o.json != "-") fmt::print("{}", job::bench_table(results));
}

void gemm(const Options& o, job::JsonLines& json) {
  if (!o.save.empty()) return print(o, json, job::bench_gemm_table({o.step.shape, o.step.precision, o.step.kernel, o.step.threads, o.seconds > 0 ? o.seconds : 0.1, o.save}));
  job::BenchProductsOptions p{o.step.shape, o.step.precision, o.step.kernel, o.step.device, o.step.tokens, o.step.anchors, o.step.threads, 5, 0.5};
  if (o.seconds > 0) p.seconds_per_product = o.seconds;
  p.large = o.step.shape != "tiny";  // which is there to be quick
  const auto results = job::bench_products(p);
  if (o.json != "-") fmt::print("{}\n", results.front().kernel.empty() ? results.front().device : job::kernel_choice(results.front().kernel));
  print(o, json, results);
}

void loss(const Options& o, job::JsonLines& json) {
  job::BenchLossOptions l{o.step.shape, o.step.precision, o.step.kernel, o.step.device, o.step.tokens, o.step.anchors, o.step.threads, o.step.steps};
  if (!o.chunk_slots.empty()) l.chunk_slots = o.chunk_slots;
  print(o, json, job::bench_loss(l));
}

void run(const Options& o) {
  const bool all = o.what == "all";
  if (!o.save.empty() && o.what != "gemm") fail_usage("--save {}: bench gemm writes the table of kernels", o.save);
  if (!o.save.empty() && o.step.device.starts_with("cuda")) fail_usage("--save {} measures the CPU's kernels, not --device {}; a run on a GPU chooses its own when it starts", o.save, o.step.device);
  if (o.chunk_slots.size() > 1 && o.what == "step") fail_usage("bench step takes one --chunk-slots, bench loss several");
  const StopAtOnce at_once("a measurement that did not end has no result");
  job::JsonLines json(o.json);
  if (all || o.what == "gemm") gemm(o, json);
  if (all || o.what == "loss") loss(o, json);
  if (all || o.what == "optimizer") print(o, json, job::bench_optimizer({o.step.shape, o.step.precision, o.step.kernel, o.step.device, o.step.threads, o.step.steps}));
  if (all || o.what == "step") step(o, json);
  json.finish();
}

}  // namespace

void add_bench(CLI::App& app) {
  auto o = std::make_shared<Options>();
  CLI::App* sub = app.add_subcommand("bench", "what this machine and these kernels reach, against their limits");
  sub->add_option("what", o->what, "gemm (matrix products), loss (the vocabulary loss), optimizer (AdamW, Muon), step (whole training steps), or all of these in turn")
      ->required()
      ->check(CLI::IsMember({"gemm", "loss", "optimizer", "step", "all"}));
  sub->add_option("--cpu-kernel", o->step.kernel, "the CPU's matrix kernel")->capture_default_str();
  sub->add_option("--device", o->step.device, "auto, cpu or cuda[:N]")->capture_default_str();
  sub->add_option("--threads", o->step.threads, "worker threads (0: all usable cores)")->capture_default_str();
  sub->add_option("--json", o->json, "JSON lines into FILE, or - for stdout")->type_name("FILE|-");
  sub->add_option("--save", o->save, "gemm: measure every kernel at --shape's products, write the choices for --gemm-table")->type_name("FILE");
  sub->add_option("--seconds", o->seconds, "gemm: of each measurement (0: 0.5, with --save 0.1)")->capture_default_str();
  const char* group = "The work";
  sub->add_option("--shape", o->step.shape, job::shape_names() + ", or a drafter's config.json")->type_name("NAME|FILE")->capture_default_str()->group(group);
  sub->add_option("--tokens", o->step.tokens, "of the row (0: the shape's)")->capture_default_str()->group(group);
  sub->add_option("--anchors", o->step.anchors, "blocks in the row (0: the shape's)")->capture_default_str()->group(group);
  sub->add_option("--precision", o->step.precision, "bf16 or fp32")->capture_default_str()->group(group);
  sub->add_option("--chunk-slots", o->chunk_slot_lists, "slots whose logits are held at once; several for loss (128,512,2048), one for step (256)")->type_name("N,N,...")->group(group);
  sub->add_option("--steps", o->step.steps, "measured, after one to warm up")->capture_default_str()->group(group);
  sub->add_option("--optimizer", o->step.optimizer, "step: adamw or muon")->capture_default_str()->group(group);
  sub->add_option("--machine", o->step.machine, "step: whose rates predict it: this (measured now), h200, b200, gb300, or a file of peak rates; auto: the GPU's name, else this")
      ->type_name("NAME|FILE")->capture_default_str()->group(group);
  sub->add_flag("--parts", o->step.parts, "step: time every operator, by part, beside its prediction and limit")->group(group);
  sub->callback([o] {
    for (const double n : numbers_of(o->chunk_slot_lists)) o->chunk_slots.push_back(static_cast<int64_t>(n));
    run(*o);
  });
}

}  // namespace dspark::cmd
