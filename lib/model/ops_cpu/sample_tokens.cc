#include "model/ops_cpu/backend.h"
#include "model/ops_cpu/draw.h"

namespace dspark::model::cpu {

int64_t draw(const float* weights, int64_t n, double uniform) {
  double total = 0;
  for (int64_t i = 0; i < n; ++i) total += weights[i];
  const double border = uniform * total;
  double sum = 0;
  int64_t last = 0;
  for (int64_t i = 0; i < n; ++i) {
    sum += weights[i];
    if (sum > border) return i;
    if (weights[i] > 0) last = i;
  }
  return last;  // uniform * total was rounded up to the total
}

void CpuOps::sample_tokens(Context&, const SampleTokens& a) {
  m_.pool().parallel_for(a.probs.rows, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      const int64_t id = draw(row<float>(a.probs, r), a.probs.cols, pointer<double>(a.uniform)[r]);
      pointer<int32_t>(a.ids)[r] = a.map ? pointer<int32_t>(a.map)[id] : static_cast<int32_t>(id);
      if (a.raw_ids) pointer<int32_t>(a.raw_ids)[r] = static_cast<int32_t>(id);
    }
  });
}

}  // namespace dspark::model::cpu
