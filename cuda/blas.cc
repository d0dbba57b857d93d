#include "cuda/blas.h"

#include <fmt/format.h>

#include "core/error.h"
#include "cuda/library.h"

namespace dspark::cuda {
namespace {

void check_blas(int status, const char* what) { DS_REQUIRE(status == 0, "cuda: {} failed with cuBLAS status {}", what, status); }

// The largest power of two, up to 16, that the address is a multiple of.
unsigned alignment(const void* p) {
  unsigned a = 16;
  while (reinterpret_cast<uintptr_t>(p) % a != 0) a /= 2;
  return a;
}

}  // namespace

const BlasApi& nvidia_blas() {
  static const BlasApi api = [] {
    static const Library library({"libcublasLt.so.13", "libcublasLt.so.12"}, "cuBLASLt of CUDA 13 or 12.8 (package cublas, or the PyPI package nvidia-cublas)");
    BlasApi a;
#define DS_LOAD(name, parameters) a.name = reinterpret_cast<int(*) parameters>(library.symbol(#name));
    DS_CUBLASLT(DS_LOAD)
#undef DS_LOAD
    return a;
  }();
  return api;
}

Blas::Blas(const BlasApi& api, Scratch workspace) : api_(api), workspace_(workspace) { check_blas(api_.cublasLtCreate(&handle_), "cublasLtCreate"); }

Blas::~Blas() {
  for (const auto& [key, p] : plans_) {
    api_.cublasLtMatmulDescDestroy(p.desc);
    for (void* layout : {p.x, p.w, p.d}) api_.cublasLtMatrixLayoutDestroy(layout);
  }
  api_.cublasLtDestroy(handle_);
}

// In cuBLASLt's terms: D [m, n] = A B + beta C, all column-major, with A from w, B from x and C = D.
const Blas::Plan& Blas::plan(const Key& key) {
  if (const auto it = plans_.find(key); it != plans_.end()) return it->second;
  Plan p;
  check_blas(api_.cublasLtMatmulDescCreate(&p.desc, kCompute32, kReal32), "cublasLtMatmulDescCreate");
  const int32_t op_a = key.transpose_w ? 1 : 0, op_b = key.transpose_x ? 1 : 0;
  check_blas(api_.cublasLtMatmulDescSetAttribute(p.desc, kDescTransA, &op_a, sizeof op_a), "cublasLtMatmulDescSetAttribute");
  check_blas(api_.cublasLtMatmulDescSetAttribute(p.desc, kDescTransB, &op_b, sizeof op_b), "cublasLtMatmulDescSetAttribute");
  const auto layout = [&](void** out, bool half, int64_t rows, int64_t cols, int64_t ld) {
    check_blas(api_.cublasLtMatrixLayoutCreate(out, half ? kReal16b : kReal32, static_cast<uint64_t>(rows), static_cast<uint64_t>(cols), ld), "cublasLtMatrixLayoutCreate");
  };
  layout(&p.w, key.half_in, key.transpose_w ? key.k : key.m, key.transpose_w ? key.m : key.k, key.ld_w);
  layout(&p.x, key.half_in, key.transpose_x ? key.n : key.k, key.transpose_x ? key.k : key.n, key.ld_x);
  layout(&p.d, key.half_d, key.m, key.n, key.ld_d);

  void* preference = nullptr;
  check_blas(api_.cublasLtMatmulPreferenceCreate(&preference), "cublasLtMatmulPreferenceCreate");
  const auto prefer = [&](int attribute, const auto& value) {
    check_blas(api_.cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof value), "cublasLtMatmulPreferenceSetAttribute");
  };
  prefer(kPreferWorkspace, static_cast<uint64_t>(workspace_.bytes));
  prefer(kPreferReductions, uint32_t{0});  // no split sums: an element's order of addition is one thread block's
  prefer(kPreferAlignA, uint32_t{key.align_w});
  prefer(kPreferAlignB, uint32_t{key.align_x});
  prefer(kPreferAlignC, uint32_t{key.align_d});
  prefer(kPreferAlignD, uint32_t{key.align_d});
  BlasHeuristic result{};
  int found = 0;
  const int status = api_.cublasLtMatmulAlgoGetHeuristic(handle_, p.desc, p.w, p.x, p.d, p.d, preference, 1, &result, &found);
  api_.cublasLtMatmulPreferenceDestroy(preference);
  DS_REQUIRE(status == 0 && found > 0 && result.state == 0, "cuda: cuBLASLt has no deterministic algorithm for [{}, {}] x [{}, {}] (status {}); a newer cuBLAS may", key.n, key.k,
             key.k, key.m, status);
  p.algorithm = result.algorithm;
  p.workspace_bytes = result.workspace_bytes;
  return plans_.emplace(key, p).first->second;
}

void Blas::multiply(Stream stream, const Product& p) {
  const int64_t n = p.d.rows, m = p.d.cols, k = p.transpose_x ? p.x.rows : p.x.cols;
  const auto ld = [](const Matrix& a) { return a.stride > a.cols ? a.stride : a.cols; };
  DS_ASSERT((p.transpose_x ? p.x.cols : p.x.rows) == n && (p.transpose_w ? p.w.cols : p.w.rows) == k && (p.transpose_w ? p.w.rows : p.w.cols) == m && p.x.half == p.w.half,
            "a product of [{}, {}] and [{}, {}] into [{}, {}]", p.x.rows, p.x.cols, p.w.rows, p.w.cols, n, m);
  if (n == 0 || m == 0 || (k == 0 && p.add)) return;
  if (k == 0) return fill(stream, p.d.data, n, m, p.d.stride, p.d.half ? 2 : 4, 0);
  const Plan& chosen = plan({n, m, k, ld(p.d), ld(p.x), ld(p.w), alignment(p.d.data), alignment(p.x.data), alignment(p.w.data), p.d.half, p.x.half, p.transpose_x, p.transpose_w, p.add});
  const float alpha = 1, beta = p.add ? 1.0f : 0.0f;
  check_blas(api_.cublasLtMatmul(handle_, chosen.desc, &alpha, p.w.data, chosen.w, p.x.data, chosen.x, &beta, p.d.data, chosen.d, p.d.data, chosen.d, &chosen.algorithm,
                                 workspace_.data, chosen.workspace_bytes, stream),
             "cublasLtMatmul");
}

}  // namespace dspark::cuda
