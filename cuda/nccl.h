// NCCL's functions as a table: in production loaded from libnccl.so.2 at run time, in tests the emulation's. Types and numbers are
// those of nccl.h; cuda/toolkit/abi_check.cu is for headers that are at hand, NCCL's are not needed to build this.
#pragma once

#include <climits>
#include <cstddef>
#include <functional>
#include <memory>

#include "cuda/backend.h"
#include "model/collectives.h"

namespace dspark::cuda {

struct NcclId {  // ncclUniqueId
  char bytes[128] = {};
};
// The beginning of ncclConfig_t: what NCCL 2.14 knew and one number more; newer ones fill in the rest.
struct NcclConfig {
  size_t size = 24;
  unsigned magic = 0xcafebeef, version = 21400;
  int blocking = 0;
  int undefined = INT_MIN;  // NCCL_CONFIG_UNDEF_INT
};
static_assert(sizeof(NcclConfig) == 24);

constexpr int kNcclSuccess = 0, kNcclInProgress = 7;                 // ncclResult_t
constexpr int kNcclFloat32 = 7, kNcclFloat64 = 8, kNcclBfloat16 = 9;  // ncclDataType_t
constexpr int kNcclSum = 0;                                          // ncclRedOp_t

#define DS_NCCL(X)                                                                                                             \
  X(int, ncclGetVersion, (int* version))                                                                                       \
  X(int, ncclGetUniqueId, (NcclId* id))                                                                                        \
  X(int, ncclCommInitRankConfig, (void** comm, int ranks, NcclId id, int rank, NcclConfig* config))                            \
  X(int, ncclCommGetAsyncError, (void* comm, int* error))                                                                      \
  X(int, ncclCommFinalize, (void* comm))                                                                                       \
  X(int, ncclCommDestroy, (void* comm))                                                                                        \
  X(int, ncclCommAbort, (void* comm))                                                                                          \
  X(int, ncclGroupStart, ())                                                                                                   \
  X(int, ncclGroupEnd, ())                                                                                                     \
  X(int, ncclReduce, (const void* send, void* receive, size_t count, int type, int op, int root, void* comm, void* stream))    \
  X(int, ncclBroadcast, (const void* send, void* receive, size_t count, int type, int root, void* comm, void* stream))         \
  X(int, ncclAllReduce, (const void* send, void* receive, size_t count, int type, int op, void* comm, void* stream))           \
  X(const char*, ncclGetErrorString, (int error))                                                                              \
  X(const char*, ncclGetLastError, (void* comm))

struct Nccl {
#define DS_POINTER(result, name, parameters) result(*name) parameters = nullptr;
  DS_NCCL(DS_POINTER)
#undef DS_POINTER
};

constexpr const char *kNcclFile = "libnccl.so.2", *kNcclWanted = "NCCL 2.18 or newer for CUDA 13";
constexpr int kNcclVersion = 21800;

// From kNcclFile. Throws an Error that names the file and the version wanted.
const Nccl& nvidia_nccl();

struct NcclOptions {
  model::CollectiveOptions collectives;
  bool watchdog = true;  // a thread of its own looks for ranks that hang; without it only waits of the host do
  // How that thread looks; a test whose ranks share one emulated machine sees to it that nobody else is at it. Empty: look() alone.
  std::function<void(const std::function<void()>& look)> around_watchdog;
};
// On the functions given: what tests use. `ctx` is a cuda backend's.
std::unique_ptr<model::Collectives> make_nccl_collectives(model::Context& ctx, net::Mesh& mesh, const NcclOptions& options, const Nccl& nccl);

}  // namespace dspark::cuda
