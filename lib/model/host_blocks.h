// Blocks of host memory that a device gave out: what nobody freed goes with the device.
#pragma once

#include <cstdlib>
#include <unordered_set>

namespace dspark::model {

class HostBlocks {
 public:
  HostBlocks() = default;
  HostBlocks(const HostBlocks&) = delete;
  HostBlocks& operator=(const HostBlocks&) = delete;
  ~HostBlocks() {
    for (void* p : blocks_) std::free(p);
  }
  // `p` from malloc or aligned_alloc.
  void* keep(void* p) {
    blocks_.insert(p);
    return p;
  }
  void free(void* p) {
    if (blocks_.erase(p) > 0) std::free(p);
  }

 private:
  std::unordered_set<void*> blocks_;
};

}  // namespace dspark::model
