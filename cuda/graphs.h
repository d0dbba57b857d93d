// CUDA graphs for stretches of a step that are the same every time: the same kernels, on the same memory, with the same sizes. What
// changes between steps (learning rate, clip scale, ...) lies in device memory, so that one launch replaces dozens.
//
// Where it pays: a launch costs the host 2 to 4 us, so a graph gains time where kernels take less than that. Muon's do, some forty
// a matrix. A row's forward and backward are some 300 launches for five layers, about 1 ms of the host's, which works a step ahead
// of the device: that hides behind 4 ms (0.6B shapes on an H200, by `train --plan`) to 311 ms (Kimi-K3's), and its sizes change with
// every row. `bench step` reports the host's share.
//
// A stretch is known by its key, which holds everything that the host puts into it. The first time it is enqueued as it is: kernels
// are loaded and products choose their algorithms, which a capture could not bear. The second time it is captured; from then on only
// the graph is launched. Its work may enqueue kernels and products on the compute queue, and nothing else.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <vector>

#include "cuda/driver.h"

namespace dspark::cuda {

class Graphs {
 public:
  Graphs(const Driver& driver, void* stream) : driver_(driver), stream_(stream) {}
  ~Graphs();
  Graphs(const Graphs&) = delete;
  Graphs& operator=(const Graphs&) = delete;
  void run(const std::vector<int64_t>& key, const std::function<void()>& work);

 private:
  void* capture(const std::function<void()>& work);
  const Driver& driver_;
  void* stream_;
  std::map<std::vector<int64_t>, void*> executables_;  // null: seen once
};

}  // namespace dspark::cuda
