// Frequencies of every rotary variant (DESIGN 3).
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "formats/rope_config.h"

namespace dspark::model {

struct RopeTable {
  std::vector<double> inv_freq;  // [rot/2]
  int64_t rot = 0;               // rotated channels, a prefix of the head
  double scale = 1;              // multiplies cos and sin (yarn's attention factor)
};

// `max_position` is the model's max_position_embeddings; `row_length` the row's largest position + 1 (only `dynamic` looks).
// Throws for a type that is not known, and for what cannot be rotated in pairs.
RopeTable make_rope_table(const formats::RopeConfig& config, int64_t head_dim, int64_t max_position, int64_t row_length = 0);

// What is trained, and so what the packed config says, when a config asks for `wanted`. Under `reference` a
// partial_rotary_factor falls away (default type) or is refused (types whose frequencies it shortens: the reference cannot
// apply them to a whole head); `proportional` is the same under both.
formats::RopeConfig trained_rope(const formats::RopeConfig& wanted, formats::Rotary rotary);

// The same rope without divisors of its frequencies [rot/2]: GGUF files keep Llama 3's scaling as such a tensor, a drafter's
// config must name it. Nothing when no `llama3` setting gives these divisors.
std::optional<formats::RopeConfig> rope_from_divisors(const formats::RopeConfig& config, const std::vector<double>& divisors,
                                                      int64_t head_dim, int64_t max_position);

}  // namespace dspark::model
