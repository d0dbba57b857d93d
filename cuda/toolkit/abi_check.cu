// Holds cuda/driver.h's and cuda/blas_api.h's types and numbers against the toolkit's headers. Compiled with the kernels; no code.
#include <cublasLt.h>
#include <cuda.h>

#include <cstddef>
#include <type_traits>

#include "cuda/blas_api.h"
#include "cuda/driver.h"

namespace dspark::cuda {
namespace {

// The same calling convention, argument by argument: pointers are pointers, enums are ints.
template <typename Ours, typename Theirs>
constexpr bool same_argument() {
  if constexpr (std::is_pointer_v<Theirs>) return std::is_pointer_v<Ours>;
  else if constexpr (std::is_enum_v<Theirs>) return std::is_integral_v<Ours> && sizeof(Ours) == sizeof(Theirs);
  else return std::is_same_v<Ours, Theirs> || (std::is_integral_v<Ours> && std::is_integral_v<Theirs> && sizeof(Ours) == sizeof(Theirs));
}
template <typename Ours, typename Theirs>
struct SameArguments : std::false_type {};
template <typename R, typename... A, typename S, typename... B>
  requires(sizeof...(A) == sizeof...(B))
struct SameArguments<R (*)(A...), S (*)(B...)> : std::bool_constant<same_argument<R, S>() && (same_argument<A, B>() && ...)> {};

#define DS_SAME(name, parameters) static_assert(SameArguments<int(*) parameters, decltype(&::name)>::value, #name);
DS_CUDA_DRIVER(DS_SAME)
DS_CUBLASLT(DS_SAME)

static_assert(sizeof(Copy2D) == sizeof(CUDA_MEMCPY2D) && sizeof(DevicePointer) == sizeof(CUdeviceptr));
#define DS_FIELD(ours, theirs) static_assert(offsetof(Copy2D, ours) == offsetof(CUDA_MEMCPY2D, theirs), #theirs);
DS_FIELD(src_x, srcXInBytes)
DS_FIELD(src_y, srcY)
DS_FIELD(src_type, srcMemoryType)
DS_FIELD(src_host, srcHost)
DS_FIELD(src_device, srcDevice)
DS_FIELD(src_array, srcArray)
DS_FIELD(src_pitch, srcPitch)
DS_FIELD(dst_x, dstXInBytes)
DS_FIELD(dst_y, dstY)
DS_FIELD(dst_type, dstMemoryType)
DS_FIELD(dst_host, dstHost)
DS_FIELD(dst_device, dstDevice)
DS_FIELD(dst_array, dstArray)
DS_FIELD(dst_pitch, dstPitch)
DS_FIELD(width_bytes, WidthInBytes)
DS_FIELD(height, Height)

static_assert(kHostMemory == CU_MEMORYTYPE_HOST && kDeviceMemory == CU_MEMORYTYPE_DEVICE && kSuccess == CUDA_SUCCESS && kNotReady == CUDA_ERROR_NOT_READY);
static_assert(kStreamNonBlocking == CU_STREAM_NON_BLOCKING && kEventDisableTiming == CU_EVENT_DISABLE_TIMING && kCaptureThreadLocal == CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
static_assert(kComputeMajor == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR && kComputeMinor == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);

static_assert(sizeof(BlasAlgorithm) == sizeof(cublasLtMatmulAlgo_t) && sizeof(BlasHeuristic) == sizeof(cublasLtMatmulHeuristicResult_t));
static_assert(offsetof(BlasHeuristic, workspace_bytes) == offsetof(cublasLtMatmulHeuristicResult_t, workspaceSize) &&
              offsetof(BlasHeuristic, state) == offsetof(cublasLtMatmulHeuristicResult_t, state));
static_assert(kReal32 == CUDA_R_32F && kReal16b == CUDA_R_16BF && kCompute32 == CUBLAS_COMPUTE_32F);
static_assert(CUBLAS_OP_N == 0 && CUBLAS_OP_T == 1 && CUBLAS_STATUS_SUCCESS == 0);
static_assert(kDescTransA == CUBLASLT_MATMUL_DESC_TRANSA && kDescTransB == CUBLASLT_MATMUL_DESC_TRANSB);
static_assert(kPreferWorkspace == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES && kPreferReductions == CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK);
static_assert(kPreferAlignA == CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES && kPreferAlignB == CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES &&
              kPreferAlignC == CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES && kPreferAlignD == CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES);
static_assert(CUBLASLT_REDUCTION_SCHEME_NONE == 0 && kConfigSplitK == CUBLASLT_ALGO_CONFIG_SPLITK_NUM && kConfigReduction == CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME);
static_assert(MAJOR_VERSION == 0 && MINOR_VERSION == 1 && PATCH_LEVEL == 2);

}  // namespace
}  // namespace dspark::cuda
