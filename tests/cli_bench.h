// What most command-line tests start from: a tiny target, rows, and (made when asked for) a store and a drafter.
#pragma once

#include <map>

#include "cli_run.h"
#include "core/json.h"
#include "scratch.h"
#include "tiny_target.h"

struct Bench {
  Scratch scratch;
  std::filesystem::path target, rows;
  explicit Bench(int n_rows = 12, int words = 12, const TinyTarget& tiny = {});

  std::filesystem::path at(const std::string& name) const { return scratch.folder / name; }
  using Arguments = std::vector<std::string>;
  Arguments extract(const std::filesystem::path& out, const Arguments& more = {}) const;
  Arguments train(const std::filesystem::path& store, const std::filesystem::path& out, int steps, const Arguments& more = {}) const;
  std::filesystem::path make_store(const std::string& name = "store") const;
  std::filesystem::path make_drafter(const std::filesystem::path& store, const std::string& name = "drafter") const;
};

std::string file_bytes(const std::filesystem::path& path);
void write_bytes(const std::filesystem::path& path, const std::string& bytes);
std::vector<dspark::OrderedJson> json_lines(const std::string& text);
// Every file below a folder, without the locks: what a failed command left.
std::vector<std::string> files_below(const std::filesystem::path& folder);

void require_ok(const Ran& ran);
// The lines of training steps by step, without what depends on the clock.
std::map<int64_t, std::string> step_lines(const std::filesystem::path& json);
// Waits until the run has written `n` lines of JSON or has ended.
void wait_for_lines(Process& run, const std::filesystem::path& json, int64_t n);
// Drawn anew each time; INFO shows it when a test fails.
double random_fraction();
