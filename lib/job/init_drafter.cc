#include "job/init_drafter.h"

#include <algorithm>

#include "core/error.h"
#include "core/log.h"
#include "job/fit.h"
#include "train/checkpoint.h"

namespace dspark::job {

using namespace model;
using formats::Rotary;

namespace {

// The values a tensor of the drafter holds, against those of a file.
bool same_values(Drafter& drafter, const std::string& name, const std::vector<float>& file) {
  const std::vector<float> there = device_values(drafter)(name);
  return std::equal(there.begin(), there.end(), file.begin(), file.end(), [](float a, float b) { return to_float(to_bf16(a)) == to_float(to_bf16(b)); });
}

}  // namespace

std::optional<InitDrafter> InitDrafter::open(const TrainOptions& o) {
  if (o.init.empty()) return std::nullopt;
  const bool gone = !fs::exists(o.init) && !o.out.empty() && train::has_checkpoint(o.out);
  const auto begun = gone ? train::newest_checkpoint(o.out) : std::nullopt;
  return InitDrafter(o.init, open_drafter(begun ? begun->folder : o.init));
}

void InitDrafter::check(const TrainOptions& o, const target::TargetFiles& target) {
  const DrafterConfig& c = files_.config;
  const int64_t vocab = target.config().vocab, wanted = o.draft_vocab < vocab ? o.draft_vocab : 0;
  const auto own = static_cast<int64_t>(files_.kept.size());
  same_.tokenizer = (c.tokenizer_hash.empty() || c.tokenizer_hash == target.tokenizer().identity()) && c.vocab == vocab;
  same_.draft_vocab = same_.tokenizer && wanted == own;
  if (!same_.tokenizer)
    log_warn("--init {}: it was trained for {}, with another tokenizer ({} tokens) than {}'s ({})", name_.string(), c.target_name.empty() ? "another target" : c.target_name,
             c.vocab, target.name(), vocab);
  else if (c.tokenizer_hash.empty())
    log_info("--init {}: it does not say which tokenizer it was trained with; its {} tokens are taken to be {}'s", name_.string(), c.vocab, target.name());
  DS_REQUIRE(!same_.tokenizer || same_.draft_vocab || o.init_partial,
             "--draft-vocab {}: the drafter of --init {} proposes {} of {} tokens; they are part of it and cannot change (with --init-partial new ones are chosen, "
             "and what depends on them starts new)",
             o.draft_vocab, name_.string(), own > 0 ? own : vocab, vocab);
  if (same_.draft_vocab && own > 0) log_info("--init {}: its draft vocabulary of {} tokens stays; token counts of this data are not used", name_.string(), own);

  const std::string doubt = rotary_doubt(c);
  DS_REQUIRE(doubt.empty() || o.was_given("rotary"), "--init {}: {}; say how to go on with --rotary reference (all of a head) or --rotary served", name_.string(), doubt);
  const bool turned = c.rope.rotates_part() && c.rotary == Rotary::served && o.rotary == "reference";
  if (turned) log_warn("--init {}: it was trained with --rotary served; with reference its heads turn by other angles from now on", name_.string());
}

std::optional<std::vector<int32_t>> InitDrafter::kept() const {
  if (!same_.draft_vocab) return std::nullopt;
  return files_.kept;
}

std::vector<TapLayer> InitDrafter::taps(const std::vector<int>& stored) const {
  const auto& own = files_.config.taps;
  const bool all = std::all_of(own.begin(), own.end(), [&](TapLayer t) { return std::find(stored.begin(), stored.end(), t.n) != stored.end(); });
  if (all) return own;
  std::vector<TapLayer> taps;
  for (const int n : stored) taps.push_back({n});
  log_warn("--init {}: the store does not hold its taps; the store's are used instead: after {} layers", name_.string(), fmt::join(stored, ", "));
  return taps;
}

void InitDrafter::check_fit(const TrainOptions& o, const DrafterConfig& config) {
  mismatches_ = train::init_mismatches(config, files_, same_);
  std::string list;
  for (const auto& m : mismatches_) list += fmt::format("{}{} is {} there, {} here", list.empty() ? "" : "; ", m.name, m.there, m.here);
  DS_REQUIRE(mismatches_.empty() || o.init_partial, "--init {}: {} of its tensors cannot go on in this drafter: {}; with --init-partial these start new, or are left out where there are none here", name_.string(),
             mismatches_.size(), list);
  if (!mismatches_.empty()) log_warn("--init {}: {} tensors start new, or are left out where there are none here: {}", name_.string(), mismatches_.size(), list);
}

void InitDrafter::load(Drafter& drafter, const TrainOptions& o, const TensorValues& target) const {
  const DrafterConfig& c = drafter.config();
  train::init_from_drafter(drafter, files_, mismatches_, target, o.common.seed, o.weights == "speculators" ? train::NewWeights::speculators : train::NewWeights::deepspec);
  const auto* head = files_.tensors.find("lm_head.weight");
  if (!c.own_embeddings() && head && same_.draft_vocab && head->count() == c.draft_vocab * c.hidden && !same_values(drafter, "lm_head.weight", formats::read_f32(*head)))
    log_warn("--init {}: its lm_head is not the target's and is replaced by it", name_.string());
}

}  // namespace dspark::job
