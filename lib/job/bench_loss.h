// Benchmark of the vocabulary loss alone: forward and gradient of `vocab_loss` at a drafter's shape, for several chunk sizes.
//
// Protocol: a full row of the shape's tokens and anchors, every slot supervised, deepspec's terms; normal random states and weights;
// one call to warm up, then repeats; the value is their median. The limit is the device's of matrix
// products (job/bench_limit.h): what is lost to it are the sweeps over the logits, the memory and the products' own loss.
#pragma once

#include <string>
#include <vector>

#include "job/bench_result.h"

namespace dspark::job {

struct BenchLossOptions {
  std::string shape = "small", precision = "bf16", kernel = "auto", device = "auto";
  int64_t tokens = 0, anchors = 0;  // 0: the shape's
  int threads = 0, repeats = 5;
  std::vector<int64_t> chunk_slots = {128, 512, 2048};
};

std::vector<BenchResult> bench_loss(const BenchLossOptions& options);

}  // namespace dspark::job
