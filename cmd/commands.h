// The subcommands: each file declares its options on a CLI11 app and makes one call into lib/job.
#pragma once

#include <CLI/CLI.hpp>

#include "job/common.h"

namespace dspark::cmd {

void add_extract(CLI::App& app);
void add_train(CLI::App& app);
void add_eval(CLI::App& app);
void add_pack(CLI::App& app);
void add_bench(CLI::App& app);

// For numbers; what is wrong is said in the option's own words, without the type's limits.
CLI::Validator not_negative();
CLI::Validator positive();

// --threads, --device, --precision, --cpu-kernel, --seed, --json, --dry-run, --log-level, --config.
void add_common(CLI::App& sub, job::CommonOptions& options);

}  // namespace dspark::cmd
