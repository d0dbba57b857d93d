// eval: what a drafter gains, by real speculative decoding; and ways to look at it at work.
#pragma once

#include <string>
#include <vector>

#include "job/common.h"

namespace dspark::job {

struct EvalOptions {
  CommonOptions common;
  fs::path target;
  std::vector<fs::path> drafters;   // several: compared with the first, paired by prompt
  std::vector<fs::path> data;       // TASK.jsonl: {"turns": [...]} or any row dialect with a user turn
  double temperature = 1.0, top_p = 1.0, min_p = 0;
  int64_t top_k = 0, max_new_tokens = 2048, limit = 0, max_length = 4096;
  bool plain = true;                // also decode without drafting, interleaved, for tokens/s
  std::string prompt;
  bool chat = false;
};

void run_eval(const EvalOptions& options);

}  // namespace dspark::job
