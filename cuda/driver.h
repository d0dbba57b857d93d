// The driver's functions, as a table: in production loaded from libcuda.so.1 at run time, in tests the emulation's, which check
// what they are given. So one binary starts on machines with and without a GPU, and no CUDA header is needed to build this.
// Types and numbers are the driver API's (cuda.h); cuda/toolkit/abi_check.cu holds them against the real headers where a toolkit is at hand.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace dspark::cuda {

using DevicePointer = unsigned long long;  // CUdeviceptr

struct Copy2D {  // CUDA_MEMCPY2D
  size_t src_x = 0, src_y = 0;
  unsigned src_type = 0;  // kHostMemory, kDeviceMemory
  const void* src_host = nullptr;
  DevicePointer src_device = 0;
  void* src_array = nullptr;
  size_t src_pitch = 0;
  size_t dst_x = 0, dst_y = 0;
  unsigned dst_type = 0;
  void* dst_host = nullptr;
  DevicePointer dst_device = 0;
  void* dst_array = nullptr;
  size_t dst_pitch = 0;
  size_t width_bytes = 0, height = 0;
};
constexpr unsigned kHostMemory = 1, kDeviceMemory = 2;
constexpr int kSuccess = 0, kNotReady = 600;
constexpr unsigned kStreamNonBlocking = 1, kEventDisableTiming = 2;
constexpr int kCaptureThreadLocal = 1;
constexpr int kComputeMajor = 75, kComputeMinor = 76;  // CUdevice_attribute

#define DS_CUDA_DRIVER(X)                                                    \
  X(cuInit, (unsigned flags))                                                \
  X(cuDriverGetVersion, (int* version))                                      \
  X(cuDeviceGetCount, (int* count))                                          \
  X(cuDeviceGet, (int* device, int ordinal))                                 \
  X(cuDeviceGetName, (char* name, int bytes, int device))                    \
  X(cuDeviceGetAttribute, (int* value, int attribute, int device))           \
  X(cuDeviceTotalMem_v2, (size_t* bytes, int device))                        \
  X(cuDevicePrimaryCtxRetain, (void** context, int device))                  \
  X(cuDevicePrimaryCtxRelease_v2, (int device))                              \
  X(cuCtxSetCurrent, (void* context))                                        \
  X(cuMemAlloc_v2, (DevicePointer* p, size_t bytes))                         \
  X(cuMemFree_v2, (DevicePointer p))                                         \
  X(cuMemHostAlloc, (void** p, size_t bytes, unsigned flags))                \
  X(cuMemFreeHost, (void* p))                                                \
  X(cuMemcpy2DAsync_v2, (const Copy2D* copy, void* stream))                  \
  X(cuStreamCreate, (void** stream, unsigned flags))                         \
  X(cuStreamDestroy_v2, (void* stream))                                      \
  X(cuStreamSynchronize, (void* stream))                                     \
  X(cuStreamWaitEvent, (void* stream, void* event, unsigned flags))          \
  X(cuEventCreate, (void** event, unsigned flags))                           \
  X(cuEventDestroy_v2, (void* event))                                        \
  X(cuEventRecord, (void* event, void* stream))                              \
  X(cuEventQuery, (void* event))                                             \
  X(cuEventSynchronize, (void* event))                                       \
  X(cuEventElapsedTime_v2, (float* ms, void* start, void* end))              \
  X(cuLaunchHostFunc, (void* stream, void (*function)(void*), void* user))   \
  X(cuStreamBeginCapture_v2, (void* stream, int mode))                       \
  X(cuStreamEndCapture, (void* stream, void** graph))                        \
  X(cuGraphInstantiateWithFlags, (void** executable, void* graph, unsigned long long flags)) \
  X(cuGraphLaunch, (void* executable, void* stream))                         \
  X(cuGraphExecDestroy, (void* executable))                                  \
  X(cuGraphDestroy, (void* graph))                                           \
  X(cuGetErrorString, (int error, const char** text))

struct Driver {
#define DS_POINTER(name, parameters) int(*name) parameters = nullptr;
  DS_CUDA_DRIVER(DS_POINTER)
#undef DS_POINTER
};

constexpr const char *kDriverFile = "libcuda.so.1", *kDriverWanted = "an NVIDIA driver for CUDA 13 (580 or newer)";
constexpr int kDriverVersion = 13000;  // what kernels compiled by CUDA 13 need

// From kDriverFile. Throws an Error that names the file and the driver version wanted.
const Driver& nvidia_driver();
// Throws unless `result` is success: "cuMemAlloc: out of memory (2) ...".
void check(const Driver& driver, int result, const std::string& what);

}  // namespace dspark::cuda
