// How long planned work takes on a machine: each kind of work by what limits it there, operations or bytes, added up by part.
#pragma once

#include <string>
#include <vector>

#include "job/machines.h"

namespace dspark::job {

struct PartCost {
  model::Part part = model::Part::other;
  bool backward = false;
  model::PlanCounts counts;
  double seconds = 0;
  std::string limit;  // what takes most of it: matrix, attention, vector, memory or host
};

// In the order of Part, forward before backward. Kinds of work that the machine does not do (packing weights) are left out.
std::vector<PartCost> predict(const std::vector<model::PlanEntry>& entries, const Machine& machine);
double total_seconds(const std::vector<PartCost>& parts);
model::PlanCounts total_counts(const std::vector<PartCost>& parts);
// What takes most of the time of all parts.
std::string total_limit(const std::vector<PartCost>& parts);
const char* part_name(model::Part part);

}  // namespace dspark::job
