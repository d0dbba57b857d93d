// Which rank keeps and updates which tensor (ZeRO-1, DESIGN 10): whole tensors, in groups of at most 16 ranks that each hold
// every tensor once. Pure functions of the costs and the number of ranks, so that all ranks agree without talking.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace dspark::train {

inline constexpr int64_t kMostRanksOfAGroup = 16;

// Ranks of a shard group: the largest divisor of `ranks` up to `most`, so that all groups are alike.
int64_t shard_group_ranks(int64_t ranks, int64_t most = kMostRanksOfAGroup);

// The owner, in [0, ranks), of each tensor: the costliest first, each to the rank that has least so far (the lower one of equals).
std::vector<int> assign_owners(std::span<const double> costs, int64_t ranks);

// Largest share over the mean share: how much longer the slowest rank takes than a perfect split.
double imbalance(std::span<const double> costs, std::span<const int> owners, int64_t ranks);

}  // namespace dspark::train
