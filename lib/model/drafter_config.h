// What a drafter is: every number and choice that its weights were trained with (DESIGN sections 2 and 3).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "formats/rope_config.h"

namespace dspark::model {

// The residual stream after n decoder layers of the target (0: the embeddings). Formats that count otherwise convert.
struct TapLayer {
  int n = 0;
  bool operator==(const TapLayer&) const = default;
};

enum class Markov : uint8_t { none, vanilla, gated, rnn };
enum class LayerType : uint8_t { full, sliding };

struct DrafterConfig {
  std::string algorithm = "dspark";  // dspark | dflash: what files call it
  int64_t hidden = 0;                // D
  int64_t target_hidden = 0;         // E
  int64_t ffn = 0;                   // F
  int64_t heads = 0, kv_heads = 0, head_dim = 0;
  int64_t vocab = 0;                 // V
  int64_t draft_vocab = 0;           // VD
  std::vector<LayerType> layers;     // K of them
  std::vector<TapLayer> taps;        // L, ascending
  int64_t block = 7;                 // B
  int64_t rank = 256;                // R, 0 without a Markov head
  Markov markov = Markov::vanilla;
  bool confidence = true;
  bool confidence_with_markov = true;
  bool sample_from_anchor = true;    // the DSpark layout: slot k predicts token p+k+1
  int64_t window = 0;                // of sliding layers
  bool sliding_causal = true;        // sliding layers: slot k sees slots j <= k
  bool window_by_anchor = false;     // --window-rule anchor
  bool attention_bias = false;
  double eps = 1e-6;
  int64_t mask_token = -1;
  int64_t max_position = 0;
  formats::RopeConfig rope;          // exactly what was trained
  formats::Rotary rotary = formats::Rotary::unknown;
  std::string target_name;
  std::vector<std::string> target_architectures;
  std::string tokenizer_hash;        // of the target's tokenizer; empty when the file does not say
  std::string target_id;             // of the target the states came from (its config and weights); empty when the file does not say
  std::string trained_on;            // quantisation the states came from; empty when unknown

  // With a width of its own there is nothing of the target's to copy: embed_tokens and lm_head are the drafter's, trained with it.
  bool own_embeddings() const { return hidden != target_hidden; }
  int64_t n_layers() const { return static_cast<int64_t>(layers.size()); }
  int64_t n_taps() const { return static_cast<int64_t>(taps.size()); }
  int64_t q_cols() const { return heads * head_dim; }
  int64_t kv_cols() const { return kv_heads * head_dim; }
  int64_t joint_cols() const { return hidden + rank; }
  int64_t confidence_cols() const { return hidden + (confidence_with_markov ? rank : 0); }
  // Tokens proposed a block.
  int64_t proposals() const { return sample_from_anchor ? block : block - 1; }
};

// Throws (exit 2 when `from_user`) with the field, its value and what it must be.
void validate(const DrafterConfig& config);

// Why servers may turn this drafter's heads by other angles than its training did; empty when they do not.
std::string rotary_doubt(const DrafterConfig& config);

// `--taps auto` (DESIGN 14): n_i = 2 + floor((N-4) i/4 + 1/2), i = 0..4. Throws for fewer than 5 layers.
std::vector<TapLayer> auto_taps(int64_t n_layers);

}  // namespace dspark::model
