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

// How --help looks, of this app and the subcommands added later; each option's default stands behind its text.
void use_help(CLI::App& app);
// What the command line and its --config file say together: the file's options, but those that the command line has, as further
// arguments. Keys are the long names of the flags, at the top or in a section named after the subcommand. Throws (exit 2) on a
// file that cannot be read and on a key that the subcommand does not have.
std::vector<std::string> with_config(CLI::App& app, int argc, char** argv);
// Every number an option takes gets its limits (limits.cc); what lies outside them is wrong usage, said with the option's name.
void add_limits(CLI::App& sub);
// "1,0.25" and "3" -> 1 0.25 3: for options that are lists, whose values kept the limits.
std::vector<double> numbers_of(const std::vector<std::string>& lists);
// --threads, --device, --precision, --cpu-kernel, --seed, --json, --dry-run, --log-level, --config.
void add_common(CLI::App& sub, job::CommonOptions& options);

}  // namespace dspark::cmd
