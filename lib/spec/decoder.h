// Speculative decoding with real caches on both sides.
//
// A round at anchor position p (the last token so far, not yet in either cache):
//   draft    the drafter reads its cached context keys (tokens before p) and proposes a block after the anchor
//   verify   one target forward of [anchor, proposals] gives the target's distribution after each of them
//   accept   rejection sampling; the first rejected position is resampled from the residual, or one token comes free
//   commit   the anchor and accepted rows stay in the target's cache, and their states become the drafter's context
// The tokens have exactly the target's distribution, whatever the drafter is.
#pragma once

#include <functional>
#include <vector>

#include "model/drafter.h"
#include "target/target_model.h"

namespace dspark::spec {

struct Round {
  int64_t proposed = 0;
  int64_t accepted = 0;          // leading proposals that were accepted
  std::vector<int32_t> tokens;   // what the round added: accepted proposals, then the resampled or free token (unless ended before)
  bool ended = false;            // by an end token
  bool cut = false;              // by the token limit: tokens were dropped
  // Accepted length (DESIGN 11): what the round added, the free token included.
  int64_t length() const { return static_cast<int64_t>(tokens.size()); }
};

struct DecodeOptions {
  model::SamplingParams sampling;
  int64_t max_new_tokens = 256;
  uint64_t seed = 0, stream = 0;    // stream: the prompt's number
  std::vector<int32_t> end_tokens;
  std::function<void(int32_t)> on_first;  // sees the prefill's token, before any round
};

struct Decoded {
  std::vector<int32_t> tokens;      // the prefill's token and all rounds'
  std::vector<Round> rounds;
  double seconds = 0;               // without the prefill
};

// Draft vocabulary and graph of one drafter, ready to decode against one target on the same device.
class Decoder {
 public:
  // taps of the drafter; `kept`: target ids of the draft vocabulary, empty: identity. Sequences of up to `capacity` tokens.
  Decoder(target::TargetModel& target, model::Drafter& drafter, const std::vector<int32_t>& kept, int64_t capacity);
  ~Decoder();
  Decoder(const Decoder&) = delete;
  Decoder& operator=(const Decoder&) = delete;

  // `on_round` (optional) sees each round; false from it stops.
  Decoded speculative(const std::vector<int32_t>& prompt, const DecodeOptions& options, const std::function<bool(const Round&)>& on_round = {});
  // The same without a drafter, one token a forward.
  Decoded plain(const std::vector<int32_t>& prompt, const DecodeOptions& options, const std::function<bool()>& go_on = {});

 private:
  int32_t prefill(const std::vector<int32_t>& prompt, const DecodeOptions& options, bool with_drafter);
  void extend_context(const model::Tensor& states, int64_t rows);
  model::Tensor turn_context();
  void draft(int32_t anchor, const DecodeOptions& options, int64_t counter);
  Round verify(int32_t anchor, const DecodeOptions& options, int64_t counter);
  bool is_end(const DecodeOptions& options, int32_t token) const;

  target::TargetModel& target_;
  model::Drafter& drafter_;
  model::Context& ctx_;
  int64_t capacity_, proposals_;
  std::vector<int> taps_;
  target::KvCache cache_;
  std::vector<model::Tensor> k_ctx_, kv_ctx_;  // a layer: [capacity, NKV*HD], [capacity, 2*NKV*HD] (values: its second half)
  int64_t context_length_ = 0;
  model::Weight lm_head_, markov_w2_;
  model::Tensor map_;                          // i32 [1, VD] or empty
  model::Tensor ids_, raw_ids_, probs_;        // the drafted block: [1, n] target and draft ids, [n, VD]
  model::Arena arena_;
};

}  // namespace dspark::spec
