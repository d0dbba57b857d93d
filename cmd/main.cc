// dspark: parses the command line, calls one job, turns errors into exit codes: 0 done, 1 failed, 2 wrong usage, 75 stopped.
#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "commands.h"
#include "core/error.h"
#include "core/log.h"
#include "core/stop.h"
#include "core/threads.h"
#include "model/backends.h"

namespace {

using namespace dspark;

std::string version_text() {
  std::string kernels;
  for (const auto& name : model::cpu_kernel_names()) kernels += (kernels.empty() ? "" : " ") + name;
  std::string gpu = "this build has no CUDA backend";
  if (model::is_registered_backend("cuda")) {
    try {
      model::BackendOptions options;
      options.device = "cuda";
      gpu = model::make_backend(options)->describe();
    } catch (const Error& e) {
      gpu = fmt::format("none to use: {}", e.what());
    }
  }
  return fmt::format("dspark {}\nmatrix kernels here: {}\ncores: {}\nGPU: {}\n", DSPARK_VERSION, kernels, usable_cores(), gpu);
}

int run(int argc, char** argv) {
  CLI::App app{"Trains, packs and measures speculative-decoding drafters (DSpark, DFlash) for large language models.", "dspark"};
  app.require_subcommand(1);
  app.get_formatter()->column_width(38);
  app.set_version_flag("--version", version_text, "version, matrix kernels, cores, GPU");
  cmd::add_extract(app);
  cmd::add_train(app);
  cmd::add_eval(app);
  cmd::add_pack(app);
  cmd::add_bench(app);
  for (CLI::App* sub : app.get_subcommands(nullptr)) cmd::check_numbers(*sub);
  install_stop_handler();
  try {
    std::vector<std::string> arguments = cmd::with_config(app, argc, argv);
    std::reverse(arguments.begin(), arguments.end());  // as CLI11 takes them
    app.parse(arguments);
  } catch (const CLI::ParseError& e) {
    if (e.get_exit_code() == 0) return app.exit(e);  // --help, --version
    std::string commands, where;
    for (const auto* sub : app.get_subcommands(nullptr)) commands += (commands.empty() ? "" : ", ") + sub->get_name();
    if (argc > 1 && argv[1][0] != '-' && app.get_subcommands().empty())
      std::fprintf(stderr, "dspark: unknown command '%s'; there are %s\n", argv[1], commands.c_str());
    else
      std::fprintf(stderr, "dspark: %s\n", e.what());
    for (const auto* sub : app.get_subcommands()) where += " " + sub->get_name();
    std::fprintf(stderr, "See 'dspark%s --help'.\n", where.c_str());
    return static_cast<int>(ExitCode::usage);
  }
  return static_cast<int>(ExitCode::ok);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const dspark::Error& e) {
    std::fprintf(stderr, "dspark: %s\n", e.what());
    return static_cast<int>(e.code());
  } catch (const std::bad_alloc&) {
    std::fprintf(stderr, "dspark: not enough memory; try fewer --row-tokens, a smaller --batch, or a shorter --max-length\n");
    return static_cast<int>(dspark::ExitCode::failed);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "dspark: %s\n", e.what());
    return static_cast<int>(dspark::ExitCode::failed);
  }
}
