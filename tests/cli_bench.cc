#include "cli_bench.h"

#include <unistd.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <random>
#include <sstream>

#include "core/files.h"
#include "core/log.h"

namespace fs = std::filesystem;

Bench::Bench(int n_rows, int words, const TinyTarget& tiny) : target(at("tiny.gguf")) {
  write_tiny_target(target, tiny);
  rows = scratch.put("rows.jsonl", tiny_rows(n_rows, words));
}

namespace {

// `more` after the defaults, each default only where `more` does not say another value.
Bench::Arguments with_defaults(Bench::Arguments a, const Bench::Arguments& defaults, const Bench::Arguments& more) {
  for (size_t i = 0; i + 1 < defaults.size(); i += 2) {
    if (std::find(more.begin(), more.end(), defaults[i]) != more.end()) continue;
    a.push_back(defaults[i]);
    a.push_back(defaults[i + 1]);
  }
  a.insert(a.end(), more.begin(), more.end());
  return a;
}

}  // namespace

Bench::Arguments Bench::extract(const fs::path& out, const Arguments& more) const {
  return with_defaults({"extract", "--target", target, "--data", rows, "--out", out}, {"--taps", "1,2,3", "--codec", "raw", "--threads", "1"}, more);
}

Bench::Arguments Bench::train(const fs::path& store, const fs::path& out, int steps, const Arguments& more) const {
  return with_defaults({"train", "--target", target, "--store", store, "--out", out, "--steps", std::to_string(steps)},
                       {"--layers", "1", "--block", "4", "--rank", "8", "--draft-vocab", "64", "--anchors", "16", "--batch-docs", "4", "--row-tokens", "256",
                        "--threads", "1"},
                       more);
}

fs::path Bench::make_store(const std::string& name) const {
  const Ran ran = dspark_run(extract(at(name)));
  INFO(ran.describe());
  REQUIRE(ran.code == 0);
  return at(name);
}

fs::path Bench::make_drafter(const fs::path& store, const std::string& name) const {
  const Ran ran = dspark_run(train(store, at(name), 2));
  INFO(ran.describe());
  REQUIRE(ran.code == 0);
  return at(name);
}

std::string file_bytes(const fs::path& path) { return dspark::read_text(path); }

void write_bytes(const fs::path& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary | std::ios::trunc).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

std::vector<dspark::OrderedJson> json_lines(const std::string& text) {
  std::vector<dspark::OrderedJson> out;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) out.push_back(dspark::OrderedJson::parse(line));
  return out;
}

std::vector<std::string> files_below(const fs::path& folder) {
  std::vector<std::string> out;
  if (!fs::exists(folder)) return out;
  for (const auto& entry : fs::recursive_directory_iterator(folder))
    if (entry.path().filename() != ".lock" && !entry.is_directory()) out.push_back(fs::relative(entry.path(), folder));
  std::sort(out.begin(), out.end());
  return out;
}

std::map<int64_t, std::string> step_lines(const fs::path& json) {
  std::map<int64_t, std::string> out;
  for (auto line : json_lines(file_bytes(json))) {
    if (line["phase"] != "train") continue;
    for (const char* clock : {"ms", "tokens_per_s", "slots_per_s", "mfu"}) line.erase(clock);
    CHECK(out.emplace(line["step"].get<int64_t>(), line.dump()).second);
  }
  return out;
}

void wait_for_lines(Process& run, const fs::path& json, int64_t n) {
  const double start = dspark::now_s();
  while (run.running() && dspark::now_s() - start < 600) {
    if (fs::exists(json)) {
      const std::string text = file_bytes(json);
      if (std::count(text.begin(), text.end(), '\n') >= n) return;
    }
    ::usleep(500);
  }
}

double random_fraction() {
  static std::mt19937_64 generator{std::random_device{}()};
  return std::uniform_real_distribution<double>(0, 1)(generator);
}

void require_ok(const Ran& ran) {
  INFO(ran.describe());
  REQUIRE(ran.code == 0);
}
