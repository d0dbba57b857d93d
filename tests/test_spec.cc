// Speculative decoding gives what the target alone gives: the same tokens when greedy, the same distribution when sampled.
#include <catch2/catch.hpp>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <thread>

#include "spec_models.h"

using namespace dspark;
using namespace dspark::spec;
using dspark::test::SpecModel;
using dspark::test::SpecRun;
using model::LayerType;
using model::Precision;

namespace {

std::vector<int32_t> random_prompt(int64_t vocab, uint64_t number) {
  const Rng rng(5, RngStream::test, number);
  std::vector<int32_t> prompt(1 + static_cast<size_t>(rng.below(0, 12)));
  for (size_t i = 0; i < prompt.size(); ++i) prompt[i] = static_cast<int32_t>(rng.below(i + 1, static_cast<uint64_t>(vocab)));
  return prompt;
}

std::vector<int32_t> every_other(int64_t vocab) {
  std::vector<int32_t> kept;
  for (int32_t id = 0; id < vocab; ++id)
    if (id % 3 != 1) kept.push_back(id);
  return kept;
}

// The target's logits after `tokens`, by one forward without any cache from before.
std::vector<double> next_logits(target::TargetModel& target, const std::vector<int32_t>& tokens) {
  model::Context& ctx = target.context();
  const auto n = static_cast<int64_t>(tokens.size());
  model::Arena arena(ctx.device(), int64_t{4} << 20);
  target::KvCache cache = target.make_cache(n);
  const model::Tensor ids = arena.vector(DType::i32, n);
  ctx.upload_now(ids, {tokens.data(), DType::i32, 1, n, n});
  const target::Segment segment{&cache, n};
  const model::Tensor normed = target.forward(arena, ids, {&segment, 1});
  const model::Tensor logits = arena.matrix(ctx.acc_dtype(), 1, target.config().vocab);
  target.logits(normed.row_range(n - 1, 1), logits);
  std::vector<double> out(static_cast<size_t>(logits.cols));
  ctx.download_now({out.data(), DType::f64, 1, logits.cols, logits.cols}, logits);
  target.free_cache(cache);
  return out;
}

// ---- the exact distribution ----

// Probabilities of every continuation of a prompt, `length` tokens each, by asking the target about every prefix.
struct Exact {
  int64_t vocab, length;
  std::vector<std::vector<double>> next;  // [prefix]: prefixes by length, then as numbers in base `vocab`
  std::vector<double> joint;              // [vocab^length]

  Exact(target::TargetModel& target, const std::vector<int32_t>& prompt, int64_t length, const model::SamplingParams& sampling)
      : vocab(target.config().vocab), length(length), joint{1.0} {
    for (int64_t n = 0; n < length; ++n) {
      std::vector<double> longer;
      for (size_t prefix = 0; prefix < joint.size(); ++prefix) {
        std::vector<int32_t> tokens = prompt;
        const std::vector<int32_t> tail = digits(prefix, n);
        tokens.insert(tokens.end(), tail.begin(), tail.end());
        next.push_back(probabilities(next_logits(target, tokens), sampling));
        for (const double p : next.back()) longer.push_back(joint[prefix] * p);
      }
      joint = std::move(longer);
    }
  }

  // Temperature and top-k, written apart from the operator.
  static std::vector<double> probabilities(const std::vector<double>& logits, const model::SamplingParams& sampling) {
    std::vector<double> sorted = logits, p(logits.size(), 0.0);
    std::sort(sorted.rbegin(), sorted.rend());
    const double least = sampling.top_k > 0 ? sorted[static_cast<size_t>(sampling.top_k) - 1] : sorted.back();
    for (size_t i = 0; i < p.size(); ++i)
      if (logits[i] >= least) p[i] = std::exp((logits[i] - sorted[0]) / sampling.temperature);
    const double sum = std::accumulate(p.begin(), p.end(), 0.0);
    for (double& v : p) v /= sum;
    return p;
  }

  std::vector<int32_t> digits(size_t number, int64_t n) const {
    std::vector<int32_t> out(static_cast<size_t>(n));
    for (auto i = out.rbegin(); i != out.rend(); ++i) {
      *i = static_cast<int32_t>(number % static_cast<size_t>(vocab));
      number /= static_cast<size_t>(vocab);
    }
    return out;
  }
  size_t cell(const std::vector<int32_t>& tokens) const {
    size_t number = 0;
    for (const int32_t t : tokens) number = number * static_cast<size_t>(vocab) + static_cast<size_t>(t);
    return number;
  }
  const std::vector<double>& after(const std::vector<int32_t>& tokens) const {
    size_t first = 0, count = 1;
    for (size_t n = 0; n < tokens.size(); ++n, count *= static_cast<size_t>(vocab)) first += count;
    return next[first + cell(tokens)];
  }
};

// Pearson's chi-square of counts against probabilities, rare cells pooled; the tail by Wilson and Hilferty.
double p_value(const std::vector<int64_t>& counts, const std::vector<double>& probabilities) {
  const auto total = static_cast<double>(std::accumulate(counts.begin(), counts.end(), int64_t{0}));
  double x = 0, rare_expected = 0, rare_seen = 0;
  int cells = 0;
  const auto add = [&](double seen, double expected) {
    x += (seen - expected) * (seen - expected) / expected;
    ++cells;
  };
  for (size_t i = 0; i < counts.size(); ++i) {
    const double expected = total * probabilities[i];
    if (expected == 0 && counts[i] > 0) return 0;  // impossible, and seen
    if (expected >= 5) {
      add(static_cast<double>(counts[i]), expected);
    } else {
      rare_expected += expected;
      rare_seen += static_cast<double>(counts[i]);
    }
  }
  if (rare_expected >= 5) add(rare_seen, rare_expected);
  const double k = cells - 1, spread = 2 / (9 * k);
  return 0.5 * std::erfc((std::cbrt(x / k) - (1 - spread)) / std::sqrt(2 * spread));
}

int32_t draw(const std::vector<double>& p, double u) {
  for (size_t i = 0; i < p.size(); ++i)
    if ((u -= p[i]) < 0) return static_cast<int32_t>(i);
  return static_cast<int32_t>(p.size()) - 1;
}

struct Counts {
  std::vector<int64_t> right;  // what the decoder gave
  std::vector<int64_t> wrong;  // the same draws, a rejected token replaced by one of the target's distribution, not the residual
  int64_t accepted = 0, rejected = 0, bad_length = 0;
};

Counts sample(const SpecModel& m, const Exact& exact, const std::vector<int32_t>& prompt, DecodeOptions options, uint64_t first, uint64_t end) {
  SpecRun run(m, Precision::fp32, 32);
  Counts c;
  c.right.assign(exact.joint.size(), 0);
  c.wrong = c.right;
  for (uint64_t stream = first; stream < end; ++stream) {
    options.stream = stream;
    const Decoded out = run.decoder->speculative(prompt, options);
    if (static_cast<int64_t>(out.tokens.size()) != exact.length) {  // Catch is not for threads
      ++c.bad_length;
      continue;
    }
    ++c.right[exact.cell(out.tokens)];
    const Rng rng(99, RngStream::test, stream);
    std::vector<int32_t> wrong{out.tokens[0]};
    for (const Round& r : out.rounds) {
      c.accepted += r.accepted;
      c.rejected += r.accepted < r.proposed;
    }
    const Round& r = out.rounds[0];
    for (int64_t k = 0; k < std::min(r.accepted, r.length()); ++k) wrong.push_back(r.tokens[static_cast<size_t>(k)]);
    while (static_cast<int64_t>(wrong.size()) < exact.length) wrong.push_back(draw(exact.after(wrong), rng.uniform(wrong.size())));
    ++c.wrong[exact.cell(wrong)];
  }
  return c;
}

}  // namespace

TEST_CASE("greedy speculative decoding gives the target's tokens", "[spec]") {
  const std::vector<SpecModel> all{
      {.target_layers = 2},
      {.target_layers = 4, .sample_from_anchor = false, .layers = {LayerType::full, LayerType::sliding}},
      {.markov = false, .layers = {LayerType::sliding}, .block = 3},
      {.sample_from_anchor = false, .markov = false, .block = 2},
      {.target_layers = 6, .kept = every_other(24), .block = 7},
      {.sample_from_anchor = false, .kept = every_other(24), .layers = {LayerType::sliding, LayerType::full}, .block = 4},
      {.block = 1},
  };
  for (const Precision precision : {Precision::fp32, Precision::bf16}) {
    for (const SpecModel& m : all) {
      CAPTURE(static_cast<int>(precision), m.target_layers, m.sample_from_anchor, m.markov, m.kept.size(), m.block);
      SpecRun run(m, precision);
      int64_t accepted = 0, proposed = 0, added = 0;
      for (uint64_t i = 0; i < 20; ++i) {
        const std::vector<int32_t> prompt = random_prompt(m.vocab, i);
        DecodeOptions o;
        o.sampling.temperature = 0;
        o.max_new_tokens = 30 + static_cast<int64_t>(i);
        if (i % 2 == 1) o.end_tokens = {static_cast<int32_t>(i), 3};
        const Decoded fast = run.decoder->speculative(prompt, o), slow = run.decoder->plain(prompt, o);
        REQUIRE(fast.tokens == slow.tokens);
        if (i == 0) {  // and those are the arg-max of forwards that know no cache
          std::vector<int32_t> tokens = prompt;
          for (const int32_t t : slow.tokens) {
            const std::vector<double> logits = next_logits(*run.target, tokens);
            REQUIRE(t == std::max_element(logits.begin(), logits.end()) - logits.begin());
            tokens.push_back(t);
          }
        }
        std::vector<int32_t> from_rounds{fast.tokens[0]};
        for (const Round& r : fast.rounds) {
          accepted += r.accepted, proposed += r.proposed, added += r.length();
          REQUIRE(r.proposed == run.drafter->config().proposals());
          REQUIRE((r.length() == r.accepted + 1 || r.ended || r.cut));
          from_rounds.insert(from_rounds.end(), r.tokens.begin(), r.tokens.end());
        }
        REQUIRE(from_rounds == fast.tokens);
      }
      CHECK(accepted > 0);  // both ways through a round were taken
      CHECK(accepted < proposed);
      CHECK(added > 0);
    }
  }
}

TEST_CASE("speculative decoding samples the target's distribution", "[spec]") {
  struct Setting {
    SpecModel model;
    model::SamplingParams sampling;
  };
  const std::vector<Setting> all{
      {{.vocab = 6, .target_layers = 2, .block = 3}, {}},
      {{.vocab = 6, .target_layers = 2, .sample_from_anchor = false, .layers = {LayerType::sliding}, .block = 4}, {}},
      {{.vocab = 6, .target_layers = 2, .markov = false, .kept = {0, 2, 3, 5}, .block = 2}, {.temperature = 1.4}},
      {{.vocab = 6, .target_layers = 2, .sample_from_anchor = false, .markov = false, .block = 3}, {.temperature = 1.2, .top_k = 4}},
  };
  const std::vector<int32_t> prompt{1, 4, 2};
  const uint64_t n = 12000;
  for (const Setting& s : all) {
    CAPTURE(s.model.sample_from_anchor, s.model.markov, s.model.kept.size());
    DecodeOptions o;
    o.sampling = s.sampling;
    o.max_new_tokens = 4;  // the prefill's, then rounds, the second of which starts from caches that a rejection cut back
    o.seed = 1;
    SpecRun run(s.model, Precision::fp32, 32);
    const Exact exact(*run.target, prompt, o.max_new_tokens, s.sampling);
    Counts a, b;
    std::thread half([&] { a = sample(s.model, exact, prompt, o, 0, n / 2); });
    b = sample(s.model, exact, prompt, o, n / 2, n);
    half.join();
    for (size_t i = 0; i < a.right.size(); ++i) a.right[i] += b.right[i], a.wrong[i] += b.wrong[i];
    CHECK(a.bad_length + b.bad_length == 0);
    CHECK(a.accepted + b.accepted > static_cast<int64_t>(n) / 4);
    CHECK(a.rejected + b.rejected > static_cast<int64_t>(n) / 4);
    const double right = p_value(a.right, exact.joint), wrong = p_value(a.wrong, exact.joint);
    INFO("accepted " << a.accepted + b.accepted << ", p " << right << ", without the residual " << wrong);
    CHECK(right > 1e-3);
    CHECK(wrong < 1e-6);  // the test can tell
  }
}

TEST_CASE("the same seed gives the same draws, another one others", "[spec]") {
  SpecRun run({}, Precision::bf16);
  DecodeOptions o;
  o.max_new_tokens = 40;
  o.seed = 7;
  const std::vector<int32_t> prompt{3, 1, 2}, once = run.decoder->speculative(prompt, o).tokens;
  run.decoder->speculative({9, 9}, o);  // nothing is left over from a prompt
  CHECK(run.decoder->speculative(prompt, o).tokens == once);
  o.stream = 1;
  CHECK(run.decoder->speculative(prompt, o).tokens != once);
  o.stream = 0, o.seed = 8;
  CHECK(run.decoder->speculative(prompt, o).tokens != once);
}

TEST_CASE("decoding stops at the limit, at end tokens and when it is told to", "[spec]") {
  SpecRun run({}, Precision::fp32, 64);
  DecodeOptions o;
  for (const int64_t limit : {1, 2, 3, 7, 20}) {
    o.max_new_tokens = limit;
    const Decoded out = run.decoder->speculative({3, 1, 2}, o);
    CHECK(static_cast<int64_t>(out.tokens.size()) == limit);
    for (size_t i = 0; i + 1 < out.rounds.size(); ++i) CHECK_FALSE(out.rounds[i].cut);
  }
  int seen = 0;
  CHECK(run.decoder->speculative({3, 1, 2}, o, [&](const Round&) { return ++seen < 2; }).rounds.size() == 2);
  o.max_new_tokens = 64;
  CHECK_THROWS_AS(run.decoder->speculative({3, 1, 2}, o), Error);
  CHECK_THROWS_AS(run.decoder->speculative({}, o), Error);
  o.max_new_tokens = 20;
  o.end_tokens.resize(24);
  std::iota(o.end_tokens.begin(), o.end_tokens.end(), 0);
  CHECK(run.decoder->speculative({3, 1, 2}, o).rounds.empty());  // the prefill's token ends it
}
