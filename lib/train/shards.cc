#include "train/shards.h"

#include <algorithm>
#include <numeric>

#include "core/error.h"

namespace dspark::train {

int64_t shard_group_ranks(int64_t ranks, int64_t most) {
  DS_ASSERT(ranks >= 1 && most >= 1, "{} ranks in groups of at most {}", ranks, most);
  int64_t size = std::min(ranks, most);
  while (ranks % size != 0) --size;
  return size;
}

std::vector<int> assign_owners(std::span<const double> costs, int64_t ranks) {
  std::vector<size_t> order(costs.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return costs[a] > costs[b]; });
  std::vector<double> load(static_cast<size_t>(ranks), 0);
  std::vector<int> owners(costs.size(), 0);
  for (size_t i : order) {
    const auto least = std::min_element(load.begin(), load.end());
    owners[i] = static_cast<int>(least - load.begin());
    *least += costs[i];
  }
  return owners;
}

double imbalance(std::span<const double> costs, std::span<const int> owners, int64_t ranks) {
  std::vector<double> load(static_cast<size_t>(ranks), 0);
  double sum = 0;
  for (size_t i = 0; i < costs.size(); ++i) load[static_cast<size_t>(owners[i])] += costs[i], sum += costs[i];
  return sum > 0 ? *std::max_element(load.begin(), load.end()) / (sum / static_cast<double>(ranks)) : 1;
}

}  // namespace dspark::train
