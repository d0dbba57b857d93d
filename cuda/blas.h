// Plain matrix products by cuBLASLt: bf16 or fp32 in, bf16 or fp32 out, fp32 sums, deterministic algorithms only.
//
// cuBLASLt thinks in columns; a row-major matrix is its column-major transpose, so every product here is asked for as
// D^T = op(B)^T op(A)^T.
//
// Which algorithm makes a product is part of a run's bits, so rows do not choose: there is one for each kind of product (Kind below),
// whatever the number of rows, as model::GemmChoice wants it. It is the one that a table names; else, while `measure` works, the
// fastest for the first product of its kind; else the first that cuBLASLt's heuristic gives for kUsualRows rows. An algorithm is an
// opaque block of bytes that the library promises to take back in the same version, on the same architecture: that is how choices are
// written down.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cuda/blas_api.h"
#include "cuda/kernels.h"
#include "model/backends.h"

namespace dspark::cuda {

// d [n, m] (+)= op(x) op(w) for row-major matrices: x is [n, k], or [k, n] and transposed; w is [k, m], or [m, k] and transposed.
struct Product {
  Matrix d, x, w;
  bool transpose_x = false, transpose_w = false, add = false;
};

class CudaDevice;

class Blas {
 public:
  static constexpr int64_t kUsualRows = 1024;
  // The workspace is device memory, 256-byte aligned.
  Blas(const BlasApi& api, CudaDevice& device, Scratch workspace);
  ~Blas();
  Blas(const Blas&) = delete;
  Blas& operator=(const Blas&) = delete;
  void multiply(Stream stream, const Product& p);
  // Has the bits of another run. Before any product; throws for choices that another version of cuBLASLt or another architecture made.
  void take(const std::vector<model::GemmChoice>& choices);
  // Kinds of product that `work` meets first are measured. Waits.
  void measure(const std::function<void()>& work);
  // Those given, and of the kinds of product met so far, in the order they came.
  const std::vector<model::GemmChoice>& choices() const { return choices_; }

 private:
  // What an algorithm may depend on. `depth` is k, or the rows of d where x is transposed and k is rows.
  struct Kind {
    int64_t cols, depth;
    unsigned align_d, align_x, align_w;
    bool half_d, half_in, transpose_x, transpose_w, add;
    auto operator<=>(const Kind&) const = default;
  };
  struct Key {
    Kind kind;
    int64_t rows, ld_d, ld_x, ld_w;  // rows: of x
    auto operator<=>(const Key&) const = default;
  };
  struct Layouts;
  struct Plan;
  std::unique_ptr<Layouts> layouts(const Key& key) const;
  Key usual(const Kind& kind, int64_t rows) const;
  // Its workspace, if the algorithm can make this product in the one there is.
  std::optional<size_t> fits(const Layouts& l, const BlasAlgorithm& algorithm) const;
  std::vector<BlasAlgorithm> candidates(const Kind& kind) const;
  const BlasAlgorithm& choose(const Kind& kind, int64_t rows);
  BlasAlgorithm fastest(const Kind& kind, int64_t rows, const std::vector<BlasAlgorithm>& among);
  void run(Stream stream, const Plan& plan, const Product& p) const;
  const Plan& plan(const Key& key);

  const BlasApi& api_;
  CudaDevice& device_;
  Scratch workspace_;
  bool measuring_ = false;
  void* handle_ = nullptr;
  std::string maker_;  // "13.0.2 sm_90": the library's version and the architecture
  std::vector<model::GemmChoice> given_, choices_;
  std::map<Kind, BlasAlgorithm> algorithms_;
  std::map<Key, std::unique_ptr<Plan>> plans_;
};

}  // namespace dspark::cuda
