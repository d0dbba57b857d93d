#include "commands.h"
#include "job/bench_gemm.h"
#include "job/common.h"

#include <nlohmann/json.hpp>

namespace dspark::cmd {

void add_bench(CLI::App& app) {
  struct Options {
    std::string what, kernel = "auto", json;
    int threads = 0;
  };
  auto o = std::make_shared<Options>();
  CLI::App* sub = app.add_subcommand("bench", "what this machine and these kernels reach, against their limits");
  sub->add_option("what", o->what, "gemm")->required()->check(CLI::IsMember({"gemm"}));
  sub->add_option("--cpu-kernel", o->kernel, "matrix kernel")->capture_default_str();
  sub->add_option("--threads", o->threads, "worker threads (0: all usable cores)")->capture_default_str()->check(CLI::NonNegativeNumber);
  sub->add_option("--json", o->json, "JSON lines into FILE, or - for stdout")->type_name("FILE|-");
  sub->callback([o] {
    job::BenchGemmOptions options;
    options.kernel = o->kernel, options.threads = o->threads;
    job::JsonLines json(o->json);
    const auto results = job::bench_gemm(options);
    for (const auto& r : results)
      json.write(OrderedJson{{"what", r.what}, {"value", r.value}, {"unit", r.unit}, {"limit", r.limit}, {"share_of_limit", r.share_of_limit}, {"samples", r.samples}, {"kernel", r.kernel}, {"device", r.device}});
    if (o->json != "-") fmt::print("{}", job::bench_table(results));
  });
}

}  // namespace dspark::cmd
