#include "model/ops_cpu/backend.h"

#include <cmath>

namespace dspark::model::cpu {

namespace {
constexpr int64_t kPiece = 1024;  // summed in fp32 lanes; pieces add up in fp64
constexpr int64_t kParts = 256;   // partial sums, whatever the number of threads
}  // namespace

void CpuOps::sum_squares(Context&, const SumSquares& a) {
  const int64_t per_row = (a.grad.cols + kPiece - 1) / kPiece, pieces = a.grad.rows * per_row;
  double* partial = m_.scratch<double>(0);  // [kParts]
  m_.pool().parallel_for(
      kParts, row_grain(std::max<int64_t>(a.grad.size() / kParts, 1)), [&](int64_t begin, int64_t end, int) {
        for (int64_t part = begin; part < end; ++part) {
          double sum = 0;
          for (int64_t i = pieces * part / kParts; i < pieces * (part + 1) / kParts; ++i) {
            const int64_t c = i % per_row * kPiece;
            sum += m_.kernels().sum_squares(row<float>(a.grad, i / per_row) + c, std::min(kPiece, a.grad.cols - c));
          }
          partial[part] = sum;
        }
      });
  double total = 0;
  for (int64_t part = 0; part < kParts; ++part) total += partial[part];
  *pointer<float>(a.sum) = static_cast<float>(total);
}

void CpuOps::finish_norm(Context&, const FinishNorm& a) {
  const float* sums = pointer<float>(a.sums);
  float* scalars = pointer<float>(a.scalars);
  double total = 0;
  for (int64_t j = 0; j < a.sums.cols; ++j) total += sums[j];
  const double norm = scalars[kGradScale] * std::sqrt(total);
  const double max_norm = scalars[kMaxNorm];
  scalars[kGradNorm] = static_cast<float>(norm);
  scalars[kClip] = max_norm > 0 ? static_cast<float>(std::min(1.0, max_norm / (norm + 1e-6))) : 1.0f;
  scalars[kFinite] = std::isfinite(norm) ? 1.0f : 0.0f;
  scalars[kSteps] += scalars[kFinite];
  scalars[kBias1] = static_cast<float>(1 - std::pow(a.beta1, static_cast<double>(scalars[kSteps])));
  scalars[kBias2] = static_cast<float>(1 - std::pow(a.beta2, static_cast<double>(scalars[kSteps])));
}

}  // namespace dspark::model::cpu
