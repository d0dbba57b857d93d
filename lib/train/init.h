// New drafters: random weights as DeepSpec draws them, or a warm start from the target's own last layers (DESIGN 14).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "model/drafter.h"
#include "model/drafter_files.h"
#include "target/target_files.h"

namespace dspark::train {

// A drafter of the target's shape, or of another drafter's.
struct NewDrafter {
  std::string algorithm = "dspark";
  int64_t layers = 5, block = 7, rank = 256, window = 0;
  int64_t hidden = 0;  // 0: the target's width; another one scales the FFN with it
  formats::Rotary rotary = formats::Rotary::served;
  // A drafter to continue from: its heads, FFN, norms and rope, which its weights were trained with, instead of the target's.
  const model::DrafterConfig* like = nullptr;
  model::Markov markov = model::Markov::vanilla;  // when rank > 0
  bool confidence = true, sample_from_anchor = true, window_by_anchor = false;
  std::vector<model::LayerType> layer_types;  // `layers` of them; empty: all full
  bool sliding_causal = true;
  int64_t mask_token = -1;  // -1: the tokenizer's (DESIGN 14)
};
model::DrafterConfig drafter_config_for(const target::TargetFiles& files, const NewDrafter& choice, const std::vector<model::TapLayer>& taps,
                                        int64_t draft_vocab);

// Weights the target owns: embed_tokens.weight [V, E] and lm_head.weight [VD, E] (kept rows; empty `kept`: all).
model::TensorValues target_values(const target::TargetFiles& files, const std::vector<int32_t>& kept);

// Which trainer's new weights (DESIGN 3).
enum class NewWeights : uint8_t {
  deepspec,     // every matrix N(0, 0.02), biases 0
  speculators,  // backbone and fc the same; Markov and confidence heads U(+-1/sqrt(fan_in)), biases too; markov_w1 N(0, 0.01)
};

// deepspec: matrices and embeddings N(0, 0.02), biases 0, norms 1; frozen tensors from the target. Depends on the seed and each
// tensor's name only.
void init_random(model::Drafter& drafter, const model::TensorValues& target, uint64_t seed, NewWeights rule = NewWeights::deepspec);
// On top of init_random: drafter layers become copies of the target's last layers, fc the identity on the last tap, norms the
// target's (q and k norms of a target without them: the size its own q and k have), markov_w1 a random projection of the
// target's embeddings, markov_w2 zero. Where the drafter rotates whole heads and the target only their first part, the
// channels of q and k are reordered so that every pair the target rotates turns at its own frequency again.
void warm_start(model::Drafter& drafter, const target::TargetFiles& files);

// Trainable tensors of another drafter that can't go on in this one (--init): those of another shape or on one side only, and
// those whose rows are tokens (the Markov factors, a drafter's own embeddings and head) where a row means another token there.
struct Mismatch {
  std::string name, there, here;  // shapes, with a reason where they agree; "none": no such tensor
};
struct SameTokens {
  bool tokenizer = true, draft_vocab = true;
};
std::vector<Mismatch> init_mismatches(const model::DrafterConfig& config, const model::DrafterFiles& init, const SameTokens& same);
// Frozen tensors from the target, `mismatches` as init_random draws them, everything else from `init`.
void init_from_drafter(model::Drafter& drafter, const model::DrafterFiles& init, const std::vector<Mismatch>& mismatches,
                       const model::TensorValues& target, uint64_t seed, NewWeights rule);

}  // namespace dspark::train
