// Talk on stderr: levels, and one progress line for long work.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <string>
#include <string_view>

namespace dspark {

enum class LogLevel { quiet, error, warn, info, debug };

void set_log_level(LogLevel level);
LogLevel log_level();
void log_line(LogLevel level, std::string_view text);

template <typename... Args>
void log_info(fmt::format_string<Args...> format, Args&&... args) {
  if (log_level() >= LogLevel::info) log_line(LogLevel::info, fmt::format(format, std::forward<Args>(args)...));
}
template <typename... Args>
void log_warn(fmt::format_string<Args...> format, Args&&... args) {
  if (log_level() >= LogLevel::warn) log_line(LogLevel::warn, fmt::format(format, std::forward<Args>(args)...));
}

// Text that may come from a file, as a terminal may see it: control characters and bytes that are no UTF-8 become \xNN; newlines and
// tabs stay. Of what is longer than `most` bytes, its beginning. log_line and main's last words pass through it.
std::string printable(std::string_view text, size_t most = std::string_view::npos);

// A progress line: redrawn in place on a terminal, one line every 30 s elsewhere (Slurm logs).
//   Progress p("extract", n_rows, "rows");  p.update(done);  p.finish();
class Progress {
 public:
  Progress(std::string what, uint64_t total, std::string unit);
  ~Progress();
  void update(uint64_t done, std::string_view note = {});  // cheap: draws at most ten times a second
  void finish();

 private:
  void draw(uint64_t done, std::string_view note);
  std::string what_, unit_;
  uint64_t total_;
  double start_s_, last_draw_s_ = 0;
  bool terminal_, drawn_ = false;
};

// Seconds of a steady clock.
double now_s();
// "1.5 GiB", "12.3 KiB", "17 B".
std::string format_bytes(double bytes);
// "1h02m", "3m20s", "12.4 s".
std::string format_seconds(double seconds);
// Peak resident memory of this process so far.
uint64_t peak_rss_bytes();

}  // namespace dspark
