// Plain matrix products by cuBLASLt: bf16 or fp32 in, bf16 or fp32 out, fp32 sums, deterministic algorithms only.
//
// cuBLASLt's functions come as a table, like the driver's: loaded from libcublasLt.so at run time, or a fake that checks layouts,
// alignment and workspace. cuBLASLt thinks in columns; a row-major matrix is its column-major transpose, so every product here is
// asked for as D^T = op(B)^T op(A)^T.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>

#include "cuda/kernels.h"

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
constexpr int kPreferWorkspace = 1, kPreferReductions = 3, kPreferAlignA = 5, kPreferAlignB = 6, kPreferAlignC = 7, kPreferAlignD = 8;

#define DS_CUBLASLT(X)                                                                                                                   \
  X(cublasLtCreate, (void** handle))                                                                                                     \
  X(cublasLtDestroy, (void* handle))                                                                                                     \
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

// d [n, m] (+)= op(x) op(w) for row-major matrices: x is [n, k], or [k, n] and transposed; w is [k, m], or [m, k] and transposed.
struct Product {
  Matrix d, x, w;
  bool transpose_x = false, transpose_w = false, add = false;
};

class Blas {
 public:
  // The workspace is device memory, 256-byte aligned.
  Blas(const BlasApi& api, Scratch workspace);
  ~Blas();
  Blas(const Blas&) = delete;
  Blas& operator=(const Blas&) = delete;
  void multiply(Stream stream, const Product& p);

 private:
  // What a choice depends on; the algorithm is asked for once a key and kept.
  struct Key {
    int64_t n, m, k, ld_d, ld_x, ld_w;
    unsigned align_d, align_x, align_w;
    bool half_d, half_in, transpose_x, transpose_w, add;
    auto operator<=>(const Key&) const = default;
  };
  struct Plan {
    void *desc = nullptr, *x = nullptr, *w = nullptr, *d = nullptr;
    BlasAlgorithm algorithm{};
    size_t workspace_bytes = 0;
  };
  const Plan& plan(const Key& key);
  const BlasApi& api_;
  Scratch workspace_;
  void* handle_ = nullptr;
  std::map<Key, Plan> plans_;
};

}  // namespace dspark::cuda
