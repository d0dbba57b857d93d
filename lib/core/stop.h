// Stop on request: SIGINT, SIGTERM and SIGUSR1 set a flag; long loops look at it between units of work, save, and exit 75.
// A second SIGINT ends the process at once.
#pragma once

namespace dspark {

void install_stop_handler();
bool stop_requested();
void request_stop();   // what the handler does; also used by --time-limit and tests
// Throws Error with exit code 75 and `what` was saved.
[[noreturn]] void stopped(const char* what);

}  // namespace dspark
