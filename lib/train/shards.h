// Which rank keeps and updates which tensor (ZeRO-1, DESIGN 10): whole tensors, in groups of at most 16 ranks that each hold
// every tensor once. Pure functions of the costs and the number of ranks, so that all ranks agree without talking.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "model/collectives.h"

namespace dspark::train {

inline constexpr int64_t kMostRanksOfAGroup = 16;

// Ranks of a shard group: the largest divisor of `ranks` up to `most`, so that all groups are alike.
int64_t shard_group_ranks(int64_t ranks, int64_t most = kMostRanksOfAGroup);

// The owner, in [0, ranks), of each tensor: the costliest first, each to the rank that has least so far (the lower one of equals).
std::vector<int> assign_owners(std::span<const double> costs, int64_t ranks);

// Largest share over the mean share: how much longer the slowest rank takes than a perfect split.
double imbalance(std::span<const double> costs, std::span<const int> owners, int64_t ranks);

// One rank's view of a run's sharing. The owners are plan_owners'.
struct Sharing {
  model::Collectives* ranks = &model::one_rank();
  std::map<std::string, int64_t> owners;  // place in a shard group, of each trained tensor; empty: this rank
  bool bf16_wire = false;                 // gradients go to their owners as bf16
  bool several() const { return ranks->size() > 1; }
  int64_t owner(const std::string& name) const { return owners.empty() ? ranks->place() : owners.at(name); }
  bool owns(const std::string& name) const { return owner(name) == ranks->place(); }
};

}  // namespace dspark::train
