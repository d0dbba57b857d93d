// cache_attention
#include <algorithm>
#include <vector>

#include "model/ops_ref/scalar.h"

namespace dspark::model::ref {

template <typename S>
void cache_attention(const CacheAttention& a) {
  const Matrix<S> out(a.out), q(a.q), k(a.k_cache), v(a.v_cache);
  const int64_t heads = a.q.cols / a.head_dim, group = heads / (a.k_cache.cols / a.head_dim);
  for (int64_t i = 0; i < q.rows(); ++i) {
    const int64_t last = a.first + i, begin = a.window == 0 ? 0 : std::max<int64_t>(0, last - a.window + 1);
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t qc = h * a.head_dim, kc = h / group * a.head_dim;
      std::vector<S> scores;
      double top = -INFINITY;
      for (int64_t t = begin; t <= last; ++t) {
        S score = 0;
        for (int64_t c = 0; c < a.head_dim; ++c) score += mul(q(i, qc + c), k(t, kc + c));
        scores.push_back(score * a.scale);
        top = std::max(top, real(scores.back()));
      }
      S total = 0;
      for (S& s : scores) total += s = std::exp(s - top);
      for (int64_t c = 0; c < a.head_dim; ++c) {
        S sum = 0;
        for (int64_t t = begin; t <= last; ++t) sum += mul(scores[static_cast<size_t>(t - begin)], v(t, kc + c));
        out(i, qc + c) = sum / total;
      }
    }
  }
}

DS_REF_INSTANTIATE(cache_attention, CacheAttention)

}  // namespace dspark::model::ref
