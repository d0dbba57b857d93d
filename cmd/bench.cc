#include "commands.h"
#include "job/bench_gemm.h"
#include "job/bench_step.h"
#include "job/common.h"

#include <nlohmann/json.hpp>

namespace dspark::cmd {

namespace {

void write(job::JsonLines& json, const std::vector<job::BenchResult>& results) {
  for (const auto& r : results)
    json.write(OrderedJson{{"what", r.what}, {"value", r.value}, {"unit", r.unit}, {"limit", r.limit}, {"share_of_limit", r.share_of_limit}, {"samples", r.samples}, {"kernel", r.kernel}, {"device", r.device}});
}

}  // namespace

void add_bench(CLI::App& app) {
  struct Options {
    std::string what, json;
    job::BenchStepOptions step;
  };
  auto o = std::make_shared<Options>();
  CLI::App* sub = app.add_subcommand("bench", "what this machine and these kernels reach, against their limits");
  sub->add_option("what", o->what, "gemm (matrix products at a step's shapes) or step (whole training steps)")->required()->check(CLI::IsMember({"gemm", "step"}));
  sub->add_option("--cpu-kernel", o->step.kernel, "matrix kernel")->capture_default_str();
  sub->add_option("--threads", o->step.threads, "worker threads (0: all usable cores)")->capture_default_str()->check(not_negative());
  sub->add_option("--json", o->json, "JSON lines into FILE, or - for stdout")->type_name("FILE|-");
  const char* step = "step";
  sub->add_option("--shape", o->step.shape, "small (width 576, vocabulary 49152), qwen3-0.6b or tiny")->capture_default_str()->group(step);
  sub->add_option("--tokens", o->step.tokens, "of the row (0: the shape's)")->capture_default_str()->check(not_negative())->group(step);
  sub->add_option("--anchors", o->step.anchors, "blocks in the row (0: the shape's)")->capture_default_str()->check(not_negative())->group(step);
  sub->add_option("--optimizer", o->step.optimizer, "adamw or muon")->capture_default_str()->group(step);
  sub->add_option("--precision", o->step.precision, "bf16 or fp32")->capture_default_str()->group(step);
  sub->add_option("--steps", o->step.steps, "measured, after one to warm up")->capture_default_str()->check(positive())->group(step);
  sub->add_option("--chunk-slots", o->step.chunk_slots, "slots whose logits are held at once")->capture_default_str()->check(positive())->group(step);
  sub->callback([o] {
    job::JsonLines json(o->json);
    if (o->what == "step") {
      const auto result = job::bench_step(o->step);
      write(json, result.results);
      json.write(OrderedJson{{"what", "memory"}, {"peak_rss_bytes", result.peak_rss_bytes}, {"parameters", result.parameters}, {"trainable", result.trainable},
                             {"step_s", result.step_seconds}, {"forward_backward_s", result.forward_backward_seconds}, {"optimizer_s", result.optimizer_seconds}});
      if (o->json != "-") fmt::print("{}", result.text);
      return;
    }
    job::BenchGemmOptions options;
    options.kernel = o->step.kernel, options.threads = o->step.threads;
    const auto results = job::bench_gemm(options);
    write(json, results);
    if (o->json != "-") fmt::print("{}", job::bench_table(results));
  });
}

}  // namespace dspark::cmd
