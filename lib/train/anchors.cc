#include "train/anchors.h"

#include <algorithm>

namespace dspark::train {

std::vector<int32_t> anchor_candidates(std::span<const uint8_t> mask) {
  std::vector<int32_t> out;
  for (size_t p = 0; p + 1 < mask.size(); ++p)
    if (mask[p] != 0 && mask[p + 1] != 0) out.push_back(static_cast<int32_t>(p));
  return out;
}

std::vector<int32_t> row_anchor_candidates(std::span<const uint8_t> mask, int64_t block) {
  std::vector<int32_t> out;
  for (int64_t p = 0; p + block < static_cast<int64_t>(mask.size()); ++p)
    if (mask[static_cast<size_t>(p)] != 0) out.push_back(static_cast<int32_t>(p));
  return out;
}

std::vector<int32_t> draw_anchors(const std::vector<int32_t>& candidates, int64_t limit, uint64_t seed, int64_t epoch,
                                  uint64_t document_id) {
  const auto n = static_cast<int64_t>(candidates.size());
  if (limit <= 0 || n <= limit) return candidates;
  const Rng rng(seed, RngStream::anchors, document_id ^ (static_cast<uint64_t>(epoch) * 0x9E3779B97F4A7C15u));
  std::vector<int32_t> pool = candidates;  // the first `limit` places of a Fisher-Yates shuffle
  for (int64_t i = 0; i < limit; ++i)
    std::swap(pool[i], pool[i + static_cast<int64_t>(rng.below(static_cast<uint64_t>(i), static_cast<uint64_t>(n - i)))]);
  pool.resize(static_cast<size_t>(limit));
  std::sort(pool.begin(), pool.end());
  return pool;
}

}  // namespace dspark::train
