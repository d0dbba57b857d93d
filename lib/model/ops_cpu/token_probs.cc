#include "model/ops_cpu/backend.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

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
  // Bin of a histogram over logits that respects the order: the high half of a float's bits, negatives turned over.
  uint32_t bin(int32_t id) const {
    const float v = logit(id) + 0.0f;  // -0 equals 0 and shares its bin
    const uint32_t bits = std::bit_cast<uint32_t>(v);
    return ((bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u) >> 16;
  }
  bool operator()(int32_t a, int32_t b) const {
    const float x = logit(a), y = logit(b);
    return x > y || (x == y && a < b);
  }

 private:
  In row_;
};

constexpr uint32_t kBins = 1 << 16;

// Lives in a thread's scratch memory.
struct Histogram {
  double mass[kBins];
  uint32_t count[kBins];
  int32_t ids[1];  // of one bin; as many as the vocabulary has
};

// Lists the ids of one bin.
int64_t list_bin(Histogram& h, const Order& order, uint32_t bin, int64_t vocab) {
  int64_t n = 0;
  for (int32_t id = 0; id < vocab; ++id)
    if (order.bin(id) == bin) h.ids[n++] = id;
  return n;
}

// probs holds exp((logit - max) / temperature); zeroes what top-k and top-p do not keep. Both keep the first tokens of
// the order above. As in transformers, top-k keeps every logit that equals the k-th, and top-p drops a token when it
// and the smaller ones together have at most 1 - p of what top-k kept (at borders not the same as "p or more before
// it": 1 - p is rounded). A vocabulary is never sorted: a histogram tells in which bin a cut lies, and only that bin
// is.
void cut(const SamplingParams& params, const Order& order, Histogram& h, float* probs, int64_t vocab) {
  std::memset(h.mass, 0, sizeof(h.mass));
  std::memset(h.count, 0, sizeof(h.count));
  for (int32_t id = 0; id < vocab; ++id) {
    const uint32_t bin = order.bin(id);
    h.mass[bin] += probs[id];
    ++h.count[bin];
  }
  uint32_t lowest = 0;                                    // bins from here up are kept,
  float floor = -std::numeric_limits<float>::infinity();  // logits from here up,
  int32_t last = -1;                                      // and no token after this one
  double total = 0;
  if (params.top_k > 0 && params.top_k < vocab) {
    int64_t left = params.top_k;
    uint32_t bin = kBins - 1;
    for (; left > h.count[bin]; --bin) {
      left -= h.count[bin];
      total += h.mass[bin];
    }
    const int64_t n = list_bin(h, order, bin, vocab);
    std::nth_element(h.ids, h.ids + left - 1, h.ids + n, order);
    floor = order.logit(h.ids[left - 1]);
    lowest = bin;
    h.mass[bin] = 0;
    std::sort(h.ids, h.ids + n);  // sums go by id
    for (int64_t i = 0; i < n; ++i)
      if (order.logit(h.ids[i]) >= floor) h.mass[bin] += probs[h.ids[i]];
    total += h.mass[bin];
  } else {
    for (uint32_t bin = kBins; bin-- > 0;) total += h.mass[bin];
  }
  if (params.top_p < 1) {
    const double dropped = (1 - params.top_p) * total;
    double larger = 0;
    uint32_t bin = kBins - 1;
    while (bin > lowest && (h.count[bin] == 0 || total - (larger + h.mass[bin]) > dropped)) larger += h.mass[bin--];
    const int64_t n = list_bin(h, order, bin, vocab);
    std::sort(h.ids, h.ids + n, order);
    for (int64_t i = 0; i < n && order.logit(h.ids[i]) >= floor; ++i) {
      if (last >= 0 && total - larger <= dropped) break;
      larger += probs[h.ids[i]];
      last = h.ids[i];
    }
  }
  for (int32_t id = 0; id < vocab; ++id)
    if (order.logit(id) < floor || (last >= 0 && order(last, id))) probs[id] = 0;
}

}  // namespace

void CpuOps::token_probs(Context&, const TokenProbs& a) {
  const int64_t vocab = a.logits.cols;
  const SamplingParams& params = a.params;
  DS_ASSERT(static_cast<int64_t>(sizeof(Histogram)) + vocab * 4 <= Machine::kScratchBytes, "a vocabulary of {}", vocab);
  m_.pool().parallel_for(a.logits.rows, 1, [&](int64_t begin, int64_t end, int thread) {
    for (int64_t r = begin; r < end; ++r) {
      float* probs = row<float>(a.probs, r);
      const Order order(a.logits, r);
      const In logits = in_row(a.logits, r);
      const float max = m_.kernels().row_max(logits, vocab);
      if (params.temperature < 1e-5) {
        int32_t best = 0;
        while (best < vocab - 1 && order.logit(best) != max) ++best;
        std::fill_n(probs, vocab, 0.0f);
        probs[best] = 1;
        continue;
      }
      m_.kernels().tempered_exp(probs, logits, max, 1 / params.temperature, vocab);
      if ((params.top_k > 0 && params.top_k < vocab) || params.top_p < 1)
        cut(params, order, *m_.scratch<Histogram>(thread), probs, vocab);
      if (params.min_p > 0)  // relative to the largest, which is exp(0)
        for (int64_t i = 0; i < vocab; ++i)
          if (probs[i] < params.min_p) probs[i] = 0;
      double total = 0;
      for (int64_t i = 0; i < vocab; ++i) total += probs[i];
      for (int64_t i = 0; i < vocab; ++i) probs[i] = static_cast<float>(probs[i] / total);
    }
  });
}

}  // namespace dspark::model::cpu
