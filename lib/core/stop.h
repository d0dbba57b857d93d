// Stop on request: SIGINT, SIGTERM, SIGUSR1 and SIGHUP (unless it is ignored, as nohup does) set a flag; long loops look at it between units of work, save, and exit 75.
// A second SIGINT ends the process at once.
#pragma once

namespace dspark {

void install_stop_handler();
bool stop_requested();
void request_stop();   // what the handler does; also used by --time-limit and tests
// Throws Error with exit code 75 and `what` was saved.
[[noreturn]] void stopped(const char* what);

// While one lives, a stop request ends the work at once: every ThreadPool loop begins with a stop_point(), which throws
// stopped(what) then. For work that has nothing to save (bench). Made and destroyed on the thread that runs the loops.
class StopAtOnce {
 public:
  explicit StopAtOnce(const char* what);
  ~StopAtOnce();
  StopAtOnce(const StopAtOnce&) = delete;
  StopAtOnce& operator=(const StopAtOnce&) = delete;
};
void stop_point();

}  // namespace dspark
