#include "cli_run.h"

#include <fcntl.h>
#include <linux/capability.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <sstream>

#include "core/error.h"
#include "core/files.h"
#include "core/log.h"

namespace fs = std::filesystem;

namespace {

// Runs in the child, between fork and exec: system calls only.
[[noreturn]] void child(char* const* argv, const char* out, const char* err, const RunOptions& options) {
  const int o = ::open(options.stdout_to.size() > 1 ? options.stdout_to.c_str() : out, O_WRONLY | O_CREAT | O_TRUNC, 0600), e = ::open(err, O_WRONLY | O_CREAT | O_TRUNC, 0600);
  const int in = ::open("/dev/null", O_RDONLY);
  if (o < 0 || e < 0 || in < 0) ::_exit(126);
  ::dup2(in, 0), ::dup2(o, 1), ::dup2(e, 2);
  for (const int fd : {in, o, e}) ::close(fd);
  if (options.stdout_to == "-") ::close(1);
  if (options.no_threads) {
    const rlimit limit{rlim_t{1} << 46, RLIM_INFINITY};
    if (::setrlimit(RLIMIT_STACK, &limit) != 0) ::_exit(126);
  }
  if (options.file_limit >= 0) {
    const rlimit limit{static_cast<rlim_t>(options.file_limit), static_cast<rlim_t>(options.file_limit)};
    if (::setrlimit(RLIMIT_FSIZE, &limit) != 0) ::_exit(126);
  }
  // exec gives root what the bounding set still holds.
  if (options.without_override && ::geteuid() == 0)
    if (::prctl(PR_CAPBSET_DROP, CAP_DAC_OVERRIDE) != 0 || ::prctl(PR_CAPBSET_DROP, CAP_DAC_READ_SEARCH) != 0) ::_exit(126);
  ::execvp(argv[0], argv);
  ::_exit(127);
}

}  // namespace

std::string Ran::describe() const {
  return fmt::format("exit {} signal {}{}\nstdout: {}\nstderr: {}", code, signal, timed_out ? " timed out" : "", out, err);
}

Process::Process(const std::vector<std::string>& arguments, const RunOptions& options) : options_(options), start_s_(dspark::now_s()) {
  std::string name = (fs::temp_directory_path() / "dspark_run_XXXXXX").string();
  REQUIRE(::mkdtemp(name.data()));
  folder_ = name;
  std::vector<std::string> text;
  std::istringstream emulator(DSPARK_EMULATOR);
  for (std::string part; emulator >> part;) text.push_back(part);
  text.push_back(DSPARK_BINARY);
  text.insert(text.end(), arguments.begin(), arguments.end());
  std::vector<char*> argv;
  for (auto& t : text) argv.push_back(t.data());
  argv.push_back(nullptr);
  const std::string out = folder_ / "out", err = folder_ / "err";
  pid_ = ::fork();
  REQUIRE(pid_ >= 0);
  if (pid_ == 0) child(argv.data(), out.c_str(), err.c_str(), options_);
}

Process::~Process() {
  if (!reaped_) {
    ::kill(pid_, SIGKILL);
    reap(true);
  }
  std::error_code ec;
  fs::remove_all(folder_, ec);
}

bool Process::reap(bool block) {
  if (!reaped_) reaped_ = ::waitpid(pid_, &status_, block ? 0 : WNOHANG) == pid_;
  return reaped_;
}

bool Process::running() { return !reap(false); }

void Process::kill(int signal) {
  if (!reaped_) ::kill(pid_, signal);
}

Ran Process::wait() {
  Ran ran;
  while (!reap(false)) {
    if (dspark::now_s() - start_s_ > options_.timeout_s) {
      ran.timed_out = true;
      ::kill(pid_, SIGKILL);
      reap(true);
      break;
    }
    ::usleep(1000);
  }
  if (WIFEXITED(status_)) ran.code = WEXITSTATUS(status_);
  if (WIFSIGNALED(status_)) ran.signal = WTERMSIG(status_);
  if (options_.stdout_to.size() <= 1) ran.out = dspark::read_text(folder_ / "out");
  ran.err = dspark::read_text(folder_ / "err");
  return ran;
}

Ran dspark_run(const std::vector<std::string>& arguments, const RunOptions& options) { return Process(arguments, options).wait(); }

void check_fails(const Ran& ran, int code, const std::vector<std::string>& said) {
  INFO(ran.describe());
  CHECK(ran.signal == 0);
  CHECK(ran.code == code);
  // The last words are one message (wrong usage adds a line: where to look).
  const size_t at = ran.err.rfind("dspark: ");
  REQUIRE(at != std::string::npos);
  CHECK((at == 0 || ran.err[at - 1] == '\n'));
  CHECK(std::count(ran.err.begin() + static_cast<std::ptrdiff_t>(at), ran.err.end(), '\n') <= 2);
  for (const auto& text : said) {
    INFO("expected in the message: " << text);
    CHECK(ran.err.find(text, at) != std::string::npos);
  }
}

bool permissions_bind() {
  if (::geteuid() != 0) return true;
  const pid_t pid = ::fork();
  if (pid == 0) ::_exit(::prctl(PR_CAPBSET_DROP, CAP_DAC_OVERRIDE) == 0 ? 0 : 1);
  int status = 0;
  return pid > 0 && ::waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}
