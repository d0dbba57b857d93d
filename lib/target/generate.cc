#include "target/generate.h"

#include <algorithm>

#include "core/error.h"
#include "core/rng.h"

namespace dspark::target {

using namespace model;

namespace {
constexpr int64_t kPrefillRows = 512;  // of prompts, in one step
}

struct Generator::Slot {
  KvCache cache;
  bool active = false;
  Generated sequence;
  std::vector<int32_t> pending;  // tokens that are not in the cache yet: what is left of the prompt, or the last token
};

Generator::Generator(TargetModel& target, const GenerateOptions& options)
    : target_(target), ctx_(target.context()), options_(options),
      // Twice the logits: probabilities stand beside them.
      arena_(ctx_.device(), TargetModel::arena_bytes(target.config(), ctx_.act_dtype() == DType::f32, kPrefillRows + options.batch, 0) +
                                2 * options.batch * (target.config().vocab + target.config().hidden + 64) * dtype_bytes(ctx_.acc_dtype()) + (1 << 20)) {
  slots_.resize(static_cast<size_t>(options_.batch));
  for (Slot& s : slots_) s.cache = target_.make_cache(options_.max_length);
}

Generator::~Generator() {
  for (Slot& s : slots_) target_.free_cache(s.cache);
}

void Generator::admit(Slot& slot, Prompt&& prompt) {
  DS_REQUIRE(!prompt.ids.empty() && static_cast<int64_t>(prompt.ids.size()) < options_.max_length,
             "a prompt of {} tokens does not fit in {} with an answer", prompt.ids.size(), options_.max_length);
  slot.cache.length = 0;
  slot.pending = prompt.ids;
  slot.sequence = {prompt.id, std::move(prompt.ids), {}, false};
  slot.active = true;
}

// Appends a token; false when the sequence is finished.
bool Generator::accept(Slot& slot, int32_t token) {
  Generated& s = slot.sequence;
  s.ids.push_back(token);
  slot.pending = {token};
  s.ended = std::find(options_.end_tokens.begin(), options_.end_tokens.end(), token) != options_.end_tokens.end();
  return !s.ended && static_cast<int64_t>(s.ids.size()) < options_.max_new_tokens &&
         static_cast<int64_t>(s.prompt.size() + s.ids.size()) < options_.max_length;
}

// One forward over everything that is pending, prompts and last tokens alike; then a token for each sequence that has nothing
// pending any more. A row's bits do not depend on the others, so the mixture is invisible in the result.
std::vector<Generator::Slot*> Generator::step(std::vector<int32_t>& sampled) {
  arena_.release(0);
  std::vector<Slot*> sampling;
  std::vector<int32_t> tokens, last_row;
  std::vector<double> uniforms;
  std::vector<Segment> segments;
  int64_t budget = kPrefillRows;
  for (Slot& s : slots_) {
    if (!s.active) continue;
    const auto pending = static_cast<int64_t>(s.pending.size());
    const int64_t rows = pending == 1 ? 1 : std::min(pending, budget);
    if (rows == 0) continue;
    if (pending > 1) budget -= rows;
    tokens.insert(tokens.end(), s.pending.begin(), s.pending.begin() + rows);
    s.pending.erase(s.pending.begin(), s.pending.begin() + rows);
    segments.push_back({&s.cache, rows});
    if (!s.pending.empty()) continue;
    last_row.push_back(static_cast<int32_t>(tokens.size()) - 1);
    uniforms.push_back(Rng(options_.seed, RngStream::sampling, s.sequence.id).uniform(s.sequence.ids.size()));
    sampling.push_back(&s);
  }
  const auto rows = static_cast<int64_t>(tokens.size()), n = static_cast<int64_t>(sampling.size());
  const Tensor ids = arena_.vector(DType::i32, rows);
  ctx_.upload_now(ids, {tokens.data(), DType::i32, 1, rows, rows});
  const Tensor normed = target_.forward(arena_, ids, segments);
  if (n == 0) return sampling;
  const Tensor row = arena_.vector(DType::i32, n), uniform = arena_.vector(DType::f64, n), out = arena_.vector(DType::i32, n);
  ctx_.upload_now(row, {last_row.data(), DType::i32, 1, n, n});
  ctx_.upload_now(uniform, {uniforms.data(), DType::f64, 1, n, n});
  const Tensor last = arena_.matrix(ctx_.act_dtype(), n, target_.config().hidden);
  const Tensor logits = arena_.matrix(ctx_.acc_dtype(), n, target_.config().vocab);
  const Tensor probs = arena_.matrix(ctx_.acc_dtype(), n, target_.config().vocab);
  gather_rows(ctx_, {last, normed, row});
  target_.logits(last, logits);
  for (int64_t i = 0; i < n; ++i)
    if (sampling[static_cast<size_t>(i)]->sequence.ids.empty())  // once a prompt
      require_finite_logits(ctx_, logits.row_range(i, 1), fmt::format("{}: the logits after a prompt of {} tokens", options_.target, sampling[static_cast<size_t>(i)]->sequence.prompt.size()));
  token_probs(ctx_, {probs, logits, options_.sampling});
  sample_tokens(ctx_, {.ids = out, .probs = probs, .uniform = uniform});
  sampled.resize(static_cast<size_t>(n));
  ctx_.download_now({sampled.data(), DType::i32, 1, n, n}, out);
  return sampling;
}

void Generator::run(const std::function<bool(Prompt&)>& next, const std::function<bool(Generated&&)>& done) {
  bool more = true, go_on = true;
  std::vector<int32_t> sampled;
  while (go_on) {
    for (Slot& s : slots_) {
      Prompt prompt;
      if (s.active || !more) continue;
      more = next(prompt);
      if (more) admit(s, std::move(prompt));
    }
    if (std::none_of(slots_.begin(), slots_.end(), [](const Slot& s) { return s.active; })) return;
    const std::vector<Slot*> sampling = step(sampled);
    for (size_t i = 0; i < sampling.size(); ++i) {
      Slot& s = *sampling[i];
      if (accept(s, sampled[i])) continue;
      s.active = false;
      go_on = done(std::move(s.sequence)) && go_on;
    }
  }
}

}  // namespace dspark::target
