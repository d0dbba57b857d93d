#include "golden.h"

#include <catch2/catch.hpp>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <iostream>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>

#include "core/error.h"

namespace dspark::golden {
namespace {

std::vector<fs::path> roots() {
  std::vector<fs::path> out{fs::path(DSPARK_SOURCE_DIR) / "tests/golden"};
  if (const char* more = std::getenv("DSPARK_GOLDEN")) out.emplace_back(more);
  return out;
}

// kind -> (read, passed), printed when the program ends.
struct Totals {
  std::map<std::string, std::pair<int, int>> kinds;
  ~Totals() {
    for (const auto& [kind, n] : kinds) std::cout << "golden: " << kind << ": " << n.first << " cases, " << n.second << " passed\n";
  }
};
Totals& totals() {
  static Totals t;
  return t;
}

}  // namespace

std::vector<Case> cases(std::string_view kind) {
  std::vector<Case> out;
  for (const fs::path& root : roots())
    for (const auto& entry : fs::recursive_directory_iterator(root)) {
      if (entry.path().filename() != "case.json") continue;
      const fs::path folder = entry.path().parent_path();
      if (read_json(entry.path()).value("kind", "") == kind)
        out.push_back({fs::relative(folder, root).string(), folder});
    }
  std::sort(out.begin(), out.end(), [](const Case& a, const Case& b) { return a.name < b.name; });
  return out;
}

Json description(const Case& c) { return read_json(c.folder / "case.json"); }

std::vector<double> values(const formats::SafetensorsFile& file, const std::string& name) {
  return formats::read_f64(file.get(name));
}

double relative_2norm(const std::vector<double>& got, const std::vector<double>& want, double absolute) {
  if (got.size() != want.size()) return std::numeric_limits<double>::infinity();
  double difference = 0, norm = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    if (!std::isfinite(got[i]) || !std::isfinite(want[i])) return std::numeric_limits<double>::infinity();
    const double d = std::max(0.0, std::abs(got[i] - want[i]) - absolute);
    difference += d * d;
    norm += want[i] * want[i];
  }
  if (norm == 0) return difference == 0 ? 0 : std::numeric_limits<double>::infinity();
  return std::sqrt(difference / norm);
}

bool Report::check(const std::string& what, double error, double bound) {
  const bool ok = error <= bound;
  const double ratio = std::isfinite(error) ? error / bound : std::numeric_limits<double>::infinity();
  if (ratio > ratio_) ratio_ = ratio, worst_ = what, error_ = error, bound_ = bound;
  pass_ = pass_ && ok;
  INFO(name_ << ": " << what << ": error " << error << ", bound " << bound);
  CHECK(ok);
  return ok;
}

Report::~Report() {
  pass_ = pass_ && ratio_ >= 0;  // a case in which nothing was compared has not passed
  std::cout << fmt::format("golden {:<44} {:<28} worst {:.3g} of {:.3g} ({}) {}\n", name_, kind_, error_, bound_, worst_,
                           pass_ ? "pass" : "FAIL");
  auto& t = totals().kinds[kind_];
  ++t.first;
  t.second += pass_ ? 1 : 0;
}

}  // namespace dspark::golden
