#include "commands.h"
#include "core/error.h"
#include "core/log.h"

namespace dspark::cmd {

void add_common(CLI::App& sub, job::CommonOptions& o) {
  const char* group = "Common";
  sub.add_option("--device", o.device, "auto, cpu or cuda[:N]")->capture_default_str()->group(group);
  sub.add_option("--precision", o.precision, "bf16, fp32, or fp64 (the scalar reference: exact and slow)")->capture_default_str()->group(group);
  sub.add_option("--threads", o.threads, "worker threads (0: all usable cores); results do not depend on it")->capture_default_str()->group(group);
  sub.add_option("--cpu-kernel", o.cpu_kernel, "matrix kernel: auto, base, avx2, avx512, avx512bf16, amx")->capture_default_str()->group(group);
  sub.add_option("--gemm-table", o.gemm_table, "kernels by weight as 'bench gemm --save' measured them; part of a run's bits: saved with it")->type_name("FILE")->group(group);
  sub.add_option("--seed", o.seed, "of every random number")->capture_default_str()->group(group);
  sub.add_option("--json", o.json, "machine-readable result into FILE, or - for stdout")->type_name("FILE|-")->group(group);
  sub.add_flag("--dry-run", o.dry_run, "check everything, write nothing")->group(group);
  sub.add_option_function<std::string>(
         "--log-level",
         [](const std::string& level) {
           const std::pair<const char*, LogLevel> levels[] = {{"quiet", LogLevel::quiet}, {"error", LogLevel::error}, {"warn", LogLevel::warn}, {"info", LogLevel::info}, {"debug", LogLevel::debug}};
           for (const auto& [name, value] : levels)
             if (level == name) return set_log_level(value);
           fail_usage("--log-level {}: quiet, error, warn, info or debug", level);
         },
         "quiet, error, warn, info or debug")
      ->type_name("LEVEL")
      ->group(group);
  sub.add_option("--config", o.config, "options from a TOML or JSON file, the same names as the flags; the command line goes first")->type_name("FILE")->group(group);
}

}  // namespace dspark::cmd
