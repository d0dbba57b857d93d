// Frequencies of every rotary variant (DESIGN 3).
#pragma once

#include <cstdint>
#include <vector>

#include "formats/rope_config.h"

namespace dspark::model {

struct RopeTable {
  std::vector<double> inv_freq;  // [rot/2]
  int64_t rot = 0;               // rotated channels, a prefix of the head
  double scale = 1;              // multiplies cos and sin (yarn's attention factor)
};

// `max_position` is the model's max_position_embeddings; `row_length` the row's largest position + 1 (only `dynamic` looks).
// Throws for a type that is not known.
RopeTable make_rope_table(const formats::RopeConfig& config, int64_t head_dim, int64_t max_position, int64_t row_length = 0);

}  // namespace dspark::model
