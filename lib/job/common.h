// What every job shares: the device it runs on and where machine-readable results go.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/files.h"
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
// --cpu-kernel: throws (exit 2) for a name that no kernel has. One that this CPU cannot run is an error of the run.
void check_kernel_name(const std::string& name);

// Throws (exit 2) for a device or precision that does not exist, (exit 1) for one that is not there. `auto`: a GPU, or a line why the CPU.
std::unique_ptr<model::Backend> make_job_backend(const CommonOptions& options);

// Throws (exit 2) when what an option is to write is one of the inputs, or lies in one.
void require_apart(std::string_view option, const fs::path& output, const std::vector<fs::path>& inputs);

// What stands between the commas, empty or not.
std::vector<std::string> split_list(const std::string& text);

// "2,10,18" -> 2 10 18, ascending; "auto" and "store" name none.
std::vector<int> tap_numbers(const std::string& text);
// "auto" or "2,10,18" -> taps, checked against the target's number of layers.
std::vector<model::TapLayer> parse_taps(const std::string& text, int64_t n_layers);

// Lines of JSON to stdout ("-"), a file, or nowhere (""). The file is opened at once, so that a bad path fails before any work.
//   result  it appears, whole, with finish(); a command that fails leaves what was there before
//   stream  every line is there as soon as it is written, for whoever watches; what was there goes with the first one. Of a line that
//           cannot be written nothing stays, none comes after it, and no file is left that was made for nothing
class JsonLines {
 public:
  enum class Kind { result, stream };
  explicit JsonLines(const std::string& where, Kind kind = Kind::result);
  ~JsonLines();
  JsonLines(const JsonLines&) = delete;
  JsonLines& operator=(const JsonLines&) = delete;
  void write(const OrderedJson& object);  // throws, and names the file
  void finish();

 private:
  void stream(const std::string& line);

  std::string where_;
  std::unique_ptr<AtomicFile> result_;
  int stream_ = -1;
  bool made_ = false;  // the stream's file was not there before
  bool lost_ = false;  // a line of it
  int64_t whole_ = 0;  // bytes of its lines
};

// "64", "64KiB", "1.5GiB" -> bytes; throws (exit 2) otherwise.
int64_t parse_bytes(const std::string& text);

}  // namespace dspark::job
