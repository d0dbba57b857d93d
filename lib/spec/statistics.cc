#include "spec/statistics.h"

#include <algorithm>

#include "core/error.h"
#include "core/rng.h"

namespace dspark::spec {

PromptStats prompt_stats(const Decoded& decoded, int64_t proposals) {
  PromptStats s;
  s.proposed.assign(static_cast<size_t>(proposals), 0);
  s.accepted.assign(static_cast<size_t>(proposals), 0);
  for (const Round& r : decoded.rounds) {
    s.tokens += r.length();
    if (r.cut) {
      ++s.cut;
      continue;
    }
    ++s.rounds;
    s.length_sum += r.length();
    // Positions behind an accepted end token were never really proposed.
    const int64_t n_accepted = r.ended ? std::min<int64_t>(r.accepted, r.length()) : r.accepted;
    const int64_t n_proposed = r.ended && n_accepted == r.length() ? n_accepted : r.proposed;
    for (int64_t k = 0; k < n_proposed; ++k) ++s.proposed[static_cast<size_t>(k)];
    for (int64_t k = 0; k < n_accepted; ++k) ++s.accepted[static_cast<size_t>(k)];
  }
  s.seconds = decoded.seconds;
  return s;
}

PromptStats total(std::span<const PromptStats> prompts) {
  PromptStats t;
  for (const PromptStats& p : prompts) {
    t.rounds += p.rounds, t.cut += p.cut, t.length_sum += p.length_sum, t.tokens += p.tokens;
    t.seconds += p.seconds, t.plain_seconds += p.plain_seconds, t.plain_tokens += p.plain_tokens;
    t.proposed.resize(std::max(t.proposed.size(), p.proposed.size()));
    t.accepted.resize(std::max(t.accepted.size(), p.accepted.size()));
    for (size_t k = 0; k < p.proposed.size(); ++k) t.proposed[k] += p.proposed[k], t.accepted[k] += p.accepted[k];
  }
  return t;
}

namespace {

// statistic(indices) of resampled prompts: the mean of the whole set and the central 95 % of the resamples.
template <typename Statistic>
Interval bootstrap(size_t n, uint64_t seed, int samples, const Statistic& statistic) {
  std::vector<size_t> indices(n);
  for (size_t i = 0; i < n; ++i) indices[i] = i;
  Interval out;
  out.mean = out.low = out.high = statistic(indices);
  if (n < 2) return out;
  std::vector<double> values;
  for (int s = 0; s < samples; ++s) {
    const Rng rng(seed, RngStream::test, static_cast<uint64_t>(s));
    for (size_t i = 0; i < n; ++i) indices[i] = rng.below(i, n);
    values.push_back(statistic(indices));
  }
  std::sort(values.begin(), values.end());
  out.low = values[static_cast<size_t>(0.025 * samples)];
  out.high = values[std::min(values.size() - 1, static_cast<size_t>(0.975 * samples))];
  return out;
}

}  // namespace

Interval accepted_length(std::span<const PromptStats> prompts, uint64_t seed, int samples) {
  return bootstrap(prompts.size(), seed, samples, [&](const std::vector<size_t>& indices) {
    int64_t length = 0, rounds = 0;
    for (size_t i : indices) length += prompts[i].length_sum, rounds += prompts[i].rounds;
    return rounds > 0 ? static_cast<double>(length) / static_cast<double>(rounds) : 0.0;
  });
}

Interval paired_difference(std::span<const PromptStats> a, std::span<const PromptStats> b, uint64_t seed, int samples) {
  DS_ASSERT(a.size() == b.size(), "{} and {} prompts", a.size(), b.size());
  std::vector<double> differences;
  for (size_t i = 0; i < a.size(); ++i)
    if (a[i].rounds > 0 && b[i].rounds > 0) differences.push_back(a[i].accepted_length() - b[i].accepted_length());
  return bootstrap(differences.size(), seed, samples, [&](const std::vector<size_t>& indices) {
    double sum = 0;
    for (size_t i : indices) sum += differences[i];
    return indices.empty() ? 0.0 : sum / static_cast<double>(indices.size());
  });
}

}  // namespace dspark::spec
