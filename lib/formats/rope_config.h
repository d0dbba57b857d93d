// Rotary embeddings as configs describe them; model/rope.h turns one into frequencies.
#pragma once

#include <cstdint>
#include <string>

namespace dspark::formats {

// What readers accept: outside of it frequencies are no rotation any more (all one, none, not finite).
inline constexpr double kLeastRopeTheta = 1, kMostRopeTheta = 1e15, kMostRopeFactor = 1e6;  // factors: from 1/most

struct RopeConfig {
  std::string type = "default";  // default, linear, yarn, llama3, dynamic, proportional
  double theta = 10000.0;
  double factor = 1.0;                 // linear, yarn, llama3, dynamic
  double partial_rotary_factor = 1.0;  // rotate only this first fraction of the head
  int64_t original_max_position = 0;   // original_max_position_embeddings; 0: the model's max_position_embeddings
  double low_freq_factor = 1, high_freq_factor = 4;             // llama3
  double beta_fast = 32, beta_slow = 1;                         // yarn
  double attention_factor = 0, mscale = 0, mscale_all_dim = 0;  // yarn; 0: not given
  bool truncate = true;                                         // yarn: round the ramp bounds

  // Channels behind the first int(partial_rotary_factor * HD) pass through. `proportional` means another thing by the factor.
  bool rotates_part() const { return partial_rotary_factor < 1 && type != "proportional"; }
  bool operator==(const RopeConfig&) const = default;
};

// What a drafter's trainer made of partial_rotary_factor (DESIGN 3). Servers rotate only that fraction of a head; the public
// trainers ignore the factor and train the full rotation, so that a config which still says it describes another drafter.
enum class Rotary : uint8_t {
  unknown,    // the file does not say
  served,     // trained as servers rotate
  reference,  // trained as the public trainers rotate
};

}  // namespace dspark::formats
