// cuBLASLt's functions as a table, like the driver's: loaded from libcublasLt.so at run time, or a fake that checks layouts, alignment
// and workspace. Nothing here needs the rest of the project, so that nvcc can hold it against the real headers.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dspark::cuda {

struct BlasAlgorithm {  // cublasLtMatmulAlgo_t
  uint64_t data[8];
};
struct BlasHeuristic {  // cublasLtMatmulHeuristicResult_t
  BlasAlgorithm algorithm;
  size_t workspace_bytes;
  int state;
  float waves;
  int reserved[4];
};
// cudaDataType_t, cublasComputeType_t, and the attributes' numbers.
constexpr int kReal32 = 0, kReal16b = 14, kCompute32 = 68;
constexpr int kDescTransA = 3, kDescTransB = 4;
constexpr int kConfigSplitK = 2, kConfigReduction = 3;
constexpr int kPreferWorkspace = 1, kPreferReductions = 3, kPreferAlignA = 5, kPreferAlignB = 6, kPreferAlignC = 7, kPreferAlignD = 8;

#define DS_CUBLASLT(X)                                                                                                                   \
  X(cublasLtCreate, (void** handle))                                                                                                     \
  X(cublasLtDestroy, (void* handle))                                                                                                     \
  X(cublasLtGetProperty, (int part, int* value))                                                                                         \
  X(cublasLtMatmulDescCreate, (void** desc, int compute, int scale_type))                                                                \
  X(cublasLtMatmulDescSetAttribute, (void* desc, int attribute, const void* value, size_t bytes))                                        \
  X(cublasLtMatmulDescDestroy, (void* desc))                                                                                             \
  X(cublasLtMatrixLayoutCreate, (void** layout, int type, uint64_t rows, uint64_t cols, int64_t ld))                                     \
  X(cublasLtMatrixLayoutDestroy, (void* layout))                                                                                         \
  X(cublasLtMatmulPreferenceCreate, (void** preference))                                                                                 \
  X(cublasLtMatmulPreferenceSetAttribute, (void* preference, int attribute, const void* value, size_t bytes))                            \
  X(cublasLtMatmulPreferenceDestroy, (void* preference))                                                                                 \
  X(cublasLtMatmulAlgoGetHeuristic,                                                                                                      \
    (void* handle, void* desc, void* a, void* b, void* c, void* d, void* preference, int asked, BlasHeuristic* results, int* found))     \
  X(cublasLtMatmulAlgoCheck,                                                                                                             \
    (void* handle, void* desc, void* a, void* b, void* c, void* d, const BlasAlgorithm* algorithm, BlasHeuristic* result))               \
  X(cublasLtMatmulAlgoConfigGetAttribute,                                                                                                \
    (const BlasAlgorithm* algorithm, int attribute, void* value, size_t bytes, size_t* written))                                         \
  X(cublasLtMatmul, (void* handle, void* desc, const void* alpha, const void* a, void* a_layout, const void* b, void* b_layout,          \
                     const void* beta, const void* c, void* c_layout, void* d, void* d_layout, const BlasAlgorithm* algorithm,           \
                     void* workspace, size_t workspace_bytes, void* stream))

struct BlasApi {
#define DS_POINTER(name, parameters) int(*name) parameters = nullptr;
  DS_CUBLASLT(DS_POINTER)
#undef DS_POINTER
};

// From libcublasLt.so.13. Throws an Error that names the file and version wanted.
const BlasApi& nvidia_blas();

}  // namespace dspark::cuda
