// Drawing from unnormalised weights; shared by the sampling operators.
#pragma once

#include "cuda/matrix.h"

namespace dspark::cuda {

constexpr int kDrawBytes = (kBlock + 1) * 16;  // of shared memory, from its beginning on

// The first index whose running sum in fp64 exceeds uniform times the total, in every one of a block's kBlock threads. A thread has
// the weights of one stretch; stretches are added up in their order.
DS_DEVICE int draw(const float* weights, int n, double uniform) {
  const Shared<double> before(0, kBlock + 1);  // sums of all stretches before a thread's, and of all
  const Shared<int> last((kBlock + 1) * 8, kBlock), result((kBlock + 1) * 12, 1);
  const int length = (n + kBlock - 1) / kBlock, first = thread() * length, end = first + length < n ? first + length : n;
  double sum = 0;
  int last_with_weight = 0;
  for (int i = first; i < end; ++i) {
    const float w = load(weights + i);
    sum += static_cast<double>(w);
    if (w > 0) last_with_weight = i;
  }
  before.set(thread() + 1, sum);
  last.set(thread(), last_with_weight);
  sync_block();
  if (thread() == 0) {
    double total = 0;
    before.set(0, total);
    for (int t = 0; t < kBlock; ++t) {
      before.set(t + 1, total += before[t + 1]);
      last_with_weight = last[t] > last_with_weight ? last[t] : last_with_weight;
    }
    result.set(0, last_with_weight);  // for when uniform times the total is rounded up to the total
  }
  sync_block();
  const double border = uniform * before[kBlock];
  if (!(before[thread()] > border) && before[thread() + 1] > border) {
    sum = before[thread()];
    for (int i = first; i < end; ++i) {
      sum += static_cast<double>(load(weights + i));
      if (!(sum > border) && i < last_with_weight) continue;
      result.set(0, i);
      break;
    }
  }
  sync_block();
  return result[0];
}

}  // namespace dspark::cuda
