#include "core/error.h"

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace dspark {

void fail_message(const std::string& message) { throw Error(message, ExitCode::failed); }
void usage_message(const std::string& message) { throw Error(message, ExitCode::usage); }

void assert_failed(const char* file, int line, const char* condition, const std::string& message) {
  std::fprintf(stderr, "dspark: internal error at %s:%d: %s%s%s\nThis is a bug in dspark; please report it.\n", file, line,
               condition, message.empty() ? "" : ": ", message.c_str());
  std::abort();
}

std::string errno_text() {
  const int code = errno;
  return fmt::format("{} (errno {})", std::strerror(code), code);
}

}  // namespace dspark
