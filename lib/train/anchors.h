// Anchors: where in a document blocks start (DESIGN 4, `deepspec`): every p with mask[p] and mask[p+1] inside the document is a
// candidate; up to `limit` a document are drawn uniformly without replacement, in ascending order.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/rng.h"

namespace dspark::train {

// Candidate positions of one document, ascending.
std::vector<int32_t> anchor_candidates(std::span<const uint8_t> mask);

// speculators: every p with mask[p] of a packed row of which at least `block` rows follow.
std::vector<int32_t> row_anchor_candidates(std::span<const uint8_t> mask, int64_t block);

// The draw depends on (seed, epoch, document id) only. limit <= 0: all of them.
std::vector<int32_t> draw_anchors(const std::vector<int32_t>& candidates, int64_t limit, uint64_t seed, int64_t epoch,
                                  uint64_t document_id);

}  // namespace dspark::train
