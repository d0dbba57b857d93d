#include "core/stop.h"

#include <signal.h>
#include <unistd.h>

#include <atomic>

#include "core/error.h"

namespace dspark {
namespace {
std::atomic<int> g_stops{0};
std::atomic<const char*> g_at_once{nullptr};  // what StopAtOnce says
static_assert(std::atomic<int>::is_always_lock_free, "signal handlers may touch only lock-free atomics");

void on_signal(int signal) {
  if (g_stops.fetch_add(1) >= 1 && signal == SIGINT) ::_exit(130);
}
}  // namespace

void install_stop_handler() {
  struct sigaction action {};
  action.sa_handler = on_signal;
  sigemptyset(&action.sa_mask);
  action.sa_flags = SA_RESTART;
  for (int s : {SIGINT, SIGTERM, SIGUSR1}) ::sigaction(s, &action, nullptr);
  struct sigaction before {};
  if (::sigaction(SIGHUP, nullptr, &before) == 0 && before.sa_handler != SIG_IGN) ::sigaction(SIGHUP, &action, nullptr);
  // A file at its size limit is then a write that fails (EFBIG) and is reported like a full disk, not the process's end.
  ::signal(SIGXFSZ, SIG_IGN);
}

bool stop_requested() { return g_stops.load(std::memory_order_relaxed) > 0; }
void request_stop() { g_stops.fetch_add(1); }

StopAtOnce::StopAtOnce(const char* what) { g_at_once = what; }
StopAtOnce::~StopAtOnce() { g_at_once = nullptr; }
void stop_point() {
  const char* what = g_at_once.load(std::memory_order_relaxed);
  if (what != nullptr && stop_requested()) stopped(what);
}

void stopped(const char* what) { throw Error(fmt::format("stopped on request; {}", what), ExitCode::stopped); }

}  // namespace dspark
