// What every job shares: the device it runs on and where machine-readable results go.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/json.h"
#include "model/backends.h"
#include "model/drafter_config.h"
#include "target/target_files.h"

namespace dspark::job {

struct CommonOptions {
  std::string device = "auto";     // auto | cpu | cuda[:N]
  std::string precision = "bf16";  // bf16 | fp32 | fp64 (the scalar reference: slow, exact)
  std::string cpu_kernel = "auto";
  fs::path gemm_table;             // job/gemm_choices.h; empty: gemm_choices
  std::vector<model::GemmChoice> gemm_choices;
  int threads = 0;
  uint64_t seed = 0;
  std::string json;                // "", "-" or a file
  std::string config;              // whose options the command line already holds
  bool dry_run = false;
};

// bf16 | fp32 | fp64; throws (exit 2) for another word.
model::Precision parse_precision(const std::string& name);

// Throws (exit 2) for a device or precision that does not exist, (exit 1) for one that is not there. `auto`: a GPU, or a line why the CPU.
std::unique_ptr<model::Backend> make_job_backend(const CommonOptions& options);

// "auto" or "2,10,18" -> taps, checked against the target's number of layers.
std::vector<model::TapLayer> parse_taps(const std::string& text, int64_t n_layers);

// Writes lines of JSON to stdout or a file (created at once, so that a bad path fails early).
class JsonLines {
 public:
  explicit JsonLines(const std::string& where);
  ~JsonLines();
  JsonLines(const JsonLines&) = delete;
  JsonLines& operator=(const JsonLines&) = delete;
  explicit operator bool() const { return file_ != nullptr; }
  void write(const OrderedJson& object);

 private:
  std::FILE* file_ = nullptr;
  bool owned_ = false;
};

// "64", "64KiB", "1.5GiB" -> bytes; throws (exit 2) otherwise.
int64_t parse_bytes(const std::string& text);

}  // namespace dspark::job
