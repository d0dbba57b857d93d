#include "model/ops_cpu/backend.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "core/error.h"

namespace dspark::model::cpu {

namespace {

// Tokens in the order in which every cut keeps them: larger logits first, lower ids first among equals. NaN counts as
// -inf, so that the order stays an order; the probabilities show it.
class Order {
 public:
  Order(const Tensor& logits, int64_t r) : row_(in_row(logits, r)) {}
  float logit(int32_t id) const {
    const float v = row_.bf16 ? to_float(static_cast<const bf16*>(row_.p)[id]) : static_cast<const float*>(row_.p)[id];
    return std::isnan(v) ? -std::numeric_limits<float>::infinity() : v;
  }
  bool operator()(int32_t a, int32_t b) const {
    const float x = logit(a), y = logit(b);
    return x > y || (x == y && a < b);
  }

 private:
  In row_;
};

// Sorts the first tokens of `ids` as far as they are asked for, some at a time: nuclei are small beside a vocabulary.
class SortedPrefix {
 public:
  SortedPrefix(const Order& order, int32_t* ids, int64_t n) : order_(order), ids_(ids), n_(n) {}
  int32_t operator[](int64_t i) {
    while (i >= sorted_) {
      const int64_t end = std::min(n_, std::max<int64_t>(256, sorted_ * 8));
      if (end < n_) std::nth_element(ids_ + sorted_, ids_ + end, ids_ + n_, order_);
      std::sort(ids_ + sorted_, ids_ + end, order_);
      sorted_ = end;
    }
    return ids_[i];
  }

 private:
  const Order& order_;
  int32_t* ids_;
  int64_t n_, sorted_ = 0;
};

// probs holds exp((logit - max) / temperature); zeroes what is not kept. Top-k and top-p keep a prefix of the order
// above. As in transformers, top-k keeps every logit that equals the k-th, and top-p drops a token when it and the
// smaller ones together have at most 1 - p of what top-k kept (at borders not the same as "p or more before it": 1 - p
// is rounded).
void cut(const SamplingParams& params, const Order& order, int32_t* ids, float* probs, int64_t vocab) {
  int64_t kept = vocab;
  const bool top_k = params.top_k > 0 && params.top_k < vocab;
  if (top_k || params.top_p < 1) std::iota(ids, ids + vocab, 0);
  SortedPrefix sorted(order, ids, vocab);
  if (top_k) {
    const float last = order.logit(sorted[params.top_k - 1]);
    kept = 0;
    for (int32_t id = 0; id < vocab; ++id) kept += order.logit(id) >= last ? 1 : 0;
  }
  if (params.top_p < 1) {
    double total = 0, larger = 0;
    if (kept == vocab)
      for (int64_t i = 0; i < vocab; ++i) total += probs[i];
    else
      for (int64_t i = 0; i < kept; ++i) total += probs[sorted[i]];
    for (int64_t i = 0; i < kept; larger += probs[sorted[i]], ++i)
      if (i > 0 && total - larger <= (1 - params.top_p) * total) kept = i;
  }
  if (kept < vocab) {
    const int32_t last = sorted[kept - 1];
    for (int32_t id = 0; id < vocab; ++id)
      if (order(last, id)) probs[id] = 0;
  }
  if (params.min_p > 0)  // relative to the largest, which is exp(0)
    for (int32_t id = 0; id < vocab; ++id)
      if (probs[id] < params.min_p) probs[id] = 0;
}

}  // namespace

void CpuOps::token_probs(Context&, const TokenProbs& a) {
  const int64_t vocab = a.logits.cols;
  const SamplingParams& params = a.params;
  DS_ASSERT(vocab * static_cast<int64_t>(sizeof(int32_t)) <= Machine::kScratchBytes, "a vocabulary of {}", vocab);
  m_.pool().parallel_for(a.logits.rows, 1, [&](int64_t begin, int64_t end, int thread) {
    for (int64_t r = begin; r < end; ++r) {
      float* probs = row<float>(a.probs, r);
      const Order order(a.logits, r);
      if (params.temperature < 1e-5) {
        int32_t best = 0;
        for (int32_t id = 1; id < vocab; ++id)
          if (order.logit(id) > order.logit(best)) best = id;
        std::fill_n(probs, vocab, 0.0f);
        probs[best] = 1;
        continue;
      }
      const In logits = in_row(a.logits, r);
      m_.kernels().tempered_exp(probs, logits, m_.kernels().row_max(logits, vocab), 1 / params.temperature, vocab);
      if ((params.top_k > 0 && params.top_k < vocab) || params.top_p < 1 || params.min_p > 0)
        cut(params, order, m_.scratch<int32_t>(thread), probs, vocab);
      double total = 0;
      for (int64_t i = 0; i < vocab; ++i) total += probs[i];
      for (int64_t i = 0; i < vocab; ++i) probs[i] = static_cast<float>(probs[i] / total);
    }
  });
}

}  // namespace dspark::model::cpu
