#include "spec/decoder.h"

#include <algorithm>
#include <numeric>

#include "core/error.h"
#include "core/log.h"
#include "core/rng.h"

namespace dspark::spec {

using namespace model;
using target::Segment;

namespace {
constexpr int64_t kPrefillRows = 512;
// Random numbers of one round: one a proposal to draft it, one a proposal to judge it, one for the last token.
constexpr int64_t kUniformsPerRound = 256;
}  // namespace

Decoder::Decoder(target::TargetModel& target, Drafter& drafter, const std::vector<int32_t>& kept, int64_t capacity)
    : target_(target), drafter_(drafter), ctx_(target.context()), capacity_(capacity), proposals_(drafter.config().proposals()),
      cache_(target.make_cache(capacity)),
      arena_(ctx_.device(), target::TargetModel::arena_bytes(target.config(), ctx_.act_dtype() == DType::f32, kPrefillRows, 0) +
                                3 * (proposals_ + 2) * (target.config().vocab + 64) * dtype_bytes(ctx_.acc_dtype()) +
                                kPrefillRows * (drafter.config().n_taps() + 8) * std::max(target.config().hidden, drafter.config().hidden) * 4 + (int64_t{64} << 20)) {
  const DrafterConfig& c = drafter_.config();
  DS_REQUIRE(2 * c.block + 2 <= kUniformsPerRound, "blocks of {} are longer than the decoder serves", c.block);
  for (TapLayer t : c.taps) taps_.push_back(t.n);
  for (int64_t i = 0; i < c.n_layers(); ++i) {
    k_ctx_.push_back(ctx_.allocate(ctx_.act_dtype(), capacity, c.kv_cols()));
    kv_ctx_.push_back(ctx_.allocate(ctx_.act_dtype(), capacity, 2 * c.kv_cols()));
  }
  // Apart: the lm_head's product is one for the block, the Markov head's one a slot.
  lm_head_.value = drafter_.head.value.col_range(0, c.hidden);
  refresh(ctx_, {&lm_head_});
  if (c.rank > 0) {
    markov_w2_.value = drafter_.head.value.col_range(c.hidden, c.rank);
    refresh(ctx_, {&markov_w2_});
  }
  if (!kept.empty()) {
    const auto n = static_cast<int64_t>(kept.size());
    map_ = ctx_.allocate(DType::i32, 1, n);
    ctx_.upload_now(map_, {kept.data(), DType::i32, 1, n, n});
  }
  ids_ = ctx_.allocate(DType::i32, 1, c.block);
  raw_ids_ = ctx_.allocate(DType::i32, 1, c.block);
  probs_ = ctx_.allocate(ctx_.acc_dtype(), c.block, c.draft_vocab);
}

Decoder::~Decoder() {
  target_.free_cache(cache_);
  for (auto* list : {&k_ctx_, &kv_ctx_})
    for (const Tensor& t : *list) ctx_.free(t);
  for (const Tensor& t : {map_, ids_, raw_ids_, probs_})
    if (t) ctx_.free(t);
}

bool Decoder::is_end(const DecodeOptions& o, int32_t token) const {
  return std::find(o.end_tokens.begin(), o.end_tokens.end(), token) != o.end_tokens.end();
}

// Target states of the next `rows` tokens become drafter context.
void Decoder::extend_context(const Tensor& states, int64_t rows) {
  const DrafterConfig& c = drafter_.config();
  const int64_t mark = arena_.mark();
  const Tensor taps = arena_.matrix(ctx_.act_dtype(), rows, c.n_taps() * c.target_hidden);
  copy(ctx_, {taps, states.row_range(0, rows).col_range(0, taps.cols)});
  const Tensor context = arena_.matrix(ctx_.act_dtype(), rows, c.hidden);
  drafter_.context_rows(arena_, taps, context, {}, {});
  std::vector<int32_t> positions;
  for (int64_t i = 0; i < rows; ++i) positions.push_back(static_cast<int32_t>(context_length_ + i));
  const Tensor position = arena_.vector(DType::i32, rows);
  ctx_.upload_now(position, {positions.data(), DType::i32, 1, rows, rows});
  for (int64_t i = 0; i < c.n_layers(); ++i) {
    const Tensor kv = kv_ctx_[static_cast<size_t>(i)].row_range(context_length_, rows);
    drafter_.context_kv(i, context, kv);
    drafter_.context_keys(i, kv, position, k_ctx_[static_cast<size_t>(i)].row_range(context_length_, rows), {}, {});
  }
  context_length_ += rows;
  arena_.release(mark);
}

// `dynamic` rope past its length: every key so far turns by the frequencies of the row with this block, as in training.
Tensor Decoder::turn_context() {
  const DrafterConfig& c = drafter_.config();
  const int64_t length = context_length_ + c.block;
  if (c.rope.type != "dynamic" || length <= c.max_position) return {};
  const RopeTable table = make_rope_table(c.rope, c.head_dim, c.max_position, length);
  const auto n = static_cast<int64_t>(table.inv_freq.size());
  const Tensor inv_freq = arena_.vector(ctx_.acc_dtype(), n);
  ctx_.upload_now(inv_freq, {table.inv_freq.data(), DType::f64, 1, n, n});
  std::vector<int32_t> positions(static_cast<size_t>(context_length_));
  std::iota(positions.begin(), positions.end(), 0);
  const Tensor position = arena_.vector(DType::i32, context_length_);
  ctx_.upload_now(position, {positions.data(), DType::i32, 1, context_length_, context_length_});
  for (int64_t i = 0; i < c.n_layers(); ++i)
    drafter_.context_keys(i, kv_ctx_[static_cast<size_t>(i)].row_range(0, context_length_), position,
                          k_ctx_[static_cast<size_t>(i)].row_range(0, context_length_), {}, inv_freq);
  return inv_freq;
}

// Fills the caches with the prompt and samples the token after it.
int32_t Decoder::prefill(const std::vector<int32_t>& prompt, const DecodeOptions& o, bool with_drafter) {
  const auto n = static_cast<int64_t>(prompt.size());
  DS_REQUIRE(n >= 1 && n + o.max_new_tokens + drafter_.config().block + 1 <= capacity_, "a prompt of {} tokens and {} new ones do not fit in {}", n, o.max_new_tokens, capacity_);
  cache_.length = context_length_ = 0;
  const int64_t width = (static_cast<int64_t>(taps_.size()) + 1) * target_.config().hidden;
  int32_t token = 0;
  for (int64_t begin = 0; begin < n; begin += kPrefillRows) {
    const int64_t rows = std::min(kPrefillRows, n - begin);
    arena_.release(0);
    const Tensor ids = arena_.vector(DType::i32, rows);
    ctx_.upload_now(ids, {prompt.data() + begin, DType::i32, 1, rows, rows});
    const Tensor states = with_drafter ? arena_.matrix(DType::bf16, rows, width) : Tensor{};
    const Segment segment{&cache_, rows};
    const Tensor normed = target_.forward(arena_, ids, {&segment, 1}, taps_, states);
    if (with_drafter) extend_context(states, rows);
    if (begin + rows < n) continue;
    const Tensor logits = arena_.matrix(ctx_.acc_dtype(), 1, target_.config().vocab), probs = arena_.matrix(ctx_.acc_dtype(), 1, target_.config().vocab);
    target_.logits(normed.row_range(rows - 1, 1), logits);
    target::require_finite_logits(ctx_, logits, fmt::format("the target's logits after a prompt of {} tokens", n));
    token_probs(ctx_, {probs, logits, o.sampling});
    const double u = Rng(o.seed, RngStream::verify, o.stream).uniform(0);
    const Tensor uniform = arena_.vector(DType::f64, 1), out = arena_.vector(DType::i32, 1);
    ctx_.upload_now(uniform, {&u, DType::f64, 1, 1, 1});
    sample_tokens(ctx_, {.ids = out, .probs = probs, .uniform = uniform});
    ctx_.download_now({&token, DType::i32, 1, 1, 1}, out);
  }
  return token;
}

// Proposals after `anchor` into ids_ and probs_ (rows and columns 0 .. proposals).
void Decoder::draft(int32_t anchor, const DecodeOptions& o, int64_t counter) {
  const DrafterConfig& c = drafter_.config();
  arena_.release(0);
  std::vector<int32_t> tokens(static_cast<size_t>(c.block), static_cast<int32_t>(c.mask_token)), positions;
  tokens[0] = anchor;
  for (int64_t k = 0; k < c.block; ++k) positions.push_back(static_cast<int32_t>(context_length_ + k));
  const auto row = static_cast<int32_t>(context_length_);
  const int32_t start = 0;
  DeviceBatch b;
  b.n_anchors = 1, b.block = c.block;
  auto ints = [&](const int32_t* data, int64_t n) {
    const Tensor t = arena_.vector(DType::i32, n);
    ctx_.upload_now(t, {data, DType::i32, 1, n, n});
    return t;
  };
  b.block_token = ints(tokens.data(), c.block);
  b.block_position = ints(positions.data(), c.block);
  b.anchor_row = ints(&row, 1);
  b.doc_start = ints(&start, 1);
  b.inv_freq = turn_context();
  std::vector<Tensor> k, v;
  for (size_t i = 0; i < k_ctx_.size(); ++i) {
    k.push_back(k_ctx_[i].row_range(0, context_length_));
    v.push_back(kv_ctx_[i].row_range(0, context_length_).col_range(c.kv_cols(), c.kv_cols()));
  }
  const Tensor hidden = drafter_.block_forward(arena_, k, v, b);
  const int64_t first = c.sample_from_anchor ? 0 : 1;  // the first slot that proposes
  const Tensor logits = arena_.matrix(ctx_.acc_dtype(), proposals_, c.draft_vocab);
  linear(ctx_, {logits, hidden.row_range(first, proposals_), &lm_head_});
  const Rng rng(o.seed, RngStream::sampling, o.stream);
  std::vector<double> uniforms;
  for (int64_t i = 0; i < proposals_; ++i) uniforms.push_back(rng.uniform(static_cast<uint64_t>(counter * kUniformsPerRound + i)));
  const Tensor uniform = arena_.vector(DType::f64, proposals_);
  ctx_.upload_now(uniform, {uniforms.data(), DType::f64, 1, proposals_, proposals_});
  const auto check = [&] {  // once a prompt: as good as always, and next to nothing
    if (counter == 1) target::require_finite_logits(ctx_, logits, fmt::format("the drafter's logits after {} tokens", context_length_ + 1));
  };
  if (c.rank == 0) {  // no dependence between slots
    check();
    token_probs(ctx_, {probs_.row_range(0, proposals_), logits, o.sampling});
    sample_tokens(ctx_, {.ids = ids_.col_range(0, proposals_), .probs = probs_.row_range(0, proposals_), .uniform = uniform, .map = map_});
    return;
  }
  const Tensor e = arena_.matrix(ctx_.act_dtype(), 1, c.rank), state = arena_.matrix(ctx_.acc_dtype(), 1, c.rank);
  // In the bonus layout an rnn head has run over slot 0, with the anchor as its token, before the first proposal.
  const bool warm = first > 0 && drafter_.markov_has_state();
  if (warm) drafter_.markov_step(arena_, hidden.row_range(0, 1), b.block_token.col_range(0, 1), state, true, e);
  for (int64_t i = 0; i < proposals_; ++i) {
    const Tensor previous = i == 0 ? b.block_token.col_range(0, 1) : ids_.col_range(i - 1, 1);
    drafter_.markov_step(arena_, hidden.row_range(first + i, 1), previous, state, i == 0 && !warm, e);
    linear(ctx_, {logits.row_range(i, 1), e, &markov_w2_, Write::add});
    token_probs(ctx_, {probs_.row_range(i, 1), logits.row_range(i, 1), o.sampling});
    sample_tokens(ctx_, {.ids = ids_.col_range(i, 1), .probs = probs_.row_range(i, 1), .uniform = uniform.col_range(i, 1), .map = map_});
  }
  check();
}

Round Decoder::verify(int32_t anchor, const DecodeOptions& o, int64_t counter) {
  const int64_t m = proposals_, vocab = target_.config().vocab, length = cache_.length;
  arena_.release(0);
  const Tensor ids = arena_.vector(DType::i32, m + 1);
  ctx_.upload_now(ids.col_range(0, 1), {&anchor, DType::i32, 1, 1, 1});
  copy(ctx_, {ids.col_range(1, m), ids_.col_range(0, m)});
  const Tensor states = arena_.matrix(DType::bf16, m + 1, (static_cast<int64_t>(taps_.size()) + 1) * target_.config().hidden);
  const Segment segment{&cache_, m + 1};
  const Tensor normed = target_.forward(arena_, ids, {&segment, 1}, taps_, states);
  const Tensor logits = arena_.matrix(ctx_.acc_dtype(), m + 1, vocab), probs = arena_.matrix(ctx_.acc_dtype(), m + 1, vocab);
  target_.logits(normed, logits);
  token_probs(ctx_, {probs, logits, o.sampling});
  const Rng rng(o.seed, RngStream::verify, o.stream);
  std::vector<double> uniforms;
  for (int64_t i = 0; i <= m; ++i) uniforms.push_back(rng.uniform(static_cast<uint64_t>(counter * kUniformsPerRound + i)));
  const Tensor uniform = arena_.vector(DType::f64, m + 1), result = arena_.vector(DType::i32, 2), work = arena_.vector(ctx_.acc_dtype(), vocab);
  ctx_.upload_now(uniform, {uniforms.data(), DType::f64, 1, m + 1, m + 1});
  verify_block(ctx_, {result, ids_.col_range(0, m), probs_.row_range(0, m), map_, probs, uniform, work});
  int32_t host[2];
  std::vector<int32_t> drafted(static_cast<size_t>(m));
  ctx_.download_now({host, DType::i32, 1, 2, 2}, result);
  ctx_.download_now({drafted.data(), DType::i32, 1, m, m}, ids_.col_range(0, m));

  Round round;
  round.proposed = m;
  round.accepted = host[0];
  for (int64_t i = 0; i < round.accepted && !round.ended; ++i) {
    round.tokens.push_back(drafted[static_cast<size_t>(i)]);
    round.ended = is_end(o, round.tokens.back());
  }
  if (!round.ended) {
    round.tokens.push_back(host[1]);
    round.ended = is_end(o, host[1]);
  }
  // The anchor and the accepted rows stay; rejected ones are forgotten.
  cache_.length = length + 1 + round.accepted;
  extend_context(states, 1 + round.accepted);
  return round;
}

Decoded Decoder::speculative(const std::vector<int32_t>& prompt, const DecodeOptions& o, const std::function<bool(const Round&)>& on_round) {
  Decoded out;
  out.tokens.push_back(prefill(prompt, o, true));
  if (o.on_first) o.on_first(out.tokens.back());
  const double start = now_s();
  bool go_on = !is_end(o, out.tokens.back());
  for (int64_t counter = 1; go_on && static_cast<int64_t>(out.tokens.size()) < o.max_new_tokens; ++counter) {
    const int32_t anchor = out.tokens.back();
    draft(anchor, o, counter);
    Round round = verify(anchor, o, counter);
    const int64_t room = o.max_new_tokens - static_cast<int64_t>(out.tokens.size());
    if (round.length() > room) {
      round.tokens.resize(static_cast<size_t>(room));
      round.cut = true;
      round.ended = false;
    }
    out.tokens.insert(out.tokens.end(), round.tokens.begin(), round.tokens.end());
    go_on = !round.ended && !round.cut;
    if (on_round) go_on = on_round(round) && go_on;
    out.rounds.push_back(std::move(round));
  }
  out.seconds = now_s() - start;
  return out;
}

Decoded Decoder::plain(const std::vector<int32_t>& prompt, const DecodeOptions& o, const std::function<bool()>& go_on) {
  Decoded out;
  out.tokens.push_back(prefill(prompt, o, false));
  const double start = now_s();
  const Rng rng(o.seed, RngStream::verify, o.stream);
  while (!is_end(o, out.tokens.back()) && static_cast<int64_t>(out.tokens.size()) < o.max_new_tokens && (!go_on || go_on())) {
    arena_.release(0);
    const int64_t vocab = target_.config().vocab;
    const Tensor ids = arena_.vector(DType::i32, 1), uniform = arena_.vector(DType::f64, 1);
    const double u = rng.uniform(out.tokens.size());
    int32_t token = out.tokens.back();
    ctx_.upload_now(ids, {&token, DType::i32, 1, 1, 1});
    ctx_.upload_now(uniform, {&u, DType::f64, 1, 1, 1});
    const Segment segment{&cache_, 1};
    const Tensor normed = target_.forward(arena_, ids, {&segment, 1});
    const Tensor logits = arena_.matrix(ctx_.acc_dtype(), 1, vocab), probs = arena_.matrix(ctx_.acc_dtype(), 1, vocab);
    target_.logits(normed, logits);
    token_probs(ctx_, {probs, logits, o.sampling});
    sample_tokens(ctx_, {.ids = ids, .probs = probs, .uniform = uniform});
    ctx_.download_now({&token, DType::i32, 1, 1, 1}, ids);
    out.tokens.push_back(token);
  }
  out.seconds = now_s() - start;
  return out;
}

}  // namespace dspark::spec
