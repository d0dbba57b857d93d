// dspark: parses the command line, calls one job, turns errors into exit codes: 0 done, 1 failed, 2 wrong usage, 75 stopped.
#include <fcntl.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <stdexcept>
#include <system_error>

#include "commands.h"
#include "core/error.h"
#include "core/json.h"
#include "core/log.h"
#include "core/stop.h"
#include "core/threads.h"
#include "model/backends.h"

namespace {

using namespace dspark;

constexpr const char* kNoMemory = "not enough memory; try fewer --row-tokens, a smaller --batch, or a shorter --max-length";

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
  return fmt::format("dspark {}\nmatrix kernels here: {}\ncores: {}\nGPU: {}", DSPARK_VERSION, kernels, usable_cores(), gpu);
}

// Without words: a rank that this process started has said them.
int say(const std::string& message, ExitCode code) {
  if (!message.empty()) std::fprintf(stderr, "dspark: %s\n", printable(message).c_str());
  return static_cast<int>(code);
}

// Without them the first files opened would take their numbers, and what is printed would be written into those. Reading from what
// stands in for a closed one fails, and so does writing.
void hold_standard_streams() {
  for (int fd = 0; fd < 3; ++fd)
    if (::fcntl(fd, F_GETFD) == -1) static_cast<void>(::open("/dev/null", fd == 0 ? O_WRONLY : O_RDONLY));
}

int run(int argc, char** argv) {
  CLI::App app{"Trains, packs and measures speculative-decoding drafters (DSpark, DFlash) for large language models.", "dspark"};
  app.require_subcommand(1);
  cmd::use_help(app);  // before the subcommands, which take it over
  app.set_version_flag("--version", version_text, "version, matrix kernels, cores, GPU");
  cmd::add_extract(app);
  cmd::add_train(app);
  cmd::add_eval(app);
  cmd::add_pack(app);
  cmd::add_bench(app);
  for (CLI::App* sub : app.get_subcommands(nullptr)) cmd::add_limits(*sub);
  install_stop_handler();
  try {
    std::vector<std::string> arguments = cmd::with_config(app, argc, argv);
    std::reverse(arguments.begin(), arguments.end());  // as CLI11 takes them
    app.parse(arguments);
  } catch (const CLI::ParseError& e) {
    if (e.get_exit_code() == 0) return app.exit(e);  // --help, --version
    std::string commands, where;
    for (const auto* sub : app.get_subcommands(nullptr)) commands += (commands.empty() ? "" : ", ") + sub->get_name();
    const bool unknown = argc > 1 && argv[1][0] != '-' && app.get_subcommands().empty();
    const int code = say(unknown ? fmt::format("unknown command '{}'; there are {}", argv[1], commands) : e.what(), ExitCode::usage);
    for (const auto* sub : app.get_subcommands()) where += " " + sub->get_name();
    std::fprintf(stderr, "See 'dspark%s --help'.\n", where.c_str());
    return code;
  }
  return static_cast<int>(ExitCode::ok);
}

int run_or_say_why(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const Error& e) {
    return say(e.what(), e.code());
  } catch (const std::bad_alloc&) {
    return say(kNoMemory, ExitCode::failed);
  } catch (const std::length_error&) {
    return say(kNoMemory, ExitCode::failed);
  } catch (const std::filesystem::filesystem_error& e) {
    return say(fmt::format("cannot look at {}: {}", e.path1().string(), e.code().message()), ExitCode::failed);
  } catch (const std::system_error& e) {
    if (std::ferror(stdout)) return static_cast<int>(ExitCode::ok);  // said below
    return say(e.what(), ExitCode::failed);
  } catch (const std::exception& e) {
    return say(json_error(e), ExitCode::failed);
  }
}

}  // namespace

int main(int argc, char** argv) {
  hold_standard_streams();
  const int code = run_or_say_why(argc, argv);
  // Whatever was done, a result that nobody can read is none.
  const bool lost = std::fflush(stdout) != 0;
  if (code != 0 || !(lost || std::ferror(stdout))) return code;
  return say(lost ? fmt::format("cannot write to the standard output: {}", errno_text()) : "cannot write to the standard output", ExitCode::failed);
}
