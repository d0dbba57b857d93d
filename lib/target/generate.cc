#include "target/generate.h"

#include <algorithm>

#include "core/error.h"
#include "core/rng.h"

namespace dspark::target {

using namespace model;

namespace {
constexpr int64_t kPrefillRows = 512;
}

struct Generator::Slot {
  KvCache cache;
  bool active = false;
  Generated sequence;
  int32_t last = 0;  // the token that the next forward feeds
};

Generator::Generator(TargetModel& target, const GenerateOptions& options)
    : target_(target), ctx_(target.context()), options_(options),
      // Twice the logits: probabilities stand beside them.
      arena_(ctx_.device(), TargetModel::arena_bytes(target.config(), ctx_.act_dtype() == DType::f32, std::max(kPrefillRows, options.batch), 0) +
                                2 * options.batch * (target.config().vocab + 64) * dtype_bytes(ctx_.acc_dtype()) + (1 << 20)) {
  slots_.resize(static_cast<size_t>(options_.batch));
  for (Slot& s : slots_) s.cache = target_.make_cache(options_.max_length);
}

Generator::~Generator() {
  for (Slot& s : slots_) target_.free_cache(s.cache);
}

// All prompt tokens but the last go into the cache; the last one is the first decoding step's input.
void Generator::prefill(Slot& slot, Prompt&& prompt) {
  DS_REQUIRE(!prompt.ids.empty() && static_cast<int64_t>(prompt.ids.size()) < options_.max_length,
             "a prompt of {} tokens does not fit in {} with an answer", prompt.ids.size(), options_.max_length);
  slot.cache.length = 0;
  const auto n = static_cast<int64_t>(prompt.ids.size()) - 1;
  for (int64_t begin = 0; begin < n; begin += kPrefillRows) {
    arena_.release(0);
    const int64_t rows = std::min(kPrefillRows, n - begin);
    const Tensor ids = arena_.vector(DType::i32, rows);
    ctx_.upload_now(ids, {prompt.ids.data() + begin, DType::i32, 1, rows, rows});
    const Segment segment{&slot.cache, rows};
    target_.forward(arena_, ids, {&segment, 1});
  }
  slot.last = prompt.ids.back();
  slot.sequence = {prompt.id, std::move(prompt.ids), {}, false};
  slot.active = true;
}

// Appends a token; false when the sequence is finished.
bool Generator::accept(Slot& slot, int32_t token) {
  Generated& s = slot.sequence;
  s.ids.push_back(token);
  slot.last = token;
  s.ended = std::find(options_.end_tokens.begin(), options_.end_tokens.end(), token) != options_.end_tokens.end();
  return !s.ended && static_cast<int64_t>(s.ids.size()) < options_.max_new_tokens &&
         static_cast<int64_t>(s.prompt.size() + s.ids.size()) < options_.max_length;
}

void Generator::run(const std::function<bool(Prompt&)>& next, const std::function<bool(Generated&&)>& done) {
  bool more = true, go_on = true;
  while (go_on) {
    for (Slot& s : slots_) {
      Prompt prompt;
      if (s.active || !more) continue;
      more = next(prompt);
      if (more) prefill(s, std::move(prompt));
    }
    std::vector<Slot*> active;
    for (Slot& s : slots_)
      if (s.active) active.push_back(&s);
    if (active.empty()) return;

    arena_.release(0);
    const auto n = static_cast<int64_t>(active.size());
    std::vector<int32_t> tokens;
    std::vector<double> uniforms;
    std::vector<Segment> segments;
    for (Slot* s : active) {
      tokens.push_back(s->last);
      segments.push_back({&s->cache, 1});
      const Rng rng(options_.seed, RngStream::sampling, s->sequence.id);
      uniforms.push_back(rng.uniform(s->sequence.ids.size()));
    }
    const Tensor ids = arena_.vector(DType::i32, n), uniform = arena_.vector(DType::f64, n);
    ctx_.upload_now(ids, {tokens.data(), DType::i32, 1, n, n});
    ctx_.upload_now(uniform, {uniforms.data(), DType::f64, 1, n, n});
    const Tensor normed = target_.forward(arena_, ids, segments);
    const Tensor logits = arena_.matrix(ctx_.acc_dtype(), n, target_.config().vocab);
    const Tensor probs = arena_.matrix(ctx_.acc_dtype(), n, target_.config().vocab);
    target_.logits(normed, logits);
    token_probs(ctx_, {probs, logits, options_.sampling});
    sample_tokens(ctx_, {.ids = ids, .probs = probs, .uniform = uniform});
    ctx_.download_now({tokens.data(), DType::i32, 1, n, n}, ids);
    for (int64_t i = 0; i < n; ++i) {
      Slot& s = *active[static_cast<size_t>(i)];
      if (accept(s, tokens[static_cast<size_t>(i)])) continue;
      s.active = false;
      go_on = done(std::move(s.sequence)) && go_on;
    }
  }
}

}  // namespace dspark::target
