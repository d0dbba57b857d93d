#include "job/predict.h"

#include <algorithm>
#include <map>

namespace dspark::job {

using namespace model;

namespace {

struct Time {
  double seconds = 0;
  const char* limit = "";
};

Time time_of(const PlanEntry& e, const Machine& machine) {
  if (e.work == Work::pack && !machine.packs) return {};
  const Rate& r = machine.of(e.work);
  const double flops = r.flops > 0 ? e.counts.flops / r.flops : 0, bytes = r.bytes > 0 ? e.counts.bytes() / r.bytes : 0;
  if (bytes > flops) return {bytes, e.work == Work::upload ? "host" : "memory"};
  const bool matrix = e.work == Work::product || e.work == Work::gradient_product || e.work == Work::muon;
  const bool attention = e.work == Work::attention || e.work == Work::attention_backward;
  return {flops, matrix ? "matrix" : attention ? "attention" : "vector"};
}

std::string largest(const std::map<std::string, double>& seconds) {
  const auto it = std::max_element(seconds.begin(), seconds.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
  return it == seconds.end() ? "" : it->first;
}

}  // namespace

std::vector<PartCost> predict(const std::vector<PlanEntry>& entries, const Machine& machine) {
  std::map<std::pair<Part, bool>, std::pair<PartCost, std::map<std::string, double>>> parts;
  for (const PlanEntry& e : entries) {
    if (e.work == Work::pack && !machine.packs) continue;
    auto& [part, limits] = parts[{e.label.part, e.label.backward}];
    const Time t = time_of(e, machine);
    part.part = e.label.part, part.backward = e.label.backward;
    part.counts.add(e.counts);
    part.seconds += t.seconds;
    limits[t.limit] += t.seconds;
  }
  std::vector<PartCost> all;
  for (auto& [key, value] : parts) {
    value.first.limit = largest(value.second);
    all.push_back(value.first);
  }
  return all;
}

double total_seconds(const std::vector<PartCost>& parts) {
  double sum = 0;
  for (const PartCost& p : parts) sum += p.seconds;
  return sum;
}

PlanCounts total_counts(const std::vector<PartCost>& parts) {
  PlanCounts sum;
  for (const PartCost& p : parts) sum.add(p.counts);
  return sum;
}

std::string total_limit(const std::vector<PartCost>& parts) {
  std::map<std::string, double> seconds;
  for (const PartCost& p : parts) seconds[p.limit] += p.seconds;
  return largest(seconds);
}

const char* part_name(Part part) {
  constexpr const char* names[kParts] = {"other", "upload", "context projections", "block trunk", "attention", "vocabulary, target", "vocabulary, draft", "markov", "optimizer"};
  return names[static_cast<size_t>(part)];
}

}  // namespace dspark::job
