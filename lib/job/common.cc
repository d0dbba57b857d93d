#include "job/common.h"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/log.h"
#include "job/gemm_choices.h"
#include "model/cpu_kernels.h"

namespace dspark::job {

model::Precision parse_precision(const std::string& name) {
  if (name == "bf16") return model::Precision::bf16;
  if (name == "fp32") return model::Precision::fp32;
  if (name == "fp64") return model::Precision::fp64;
  fail_usage("--precision {}: bf16, fp32 and fp64 exist", name);
}

void check_kernel_name(const std::string& name) {
  const auto names = model::all_cpu_kernel_names();
  if (name != "auto" && std::find(names.begin(), names.end(), name) == names.end()) fail_usage("--cpu-kernel {}: expected one of auto, {}", name, fmt::join(names, ", "));
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

std::vector<std::string> split_list(const std::string& text) {
  std::vector<std::string> parts;
  for (size_t begin = 0, end = 0; end != std::string::npos; begin = end + 1) {
    end = text.find(',', begin);
    parts.push_back(text.substr(begin, end == std::string::npos ? end : end - begin));
  }
  return parts;
}

std::vector<int> tap_numbers(const std::string& text) {
  std::vector<int> numbers;
  if (text == "auto" || text == "store") return numbers;
  for (const std::string& part : split_list(text)) {
    int n = 0;
    const auto [end, error] = std::from_chars(part.data(), part.data() + part.size(), n);
    if (error != std::errc() || end != part.data() + part.size()) fail_usage("--taps {}: '{}' is not a layer number", text, part);
    if (n < 0 || (!numbers.empty() && n <= numbers.back())) fail_usage("--taps {}: layers must ascend, from 0 on", text);
    numbers.push_back(n);
  }
  return numbers;
}

std::vector<model::TapLayer> parse_taps(const std::string& text, int64_t n_layers) {
  if (text == "auto") return model::auto_taps(n_layers);
  std::vector<model::TapLayer> taps;
  for (const int n : tap_numbers(text)) {
    if (n >= n_layers) fail_usage("--taps {}: {} is not in 0..{}; a tap is the state after n of the target's {} layers, the last one is stored anyway", text, n, n_layers - 1, n_layers);
    taps.push_back({n});
  }
  return taps;
}

JsonLines::JsonLines(const std::string& where, Kind kind) : where_(where) {
  if (kind == Kind::stream && !where.empty()) ::signal(SIGPIPE, SIG_IGN);  // whoever watches may leave: a write that fails, no more
  if (where.empty() || where == "-") return;
  if (kind == Kind::result) {
    result_ = std::make_unique<AtomicFile>(where);
    return;
  }
  std::error_code ec;
  made_ = !fs::exists(where, ec);
  stream_ = ::open(where.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
  DS_REQUIRE(stream_ >= 0, "cannot create {}: {}", where, errno_text());
}

JsonLines::~JsonLines() {
  if (stream_ >= 0) ::close(stream_);
  if (stream_ >= 0 && made_ && whole_ == 0) ::unlink(where_.c_str());
}

void JsonLines::write(const OrderedJson& object) {
  if (where_.empty()) return;
  const std::string line = object.dump(-1, ' ', false, OrderedJson::error_handler_t::replace) + "\n";  // names of files may be any bytes
  if (result_) return result_->write(line);
  if (stream_ >= 0) return stream(line);
  DS_REQUIRE(std::fwrite(line.data(), 1, line.size(), stdout) == line.size() && std::fflush(stdout) == 0, "cannot write JSON to the standard output: {}", errno_text());
}

void JsonLines::stream(const std::string& line) {
  if (lost_) return;
  const auto cut = [this] { return ::ftruncate(stream_, static_cast<off_t>(whole_)) == 0; };  // a pipe has no length
  if (whole_ == 0) static_cast<void>(cut());
  try {
    write_all(stream_, line.data(), line.size(), where_);
    whole_ += static_cast<int64_t>(line.size());
  } catch (const Error&) {
    lost_ = true;
    static_cast<void>(cut());
    throw;
  }
}

void JsonLines::finish() {
  if (result_) result_->commit();
}

void require_apart(std::string_view option, const fs::path& output, const std::vector<fs::path>& inputs) {
  if (output.empty() || output == "-") return;
  std::error_code ec;
  const auto whole = [&ec](const fs::path& p) { return fs::weakly_canonical(fs::absolute(p, ec), ec); };
  const fs::path out = whole(output);
  for (const fs::path& input : inputs) {
    if (input.empty()) continue;
    const fs::path in = whole(input);
    for (fs::path at = out; !at.empty(); at = at.parent_path()) {
      if (at == in || fs::equivalent(at, in, ec)) fail_usage("{} {}: {} is read by this command, and would be written over; choose another place", option, output.string(), input.string());
      if (at == at.parent_path()) break;
    }
  }
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
