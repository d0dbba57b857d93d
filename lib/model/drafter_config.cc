#include "model/drafter_config.h"

#include "core/error.h"
#include "model/rope.h"

namespace dspark::model {

void validate(const DrafterConfig& c) {
  // What is multiplied with each other elsewhere stays far inside 64 bits.
  auto size = [](int64_t v, const char* name, int64_t most) { DS_REQUIRE(v >= 1 && v <= most, "drafter: {} is {}, it must be from 1 to {}", name, v, most); };
  size(c.hidden, "hidden size", 1 << 20);
  size(c.target_hidden, "target hidden size", 1 << 20);
  size(c.ffn, "intermediate size", 1 << 24);
  size(c.heads, "number of attention heads", 1 << 14);
  size(c.kv_heads, "number of key/value heads", c.heads);
  size(c.head_dim, "head size", 1 << 14);
  size(c.vocab, "vocabulary", 1 << 28);
  size(c.draft_vocab, "draft vocabulary", 1 << 28);
  size(c.n_layers(), "number of layers", 1000);
  size(c.n_taps(), "number of tapped layers", 1000);
  size(c.block, "block size", 1024);
  DS_REQUIRE(c.rank >= 0 && c.rank <= 1 << 16, "drafter: Markov rank is {}, it must be from 0 to {}", c.rank, 1 << 16);
  DS_REQUIRE(c.window >= 0 && c.window <= 1 << 30, "drafter: window is {}, it must be from 0 to {}", c.window, 1 << 30);
  DS_REQUIRE(c.sample_from_anchor || c.block >= 2, "drafter: the bonus layout needs a block of at least 2, it is {}", c.block);
  DS_REQUIRE(c.heads % c.kv_heads == 0, "drafter: {} heads cannot share {} key/value heads", c.heads, c.kv_heads);
  DS_REQUIRE(c.draft_vocab <= c.vocab, "drafter: draft vocabulary {} is larger than the target's {}", c.draft_vocab, c.vocab);
  DS_REQUIRE((c.rank > 0) == (c.markov != Markov::none), "drafter: Markov rank {} does not go with its head type", c.rank);
  DS_REQUIRE(c.mask_token >= 0 && c.mask_token < c.vocab, "drafter: mask token {} is outside the vocabulary of {}",
             c.mask_token, c.vocab);
  make_rope_table(c.rope, c.head_dim, c.max_position);  // throws for what cannot be rotated
  DS_REQUIRE(c.eps > 0 && c.eps <= 0.1, "drafter: rms_norm_eps is {}, expected more than 0 and at most 0.1", c.eps);
  for (size_t i = 0; i < c.taps.size(); ++i)
    DS_REQUIRE(c.taps[i].n >= 0 && (i == 0 || c.taps[i].n > c.taps[i - 1].n),
               "drafter: tapped layers must ascend; number {} is {}", i, c.taps[i].n);
  for (LayerType t : c.layers)
    DS_REQUIRE(t == LayerType::full || c.window > 0, "drafter: a sliding layer needs a window of at least 1");
}

std::string rotary_doubt(const DrafterConfig& c) {
  if (!c.rope.rotates_part() || c.rotary == formats::Rotary::served) return {};
  return fmt::format("partial_rotary_factor {} makes servers rotate {} of {} channels of a head, and nothing says that the drafter was trained so (the "
                     "public trainers ignore the factor and train the full rotation; served, such a drafter has next to nothing accepted)",
                     c.rope.partial_rotary_factor, make_rope_table(c.rope, c.head_dim, c.max_position).rot, c.head_dim);
}

std::vector<TapLayer> auto_taps(int64_t n_layers) {
  DS_REQUIRE(n_layers >= 8, "--taps auto needs a target of at least 8 layers, this one has {}; name the taps", n_layers);
  std::vector<TapLayer> taps;
  // floor(x + 1/2) in integers: (N-4) i/4 + 1/2 = ((N-4) i + 2) / 4.
  for (int64_t i = 0; i < 5; ++i) taps.push_back({static_cast<int>(2 + ((n_layers - 4) * i + 2) / 4)});
  return taps;
}

}  // namespace dspark::model
