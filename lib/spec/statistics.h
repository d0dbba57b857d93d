// Acceptance statistics of rounds, by prompt and in total (DESIGN 11, 14).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "spec/decoder.h"

namespace dspark::spec {

// One prompt's rounds, summed. Rounds cut by the token limit are left out of everything but `cut`.
struct PromptStats {
  int64_t rounds = 0, cut = 0;
  int64_t length_sum = 0;                  // accepted lengths
  std::vector<int64_t> proposed, accepted;  // by position: rounds that proposed it, rounds that accepted it and all before
  int64_t tokens = 0;                      // new tokens, the prefill's not counted
  double seconds = 0, plain_seconds = 0;
  int64_t plain_tokens = 0;
  double accepted_length() const { return rounds > 0 ? static_cast<double>(length_sum) / static_cast<double>(rounds) : 0; }
};
PromptStats prompt_stats(const Decoded& decoded, int64_t proposals);

struct Interval {
  double mean = 0, low = 0, high = 0;
};

// Sum of lengths over number of rounds; 95 % by bootstrap over prompts (`samples` resamples, fixed by the seed).
Interval accepted_length(std::span<const PromptStats> prompts, uint64_t seed, int samples = 2000);
// Mean over prompts of the difference of accepted lengths, a - b, where both have rounds; 95 % by bootstrap over prompts.
Interval paired_difference(std::span<const PromptStats> a, std::span<const PromptStats> b, uint64_t seed, int samples = 2000);
// Everything added up.
PromptStats total(std::span<const PromptStats> prompts);

}  // namespace dspark::spec
