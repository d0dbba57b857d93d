#include "core/log.h"

#include <sys/resource.h>
#include <unistd.h>
#include <utf8proc.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <mutex>

namespace dspark {
namespace {
std::atomic<LogLevel> g_level{LogLevel::info};
std::mutex g_mutex;
}  // namespace

std::string printable(std::string_view text, size_t most) {
  if (text.size() > most) return printable(text.substr(0, most)) + "...";
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    utf8proc_int32_t point = -1;
    const auto n = utf8proc_iterate(reinterpret_cast<const utf8proc_uint8_t*>(text.data()), static_cast<utf8proc_ssize_t>(text.size()), &point);
    const size_t step = n < 1 ? 1 : static_cast<size_t>(n);
    // C1 too (0x80 to 0x9F): some terminals obey them.
    const bool control = n < 1 || (point < 0x20 && point != '\n' && point != '\t') || (point >= 0x7F && point < 0xA0);
    for (size_t i = 0; i < step; ++i) {
      if (control) out += fmt::format("\\x{:02x}", static_cast<unsigned char>(text[i]));
      else out += text[i];
    }
    text.remove_prefix(step);
  }
  return out;
}

void set_log_level(LogLevel level) { g_level = level; }
LogLevel log_level() { return g_level; }

void log_line(LogLevel level, std::string_view raw) {
  if (log_level() < level) return;
  const std::string text = printable(raw);
  std::lock_guard lock(g_mutex);
  const char* prefix = level == LogLevel::warn ? "warning: " : level == LogLevel::error ? "error: " : "";
  std::fprintf(stderr, "%s%s\n", prefix, text.c_str());
}

Progress::Progress(std::string what, uint64_t total, std::string unit)
    : what_(std::move(what)), unit_(std::move(unit)), total_(total), start_s_(now_s()), terminal_(::isatty(2) == 1) {
  if (!terminal_) last_draw_s_ = start_s_;
}

Progress::~Progress() {
  if (drawn_ && terminal_) std::fputc('\n', stderr);
}

void Progress::update(uint64_t done, std::string_view note) {
  const double t = now_s();
  if (t - last_draw_s_ < (terminal_ ? 0.1 : 30.0)) return;
  last_draw_s_ = t;
  draw(done, note);
}

void Progress::finish() {
  if (drawn_ && terminal_) {
    std::fputs("\r\033[K", stderr);
    drawn_ = false;
  }
}

void Progress::draw(uint64_t done, std::string_view note) {
  if (log_level() < LogLevel::info) return;
  const double elapsed = now_s() - start_s_;
  const double rate = elapsed > 0 ? static_cast<double>(done) / elapsed : 0;
  std::string line = fmt::format("{}: {}", what_, done);
  if (total_ > 0) line += fmt::format("/{} ({:.0f} %)", total_, 100.0 * static_cast<double>(done) / static_cast<double>(total_));
  line += fmt::format(" {}, {:.3g} {}/s", unit_, rate, unit_);
  if (total_ > done && rate > 0) line += fmt::format(", {} left", format_seconds(static_cast<double>(total_ - done) / rate));
  if (!note.empty()) line += fmt::format(", {}", note);
  std::lock_guard lock(g_mutex);
  if (terminal_) std::fprintf(stderr, "\r\033[K%s", line.c_str());
  else std::fprintf(stderr, "%s\n", line.c_str());
  drawn_ = true;
}

double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::string format_bytes(double bytes) {
  const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  int u = 0;
  while (std::abs(bytes) >= 1024 && u < 5) bytes /= 1024, ++u;
  return u == 0 ? fmt::format("{:.0f} B", bytes) : fmt::format("{:.2f} {}", bytes, units[u]);
}

std::string format_seconds(double s) {
  if (s < 100) return fmt::format("{:.1f} s", s);
  const auto t = static_cast<int64_t>(s);
  if (t < 3600) return fmt::format("{}m{:02}s", t / 60, t % 60);
  return fmt::format("{}h{:02}m", t / 3600, t / 60 % 60);
}

uint64_t peak_rss_bytes() {
  // Linux's own line first: getrusage also counts what the process was before exec, its parent's memory.
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.starts_with("VmHWM:")) return std::strtoull(line.c_str() + 6, nullptr, 10) * 1024;
  struct rusage usage {};
  ::getrusage(RUSAGE_SELF, &usage);
  return static_cast<uint64_t>(usage.ru_maxrss) * 1024;
}

}  // namespace dspark
