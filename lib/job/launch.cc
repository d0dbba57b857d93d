#include "job/launch.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string_view>
#include <vector>

#include "core/error.h"
#include "core/log.h"
#include "core/stop.h"
#include "model/backends.h"
#include "net/rendezvous.h"

namespace dspark::job {

namespace {

constexpr double kPatience = 10;  // seconds for the others to end after one has failed; then they are killed
constexpr std::string_view kLastWords = "dspark: ";  // how main begins them

struct Rank {
  int64_t number = 0;
  pid_t pid = -1;
  int words = -1;         // what it says, but for rank 0; -1: no more comes
  std::string line;       // that has not ended
  std::string last_words;
  bool ended = false, killed_here = false;
  int status = 0;

  bool ended_by_signal() const { return WIFSIGNALED(status); }
  int code() const { return WEXITSTATUS(status); }
  bool failed() const { return ended && !killed_here && (ended_by_signal() || (code() != 0 && code() != static_cast<int>(ExitCode::stopped))); }
};

// Held up while this lives, and read one by one. SIGCHLD among them.
class Signals {
 public:
  Signals() {
    sigset_t set;
    ::sigemptyset(&set);
    for (const int s : {SIGINT, SIGTERM, SIGUSR1, SIGHUP, SIGCHLD}) ::sigaddset(&set, s);
    ::sigprocmask(SIG_BLOCK, &set, &before_);
    fd_ = ::signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
    if (fd_ < 0) ::sigprocmask(SIG_SETMASK, &before_, nullptr);
    SYS_CHECK(fd_, "listen for signals");
  }
  ~Signals() {
    ::close(fd_);
    ::sigprocmask(SIG_SETMASK, &before_, nullptr);
  }
  Signals(const Signals&) = delete;
  Signals& operator=(const Signals&) = delete;
  int fd() const { return fd_; }
  const sigset_t& before() const { return before_; }
  int next() const {  // 0: none
    signalfd_siginfo info{};
    return ::read(fd_, &info, sizeof info) == sizeof info ? static_cast<int>(info.ssi_signo) : 0;
  }

 private:
  sigset_t before_{};
  int fd_ = -1;
};

std::vector<std::string> own_arguments() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  std::vector<std::string> arguments;
  for (size_t at = 0; at < text.size();) {
    arguments.emplace_back(text.c_str() + at);
    at += arguments.back().size() + 1;
  }
  DS_REQUIRE(!arguments.empty(), "cannot read /proc/self/cmdline, the command that ranks are started with; start them by srun or torchrun");
  return arguments;
}

std::vector<std::string> environment_of(int64_t rank, int64_t ranks, int port) {
  const std::vector<std::pair<std::string, std::string>> own{{"RANK", std::to_string(rank)}, {"LOCAL_RANK", std::to_string(rank)}, {"WORLD_SIZE", std::to_string(ranks)},
                                                             {"LOCAL_WORLD_SIZE", std::to_string(ranks)}, {"MASTER_ADDR", "localhost"}, {"MASTER_PORT", std::to_string(port)},
                                                             {"TORCHELASTIC_USE_AGENT_STORE", ""}};
  std::vector<std::string> all;
  for (char** e = environ; *e != nullptr; ++e) {
    const std::string_view entry = *e;
    if (std::none_of(own.begin(), own.end(), [&](const auto& o) { return entry.starts_with(o.first + "="); })) all.emplace_back(entry);
  }
  for (const auto& [name, value] : own)
    if (!value.empty()) all.push_back(name + "=" + value);
  return all;
}

std::vector<char*> pointers(std::vector<std::string>& texts) {
  std::vector<char*> all;
  for (std::string& t : texts) all.push_back(t.data());
  all.push_back(nullptr);
  return all;
}

// Between fork and exec: system calls only.
[[noreturn]] void become(char* const* arguments, char* const* environment, int words, pid_t parent, const sigset_t& mask) {
  ::setpgid(0, 0);             // a terminal's signals come by way of the parent, once
  ::signal(SIGTTOU, SIG_IGN);  // rank 0 writes to that terminal all the same
  ::prctl(PR_SET_PDEATHSIG, SIGINT);
  if (::getppid() != parent) ::_exit(static_cast<int>(ExitCode::stopped));
  if (words >= 0) ::dup2(words, 1), ::dup2(words, 2);
  ::sigprocmask(SIG_SETMASK, &mask, nullptr);
  ::execve("/proc/self/exe", arguments, environment);
  ::_exit(127);
}

class Ranks {
 public:
  Ranks() = default;
  explicit Ranks(int64_t n) : Ranks() {  // made by now: when a later rank cannot be started, the earlier ones end
    std::vector<std::string> arguments = own_arguments();
    const std::vector<char*> argv = pointers(arguments);
    const int port = net::free_port();
    const pid_t parent = ::getpid();
    for (int64_t r = 0; r < n; ++r) {
      Rank rank;
      rank.number = r;
      int pipe[2] = {-1, -1};
      if (r > 0) SYS_CHECK(::pipe2(pipe, O_CLOEXEC), "make a pipe for rank {}", r);
      rank.words = pipe[0];
      if (r > 0) ::fcntl(pipe[0], F_SETFL, O_NONBLOCK);
      std::vector<std::string> environment = environment_of(r, n, port);
      const std::vector<char*> envp = pointers(environment);
      rank.pid = ::fork();
      const int error = errno;
      if (rank.pid == 0) become(argv.data(), envp.data(), pipe[1], parent, signals_.before());
      if (pipe[1] >= 0) ::close(pipe[1]);
      all_.push_back(rank);
      if (rank.pid < 0) all_.back().ended = true;
      errno = error;
      SYS_CHECK(rank.pid, "start rank {}", r);
    }
  }
  ~Ranks() {
    for (Rank& r : all_) {
      if (r.words >= 0) ::close(r.words);
      if (r.ended) continue;
      ::kill(r.pid, SIGKILL);
      ::waitpid(r.pid, &r.status, 0);
    }
  }
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;

  void wait() {
    double kill_at = 0;  // when the others have had their time
    while (std::any_of(all_.begin(), all_.end(), [](const Rank& r) { return !r.ended || r.words >= 0; })) {
      std::vector<pollfd> polls{{signals_.fd(), POLLIN, 0}};
      for (const Rank& r : all_)
        if (r.words >= 0) polls.push_back({r.words, POLLIN, 0});
      const int milliseconds = kill_at > 0 ? std::max(0, static_cast<int>(1e3 * (kill_at - now_s()))) + 1 : -1;
      if (::poll(polls.data(), polls.size(), milliseconds) < 0 && errno != EINTR) fail("cannot wait for the ranks: {}", errno_text());
      while (const int signal = signals_.next())
        if (signal != SIGCHLD) send(signal);
      for (Rank& r : all_) listen(r), reap(r);
      if (kill_at == 0 && std::any_of(all_.begin(), all_.end(), [](const Rank& r) { return r.failed(); })) kill_at = now_s() + kPatience;
      if (kill_at > 0 && now_s() >= kill_at)
        for (Rank& r : all_)
          if (!r.ended) r.killed_here = true, ::kill(r.pid, SIGKILL);
    }
  }

  // What the run came to.
  void report() const {
    // One that was told of another's end ends as well, often before it.
    const auto by_others = [](const Rank& r) { return r.last_words.find(" ended the run: ") != std::string::npos || r.last_words.find(" is gone: ") != std::string::npos; };
    const auto first = [&](const auto& which) {
      const auto it = std::find_if(all_.begin(), all_.end(), [&](const Rank& r) { return r.failed() && which(r); });
      return it == all_.end() ? nullptr : &*it;
    };
    const Rank* cause = first([](const Rank& r) { return r.ended_by_signal(); });
    if (cause == nullptr) cause = first([&](const Rank& r) { return r.number > 0 && !by_others(r); });
    if (cause == nullptr) cause = first([](const Rank&) { return true; });
    if (cause != nullptr && cause->ended_by_signal())
      fail("rank {} was ended by signal {} ({}); the last checkpoint is whole", cause->number, WTERMSIG(cause->status), ::strsignal(WTERMSIG(cause->status)));
    if (cause != nullptr) {
      const std::string of = fmt::format("rank {}", cause->number);
      const std::string words = cause->last_words.empty() ? fmt::format("{} ended with exit status {}", of, cause->code()) : cause->last_words;
      throw Error(cause->number == 0 ? "" : words.starts_with(of + " ") ? words : of + ": " + words, static_cast<ExitCode>(cause->code()));
    }
    if (std::any_of(all_.begin(), all_.end(), [](const Rank& r) { return r.code() == static_cast<int>(ExitCode::stopped); })) throw Error("", ExitCode::stopped);
  }

 private:
  void send(int signal) {
    for (const Rank& r : all_)
      if (!r.ended) ::kill(r.pid, signal);
  }
  static void reap(Rank& r) {
    if (!r.ended) r.ended = ::waitpid(r.pid, &r.status, WNOHANG) == r.pid;
  }
  static void listen(Rank& r) {
    char part[4096];
    while (r.words >= 0) {
      const auto n = ::read(r.words, part, sizeof part);
      if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
      if (n <= 0) {
        ::close(r.words);
        r.words = -1;
        if (!r.line.empty()) take_line(r);
        return;
      }
      for (const char c : std::string_view(part, static_cast<size_t>(n)))
        if (c == '\n') take_line(r);
        else r.line += c;
    }
  }
  static void take_line(Rank& r) {
    if (r.line.starts_with(kLastWords)) r.last_words = r.line.substr(kLastWords.size());
    else if (!r.last_words.empty()) r.last_words += "\n" + r.line;
    else std::fprintf(stderr, "rank %lld: %s\n", static_cast<long long>(r.number), r.line.c_str());
    r.line.clear();
  }

  Signals signals_;
  std::vector<Rank> all_;
};

// A rank takes the GPU of its number: there must be as many in sight.
void check_devices(int64_t ranks, const std::string& device) {
  if (device.starts_with("cuda:")) fail_usage("--device {}: with --ranks each rank takes a GPU of its own; --device cuda", device);
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  if (device == "cpu" || visible == nullptr || *visible == 0 || !model::is_registered_backend("cuda")) return;
  const auto n = 1 + std::count(visible, visible + std::strlen(visible), ',');
  DS_REQUIRE(n >= ranks || std::string_view(visible) == "-1", "--ranks {}: each takes a GPU of its own, and CUDA_VISIBLE_DEVICES ('{}') shows {}; show more, or train on the CPU with --device cpu", ranks, visible, n);
}

}  // namespace

void launch_ranks(int64_t ranks, const std::string& device) {
  check_devices(ranks, device);
  if (stop_requested()) stopped("no rank was started");
  Ranks all(ranks);
  all.wait();
  all.report();
}

}  // namespace dspark::job
