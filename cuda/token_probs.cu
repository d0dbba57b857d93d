// token_probs, one block a row. A vocabulary is never sorted: the logit at which a cut lies is found bit by bit, from the highest on,
// by sums over what lies above it: a pass over the row a bit. Every thread keeps to its own columns.
#include "cuda/matrix.h"

namespace dspark::cuda {
namespace {

constexpr int kWarps = kBlock / kWarp;

// An integer that ascends with the logit. NaN counts as -inf, so that the order stays an order; the probabilities show it. -0 is 0.
DS_DEVICE uint32_t key_of(float v) {
  const uint32_t bits = float_as_bits(v == v ? v + 0.0f : -INFINITY);
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}
DS_DEVICE float logit_of(uint32_t key) { return bits_as_float((key & 0x80000000u) != 0 ? key ^ 0x80000000u : ~key); }

// exp of an argument that may be tens, where fp32 would cost digits of the result.
DS_DEVICE float exp_of(double t) {
  if (t < -104) return 0;
  const auto high = static_cast<float>(t);
  return expf(high) * (1.0f + static_cast<float>(t - static_cast<double>(high)));
}

struct Row {
  Matrix logits, probs;
  int64_t row;
  Shared<double> scratch;

  DS_DEVICE int vocab() const { return static_cast<int>(logits.cols); }
  DS_DEVICE float logit(int i) const {
    const int64_t at = row * logits.stride + i;
    return logits.half ? widen(load(static_cast<const bf16*>(logits.data) + at)) : load(static_cast<const float*>(logits.data) + at);
  }
  DS_DEVICE uint32_t key(int i) const { return key_of(logit(i)); }
  DS_DEVICE float* prob(int i) const { return static_cast<float*>(probs.data) + row * probs.stride + i; }
  template <typename Value>
  DS_DEVICE double sum(const Value& value) const {
    double part = 0;
    for (int i = thread(); i < vocab(); i += kBlock) part += value(i);
    return block_sum(part, scratch);
  }
  // The probabilities of all tokens for which `take` holds.
  template <typename Take>
  DS_DEVICE double mass(const Take& take) const {
    return sum([&](int i) { return take(i) ? static_cast<double>(load(prob(i))) : 0.0; });
  }
};

// The largest bound for which `holds`, of as many bits as `highest`. It is taken to hold for 0, and does not above where it does not.
template <typename Holds>
DS_DEVICE uint32_t largest(uint32_t highest, const Holds& holds) {
  uint32_t bound = 0;
  for (uint32_t bit = highest; bit != 0; bit /= 2)
    if (holds(bound | bit)) bound |= bit;
  return bound;
}

// What is kept: logits above `border`, and those equal to it up to an id.
struct Kept {
  uint32_t border;
  int last_id;
  DS_DEVICE bool operator()(uint32_t key, int id) const { return key > border || (key == border && id <= last_id); }
};

// probs holds exp((logit - max) / temperature). As in transformers, top-k keeps every logit that equals the k-th, and top-p drops a
// token when it and the smaller ones together have at most 1 - p of what top-k kept; the largest always stays.
DS_DEVICE Kept cut(const Row& r, const ProbsArgs& a, uint32_t top_key) {
  constexpr uint32_t kHighest = 0x80000000u;
  Kept kept{0, r.vocab()};
  if (a.top_k > 0 && a.top_k < r.vocab())
    kept.border = largest(kHighest, [&](uint32_t bound) { return r.sum([&](int i) { return r.key(i) >= bound ? 1.0 : 0.0; }) >= static_cast<double>(a.top_k); });
  if (a.top_p < 1) {
    const double total = r.mass([&](int i) { return r.key(i) >= kept.border; }), dropped = (1 - a.top_p) * total;
    const uint32_t border = largest(kHighest, [&](uint32_t bound) { return bound <= top_key && total - r.mass([&](int i) { return r.key(i) >= bound; }) <= dropped; });
    // Of equal logits the lower ids first: an id is kept as long as the tokens before it leave more than `dropped`.
    uint32_t ids = 1;
    while (ids < static_cast<uint32_t>(r.vocab())) ids *= 2;
    const uint32_t last_id = largest(ids / 2, [&](uint32_t id) {
      const Kept before{border, static_cast<int>(id) - 1};
      return total - r.mass([&](int i) { return before(r.key(i), i); }) > dropped;
    });
    kept = {border, static_cast<int>(last_id)};
  }
  return kept;
}

DS_KERNEL void DS_THREADS_ALONE(kBlock) token_probs_kernel(ProbsArgs a) {
  const Shared<uint64_t> tops(0, kWarps);
  const Row r{a.logits, a.probs, block_x(), Shared<double>(kWarps * 8, kWarps)};
  // The largest logit, the lowest id that has it.
  uint64_t top = 0;
  for (int i = thread(); i < r.vocab(); i += kBlock) {
    const uint64_t candidate = static_cast<uint64_t>(r.key(i)) << 32 | (0xffffffffu - static_cast<uint32_t>(i));
    top = candidate > top ? candidate : top;
  }
  for (int step = kWarp / 2; step > 0; step /= 2) {
    const uint64_t other = shuffle_xor(top, step);
    top = other > top ? other : top;
  }
  if (lane() == 0) tops.set(warp(), top);
  sync_block();
  for (int w = 0; w < kWarps; ++w) top = tops[w] > top ? tops[w] : top;
  const auto top_key = static_cast<uint32_t>(top >> 32);
  const int top_id = static_cast<int>(0xffffffffu - static_cast<uint32_t>(top));

  if (a.temperature < 1e-5) {
    for (int i = thread(); i < r.vocab(); i += kBlock) store(r.prob(i), i == top_id ? 1.0f : 0.0f);
    return;
  }
  const double highest = static_cast<double>(logit_of(top_key)), inverse = 1 / a.temperature;
  const bool in_place = a.probs.data == a.logits.data;
  for (int i = thread(); i < r.vocab(); i += kBlock) store(r.prob(i), exp_of((static_cast<double>(r.logit(i)) - highest) * inverse));
  const Kept kept = cut(r, a, in_place ? key_of(1.0f) : top_key);
  double total = 0;
  for (int i = thread(); i < r.vocab(); i += kBlock) {
    float p = load(r.prob(i));
    if (!kept(r.key(i), i) || p < a.min_p) p = 0;  // min-p: relative to the largest, which is exp(0)
    store(r.prob(i), p);
    total += static_cast<double>(p);
  }
  total = block_sum(total, r.scratch);
  for (int i = thread(); i < r.vocab(); i += kBlock) store(r.prob(i), static_cast<float>(static_cast<double>(load(r.prob(i))) / total));
}

}  // namespace

void token_probs(Stream stream, const ProbsArgs& a) {
  if (a.logits.rows * a.logits.cols > 0) launch(stream, {static_cast<unsigned>(a.logits.rows)}, {kBlock}, kWarps * 16, token_probs_kernel, a);
}

}  // namespace dspark::cuda
