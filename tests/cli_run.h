// Runs the built binary as a person would and keeps what came back. Output goes through files, so nothing can block.
#pragma once

#include <sys/types.h>

#include <filesystem>
#include <string>
#include <vector>

// A sanitizer's build takes several times the time and the memory.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

struct RunOptions {
  double timeout_s = 600;          // then SIGKILL, and `timed_out`; far beyond what a loaded machine takes
  long file_limit = -1;            // RLIMIT_FSIZE in bytes: what a full disk does, without one
  bool without_override = false;   // root, too, is bound by permissions (CAP_DAC_OVERRIDE dropped)
  std::string stdout_to;           // a device instead of a file; Ran::out is empty then. "-": closed
  bool no_threads = false;         // RLIMIT_STACK so high that no thread's stack fits the address space
};

struct Ran {
  int code = -1;    // exit status; -1 when a signal ended it
  int signal = 0;
  bool timed_out = false;
  std::string out, err;
  bool said(const std::string& text) const { return err.find(text) != std::string::npos; }
  std::string describe() const;  // for INFO
};

// A started process; killed when it goes out of scope unfinished.
class Process {
 public:
  Process(const std::vector<std::string>& arguments, const RunOptions& options = {});
  ~Process();
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;
  bool running();
  void kill(int signal);
  Ran wait();

 private:
  bool reap(bool block);
  RunOptions options_;
  std::filesystem::path folder_;
  pid_t pid_ = -1;
  double start_s_ = 0;
  bool reaped_ = false;
  int status_ = 0;
};

Ran dspark_run(const std::vector<std::string>& arguments, const RunOptions& options = {});

// The binary's one promise about bad input: this exit status, one message on stderr that holds `said`, no signal.
void check_fails(const Ran& ran, int code, const std::vector<std::string>& said);

// Whether CAP_DAC_OVERRIDE can be dropped, or is not there to begin with.
bool permissions_bind();
