// A fake driver, a fake cuBLASLt and a fake NCCL on the emulation: the tables of functions that cuda/ gets in tests. They check what they
// are given (pointers, sizes, alignment, layouts, workspace, that all ranks make the same calls, that nothing is left behind) and throw
// a Fault that says what is wrong.
#pragma once

#include <vector>

#include "cuda/blas_api.h"
#include "cuda/driver.h"
#include "cuda/nccl.h"

namespace dspark::emulation {

const cuda::Driver& fake_driver();
const cuda::BlasApi& fake_blas();
// Its ranks share the machine (streams.h: set_give_way). A collective happens when the streams of all its ranks have come to it.
const cuda::Nccl& fake_nccl();

// Objects of either that were made and not destroyed: descriptors, layouts, events, streams, pinned memory, handles, graphs.
int64_t live_objects();
// The GPUs of the fake machine, and their architecture.
void set_devices(int count, int major, int minor);
void set_driver_version(int version);  // 13000: CUDA 13.0
int64_t graph_launches();  // so far
void set_nccl_version(int version);    // 22800: 2.28.0
// From here on the communicators of `rank` say that a peer's machine failed (ncclRemoteError); -1: nobody's do.
void fail_nccl(int rank);
void set_blas_version(int major, int minor, int patch);

// The fake cuBLASLt's algorithms, which add up in different orders; better ones are faster. What the heuristic offers first depends
// on the number of rows.
enum BlasVariant : int { kSplitSums, kHugeWorkspace, kManyRowsOnly, kSlow, kMiddling, kFast };
// Those that products were enqueued with since the last call.
std::vector<int> blas_variants_used();

}  // namespace dspark::emulation
