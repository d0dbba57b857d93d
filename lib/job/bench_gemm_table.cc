#include "job/bench_gemm_table.h"

#include <map>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/json.h"
#include "job/bench_gemm.h"
#include "job/bench_products.h"
#include "job/common.h"
#include "job/shapes.h"
#include "model/backends.h"
#include "model/ops_cpu/gemm.h"

namespace dspark::job {

using namespace model;

namespace {

constexpr double kWorthChanging = 1.03;  // below is noise

// A weight gradient's kernel is chosen by n alone.
std::vector<GemmShape> products_of(const Shape& shape, Precision precision) {
  std::map<std::tuple<std::string, int64_t, int64_t>, GemmShape> largest;
  const DType type = precision == Precision::bf16 ? DType::bf16 : DType::f32;
  for (const PlanProduct& p : step_products(shape, precision, false)) {
    GemmShape& s = largest[{p.form, p.n, p.form == "tn" ? 0 : p.k}];
    if (p.m * p.k > s.m * s.k) s = {p.form, p.m, p.n, p.k, type, DType::f32};
  }
  std::vector<GemmShape> all;
  for (const auto& [key, s] : largest) all.push_back(s);
  return all;
}

}  // namespace

std::vector<BenchResult> bench_gemm_table(const GemmTableOptions& o) {
  if (o.precision != "bf16" && o.precision != "fp32") fail_usage("--precision {}: bf16 or fp32", o.precision);
  const Shape shape = find_shape(o.shape);
  AtomicFile file(o.save);  // before the work
  const std::string usual(model::cpu::select_kernel(o.kernel).name());
  OrderedJson choices = OrderedJson::array();
  std::vector<BenchResult> results;
  for (const GemmShape& s : products_of(shape, parse_precision(o.precision))) {
    BenchGemmOptions g;
    g.threads = o.threads, g.seconds_per_shape = o.seconds_per_kernel, g.min_repeats = 3;
    g.shapes = {s};
    g.kernel = usual;
    BenchResult best = bench_gemm(g).front();
    OrderedJson measured{{usual, best.value}};
    const double enough = kWorthChanging * best.value;
    for (const std::string& name : cpu_kernel_names()) {
      if (name == usual || name == "base") continue;
      g.kernel = name;
      const BenchResult r = bench_gemm(g).front();
      measured[name] = r.value;
      if (r.value > std::max(enough, best.value)) best = r;
    }
    OrderedJson c{{"form", s.form}, {"type", s.in == DType::bf16 ? "bf16" : "f32"}, {"n", s.n}};
    if (s.form != "tn") c["k"] = s.k;
    c["kernel"] = best.kernel, c["gflops"] = measured, c["at_rows"] = s.form == "tn" ? s.k : s.m;
    choices.push_back(c);
    results.push_back(std::move(best));
  }
  const OrderedJson table{{"what", "dspark gemm table"}, {"format_version", "1.0"}, {"cpu", model::cpu::cpu_model_name()}, {"shape", o.shape}, {"default", usual}, {"choices", choices}};
  file.write(table.dump(1) + "\n");
  file.commit();
  return results;
}

}  // namespace dspark::job
