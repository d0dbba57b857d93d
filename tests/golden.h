// Golden cases: folders with a case.json whose `kind` says what it is. Every test of a kind goes through every folder of that
// kind under tests/golden and, when DSPARK_GOLDEN names another folder, under that one too. A case is data.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "core/files.h"
#include "core/json.h"
#include "formats/safetensors.h"

namespace dspark::golden {

struct Case {
  std::string name;  // folder relative to the golden root
  fs::path folder;
};

// All cases of a kind, sorted by name.
std::vector<Case> cases(std::string_view kind);
Json description(const Case& c);
std::vector<double> values(const formats::SafetensorsFile& file, const std::string& name);  // float tensors as f64

// |got - want|_2 / |want|_2, infinity when a value is not finite or the sizes differ; `absolute` is granted an element.
double relative_2norm(const std::vector<double>& got, const std::vector<double>& want, double absolute = 0);

// Collects a case's worst error relative to its bounds and prints one line when it ends.
class Report {
 public:
  Report(std::string kind, std::string name) : kind_(std::move(kind)), name_(std::move(name)) {}
  ~Report();
  // True when error <= bound (false for NaN).
  bool check(const std::string& what, double error, double bound);

 private:
  std::string kind_, name_, worst_ = "nothing compared";
  double error_ = 0, bound_ = 0, ratio_ = -1;
  bool pass_ = true;
};

}  // namespace dspark::golden
