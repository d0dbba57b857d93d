// Errors: the two kinds there are.
//
// DS_REQUIRE / fail() throw an `Error`: something a user, a file, a device or a peer can cause. The message says what was
// tried, on which object, expected against found, and what to do. It is caught once, in main (or at a thread's edge).
// DS_ASSERT aborts: a bug of ours. Both print values.
//
//   DS_REQUIRE(rows > 0, "{}: tensor '{}' has {} rows, expected at least 1", path, name, rows);
#pragma once

#include <fmt/format.h>

#include <stdexcept>
#include <string>

namespace dspark {

// What `main` turns into an exit code: 1 for a job that failed, 2 for a command that was wrong, 75 for a stop on request.
enum class ExitCode : int { ok = 0, failed = 1, usage = 2, stopped = 75 };

class Error : public std::runtime_error {
 public:
  explicit Error(const std::string& message, ExitCode code = ExitCode::failed)
      : std::runtime_error(message), code_(code) {}
  ExitCode code() const { return code_; }

 private:
  ExitCode code_;
};

[[noreturn]] void fail_message(const std::string& message);
[[noreturn]] void usage_message(const std::string& message);
[[noreturn]] void assert_failed(const char* file, int line, const char* condition, const std::string& message);

// Throws an Error with exit code 1.
template <typename... Args>
[[noreturn]] void fail(fmt::format_string<Args...> format, Args&&... args) {
  fail_message(fmt::format(format, std::forward<Args>(args)...));
}

// Throws an Error with exit code 2: the command line or a config value is wrong.
template <typename... Args>
[[noreturn]] void fail_usage(fmt::format_string<Args...> format, Args&&... args) {
  usage_message(fmt::format(format, std::forward<Args>(args)...));
}

// "No such file or directory (errno 2)" for the current errno.
std::string errno_text();

}  // namespace dspark

#define DS_REQUIRE(condition, ...)             \
  do {                                         \
    if (!(condition)) ::dspark::fail(__VA_ARGS__); \
  } while (false)

#define DS_ASSERT(condition, ...)                                                                   \
  do {                                                                                              \
    if (!(condition)) ::dspark::assert_failed(__FILE__, __LINE__, #condition, fmt::format("" __VA_ARGS__)); \
  } while (false)

// A system call that returns -1 on failure: SYS_CHECK(::fsync(fd), "sync {}", path).
#define SYS_CHECK(call, ...)                                                                          \
  do {                                                                                                \
    if ((call) == -1) ::dspark::fail("cannot {}: {}", fmt::format(__VA_ARGS__), ::dspark::errno_text()); \
  } while (false)
