#include "model/ops_cpu/backend.h"

#include <algorithm>

#include "core/error.h"
#include "model/ops_cpu/draw.h"

namespace dspark::model::cpu {

namespace {

// Column of target id `id` in the draft distribution; -1 when a mapped draft vocabulary lacks it.
int64_t draft_column(const Tensor& map, int32_t id) {
  if (!map) return id;
  const int32_t* ids = pointer<int32_t>(map);
  const int32_t* found = std::find(ids, ids + map.cols, id);
  return found == ids + map.cols ? -1 : found - ids;
}

}  // namespace

void CpuOps::verify_block(Context&, const VerifyBlock& a) {
  const int64_t n = a.draft_ids.cols, vocab = a.target_probs.cols;
  const int32_t* draft_ids = pointer<int32_t>(a.draft_ids);
  const double* uniform = pointer<double>(a.uniform);
  int64_t k = 0;
  for (; k < n; ++k) {
    const int32_t id = draft_ids[k];
    const int64_t column = draft_column(a.map, id);
    DS_ASSERT(id >= 0 && id < vocab && column >= 0, "token {} was not drafted from this distribution", id);
    const double draft = row<float>(a.draft_probs, k)[column], target = row<float>(a.target_probs, k)[id];
    if (!(uniform[k] * draft < target)) break;
  }
  const float* weights = row<float>(a.target_probs, k);
  if (k < n) {
    float* residual = pointer<float>(a.work);
    const float* draft = row<float>(a.draft_probs, k);
    std::copy_n(weights, vocab, residual);
    const int32_t* map = a.map ? pointer<int32_t>(a.map) : nullptr;
    for (int64_t j = 0; j < a.draft_probs.cols; ++j) {
      float& left = residual[map != nullptr ? map[j] : j];
      left = std::max(0.0f, left - draft[j]);
    }
    // All zero: the distributions are equal up to rounding, and the target's own is right.
    if (std::any_of(residual, residual + vocab, [](float v) { return v > 0; })) weights = residual;
  }
  int32_t* result = pointer<int32_t>(a.result);
  result[0] = static_cast<int32_t>(k);
  result[1] = static_cast<int32_t>(draw(weights, vocab, uniform[n]));
}

}  // namespace dspark::model::cpu
