#include "job/common.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>
#include <sstream>

#include "core/error.h"
#include "core/log.h"
#include "job/gemm_choices.h"

namespace dspark::job {

model::Precision parse_precision(const std::string& name) {
  if (name == "bf16") return model::Precision::bf16;
  if (name == "fp32") return model::Precision::fp32;
  if (name == "fp64") return model::Precision::fp64;
  fail_usage("--precision {}: bf16, fp32 and fp64 exist", name);
}

std::unique_ptr<model::Backend> make_job_backend(const CommonOptions& options) {
  model::BackendOptions b;
  b.threads = options.threads;
  b.cpu_kernel = options.cpu_kernel;
  b.gemm_choices = options.gemm_table.empty() ? options.gemm_choices : read_gemm_table(options.gemm_table);
  b.precision = parse_precision(options.precision);
  const bool cuda = options.device.starts_with("cuda");
  if (cuda && !model::is_registered_backend(options.device)) fail("--device {}: this build has no CUDA backend; use --device cpu", options.device);
  if (options.device != "auto" && options.device != "cpu" && !cuda) fail_usage("--device {}: auto, cpu and cuda[:N] exist", options.device);
  const bool exact = b.precision == model::Precision::fp64;
  if (options.device == "auto" && model::is_registered_backend("cuda") && !exact) {
    b.device = "cuda";
    try {
      return model::make_backend(b);
    } catch (const Error& e) {
      log_info("device cpu; there is no GPU to use: {}", e.what());
    }
  }
  b.device = cuda ? options.device : exact ? "ref" : "cpu";
  return model::make_backend(b);
}

std::vector<model::TapLayer> parse_taps(const std::string& text, int64_t n_layers) {
  if (text == "auto") return model::auto_taps(n_layers);
  std::vector<model::TapLayer> taps;
  std::istringstream in(text);
  for (std::string part; std::getline(in, part, ',');) {
    int n = 0;
    const auto [end, error] = std::from_chars(part.data(), part.data() + part.size(), n);
    if (error != std::errc() || end != part.data() + part.size()) fail_usage("--taps {}: '{}' is not a layer number", text, part);
    if (n < 0 || n >= n_layers) fail_usage("--taps {}: {} is not in 0..{}; a tap is the state after n of the target's {} layers, the last one is stored anyway", text, n, n_layers - 1, n_layers);
    if (!taps.empty() && n <= taps.back().n) fail_usage("--taps {}: layers must ascend", text);
    taps.push_back({n});
  }
  if (taps.empty()) fail_usage("--taps: no layer named");
  return taps;
}

JsonLines::JsonLines(const std::string& where) {
  if (where.empty()) return;
  if (where == "-") {
    file_ = stdout;
    return;
  }
  file_ = std::fopen(where.c_str(), "w");
  DS_REQUIRE(file_ != nullptr, "cannot create {}: {}", where, errno_text());
  owned_ = true;
}

JsonLines::~JsonLines() {
  if (owned_) std::fclose(file_);
}

void JsonLines::write(const OrderedJson& object) {
  if (!file_) return;
  const std::string line = object.dump() + "\n";
  DS_REQUIRE(std::fwrite(line.data(), 1, line.size(), file_) == line.size() && std::fflush(file_) == 0, "cannot write JSON: {}", errno_text());
}

int64_t parse_bytes(const std::string& text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const std::string unit(end, text.data() + text.size());
  const char* units[] = {"", "KiB", "MiB", "GiB", "TiB"};
  const auto it = std::find(std::begin(units), std::end(units), unit);
  if (error != std::errc() || it == std::end(units) || !(value >= 0)) fail_usage("'{}' is not a size (64, 64KiB, 1.5GiB)", text);
  return static_cast<int64_t>(std::ldexp(value, 10 * static_cast<int>(it - std::begin(units))));
}

}  // namespace dspark::job
