// token_probs, sample_tokens, verify_block. Nothing here is differentiated: real parts only.
#include <algorithm>
#include <numeric>
#include <vector>

#include "model/ops_ref/scalar.h"

namespace dspark::model::ref {
namespace {

// Smallest id whose running sum exceeds u times the total; rounding at the end falls back to the last id with any
// weight.
int64_t draw(const std::vector<double>& weights, double u) {
  const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
  double running = 0;
  int64_t last = 0;
  for (size_t i = 0; i < weights.size(); ++i) {
    running += weights[i];
    if (running > u * total) return static_cast<int64_t>(i);
    if (weights[i] > 0) last = static_cast<int64_t>(i);
  }
  return last;
}

std::vector<double> softmax(const std::vector<double>& logits, const std::vector<bool>& kept) {
  double top = -INFINITY, total = 0;
  for (size_t j = 0; j < logits.size(); ++j)
    if (kept[j]) top = std::max(top, logits[j]);
  std::vector<double> probs(logits.size(), 0.0);
  for (size_t j = 0; j < logits.size(); ++j)
    if (kept[j]) total += probs[j] = std::exp(logits[j] - top);
  for (double& p : probs) p /= total;
  return probs;
}

std::vector<double> processed(std::vector<double> logits, const SamplingParams& params) {
  const size_t n = logits.size();
  std::vector<size_t> order(n);  // descending, lower id first
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return logits[a] > logits[b]; });
  if (params.temperature < 1e-5) {
    std::vector<double> one_hot(n, 0.0);
    one_hot[order[0]] = 1;
    return one_hot;
  }
  for (double& l : logits) l /= params.temperature;
  std::vector<bool> kept(n, true);
  const auto top_k = static_cast<size_t>(params.top_k);
  if (top_k > 0 && top_k < n) {
    for (size_t j = 0; j < n; ++j) kept[j] = logits[j] >= logits[order[top_k - 1]];
  }
  if (params.top_p < 1) {
    const std::vector<double> probs = softmax(logits, kept);
    double before = 0;
    for (size_t rank = 0; rank < n; ++rank) {
      if (rank > 0 && before >= params.top_p) kept[order[rank]] = false;
      before += probs[order[rank]];
    }
  }
  if (params.min_p > 0) {
    const std::vector<double> probs = softmax(logits, kept);
    for (size_t j = 0; j < n; ++j) kept[j] = kept[j] && probs[j] >= params.min_p * probs[order[0]];
  }
  return softmax(logits, kept);
}

template <typename S>
std::vector<double> row_of(const Matrix<S>& m, int64_t i) {
  std::vector<double> row(static_cast<size_t>(m.cols()));
  for (int64_t j = 0; j < m.cols(); ++j) row[static_cast<size_t>(j)] = real(m(i, j));
  return row;
}

}  // namespace

template <typename S>
void token_probs(const TokenProbs& a) {
  const Matrix<S> probs(a.probs), logits(a.logits);
  for (int64_t i = 0; i < logits.rows() && logits.cols() > 0; ++i) {
    const std::vector<double> row = processed(row_of(logits, i), a.params);
    for (int64_t j = 0; j < probs.cols(); ++j) probs(i, j) = row[static_cast<size_t>(j)];
  }
}

template <typename S>
void sample_tokens(const SampleTokens& a) {
  const Matrix<S> probs(a.probs);
  const Matrix<double> uniform(a.uniform);
  const Ints ids(a.ids), map(a.map), raw_ids(a.raw_ids);
  for (int64_t i = 0; i < probs.rows(); ++i) {
    const int64_t id = draw(row_of(probs, i), uniform(i));
    ids(i) = map ? map(id) : static_cast<int32_t>(id);
    if (raw_ids) raw_ids(i) = static_cast<int32_t>(id);
  }
}

template <typename S>
void verify_block(const VerifyBlock& a) {
  const Ints result(a.result), draft_ids(a.draft_ids), map(a.map);
  const Matrix<S> draft_probs(a.draft_probs), target_probs(a.target_probs);
  const Matrix<double> uniform(a.uniform);
  const int64_t n = draft_ids.cols();
  int64_t accepted = 0;
  std::vector<double> last;
  for (; accepted < n; ++accepted) {
    std::vector<double> draft(static_cast<size_t>(target_probs.cols()), 0.0);  // over target ids
    for (int64_t j = 0; j < draft_probs.cols(); ++j)
      draft.at(static_cast<size_t>(map ? map(j) : j)) = real(draft_probs(accepted, j));
    const std::vector<double> target = row_of(target_probs, accepted);
    const auto id = static_cast<size_t>(draft_ids(accepted));
    if (uniform(accepted) * draft.at(id) < target.at(id)) continue;
    last = target;
    for (size_t j = 0; j < last.size(); ++j) last[j] = std::max(0.0, target[j] - draft[j]);
    if (std::accumulate(last.begin(), last.end(), 0.0) == 0) last = target;
    break;
  }
  if (accepted == n) last = row_of(target_probs, n);
  result(0) = static_cast<int32_t>(accepted);
  result(1) = static_cast<int32_t>(draw(last, uniform(n)));
}

DS_REF_INSTANTIATE(token_probs, TokenProbs)
DS_REF_INSTANTIATE(sample_tokens, SampleTokens)
DS_REF_INSTANTIATE(verify_block, VerifyBlock)

}  // namespace dspark::model::ref
