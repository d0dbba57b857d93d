#include "job/train_setup.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/hash.h"
#include "core/log.h"
#include "formats/store.h"
#include "job/store_tools.h"
#include "job/train_choices.h"
#include "model/drafter_files.h"

namespace dspark::job {

using namespace model;

namespace {

void check_store(const formats::StoreIdentity& id, const target::TargetFiles& files, const fs::path& store) {
  const auto& c = files.config();
  DS_REQUIRE(id.hidden_size == c.hidden, "{} holds states of width {}, the target {} has {}: it is another target's store", store.string(), id.hidden_size, files.name(), c.hidden);
  DS_REQUIRE(id.config_hash.empty() || id.config_hash == files.config_hash(), "{} was extracted from {} (config {}), not from {} (config {})", store.string(), id.target,
             id.config_hash.substr(0, 12), files.name(), files.config_hash().substr(0, 12));
  DS_REQUIRE(id.tokenizer_hash.empty() || id.tokenizer_hash == files.tokenizer().identity(), "{} was made with another tokenizer ({}) than {}'s ({})", store.string(),
             id.tokenizer_hash.substr(0, 12), files.name(), files.tokenizer().identity().substr(0, 12));
  const auto weights = id.extra.find("weights");
  if (weights == id.extra.end()) return;  // made before stores said it, or by another program
  const std::string here = files.weights_hash();
  DS_REQUIRE(weights->second == here, "{} was extracted from other weights ({}, sampled {}) than {}'s ({}): it is another target's store", store.string(), id.target,
             weights->second.substr(0, 12), files.name(), here.substr(0, 12));
}

std::vector<std::unique_ptr<formats::SampleSource>> open_stores(const TrainOptions& o, const target::TargetFiles& files) {
  const std::vector<int> stated = tap_numbers(o.taps);  // of folders that do not say which layers their states are
  std::vector<std::unique_ptr<formats::SampleSource>> sources;
  for (const auto& path : o.stores) {
    sources.push_back(formats::open_store(path, {.taps = stated}));
    check_store(sources.back()->identity(), files, path);
    require_whole(*sources.back());
  }
  return sources;
}

std::vector<TapLayer> choose_taps(const TrainOptions& o, const std::optional<InitDrafter>& init, const std::vector<int>& stored, int64_t target_layers) {
  DS_REQUIRE(std::find(stored.begin(), stored.end(), formats::kUnknownTap) == stored.end(), "{} does not say which layers its {} states are of: name them with --taps", o.stores.front().string(),
             stored.size());
  if (init && !o.was_given("taps")) return init->taps(stored);
  if (o.taps != "store") return parse_taps(o.taps, target_layers);
  std::vector<TapLayer> taps;
  for (int n : stored) taps.push_back({n});
  return taps;
}

// Tokens of the draft vocabulary, ascending; empty: all of the target's.
std::vector<int32_t> choose_vocabulary(const TrainOptions& o, const std::optional<InitDrafter>& init, const train::Dataset& data, const target::TargetFiles& files) {
  if (const auto own = init ? init->kept() : std::nullopt) return *own;
  const int64_t vocab = files.config().vocab;
  if (o.draft_vocab <= 0 || o.draft_vocab >= vocab) return {};
  return train::choose_draft_vocab(train::count_labels(data, vocab), o.draft_vocab, files.tokenizer().end_tokens());
}

// What differs, objects by their fields: "loss: "ce=1" now, "tv=1" there; ...".
std::string run_difference(const Json& saved, const Json& now, const std::string& prefix = "") {
  std::string text;
  for (const auto& [key, value] : now.items()) {
    const Json there = saved.is_object() ? saved.value(key, Json()) : Json();
    if (there == value) continue;
    const std::string part = value.is_object() && there.is_object() ? run_difference(there, value, prefix + key + ".")
                                                                    : fmt::format("{}{}: {} now, {} there", prefix, key, value.dump(), there.is_null() ? "nothing" : there.dump());
    if (!part.empty()) text += (text.empty() ? "" : "; ") + part;
  }
  return text;
}

}  // namespace

TrainSetup::TrainSetup(TrainOptions& o, std::optional<InitDrafter> init_drafter)
    : files(o.target), data(open_stores(o, files), o.val_fraction, o.common.seed, o.store_weights), init(std::move(init_drafter)) {
  const auto& identity = data.identity();
  apply_norm = identity.last_state == formats::LastState::pre_norm;
  if (o.val_fraction > 0 && data.validation().empty())
    log_warn("--val-fraction {}: none of the {} documents came to it; nothing is validated (documents go by whole conversations, drawn by the seed)", o.val_fraction, data.training().size());
  if (init) init->check(o, files);
  taps = choose_taps(o, init, identity.taps, files.config().layers);
  kept = choose_vocabulary(o, init, data, files);
  train::NewDrafter choice = new_drafter(o);
  if (init && o.mask_token < 0) choice.mask_token = init->mask_token();
  choice.like = init ? &init->config() : nullptr;
  config = train::drafter_config_for(files, choice, taps, static_cast<int64_t>(kept.size()));
  if (init) init->check_fit(o, config);
  if (config.own_embeddings() && !o.was_given("warm-start")) o.warm_start = "none";  // nothing of the target's has this width
  objective = make_objective(o, config.confidence);

  batch_docs = o.batch_docs > 0 ? o.batch_docs : std::min<int64_t>(512, std::max<int64_t>(1, static_cast<int64_t>(data.training().size()) / 8));
  steps = o.steps > 0 ? o.steps : std::max<int64_t>(1, static_cast<int64_t>(std::llround(o.epochs * static_cast<double>(data.epoch_size()) / static_cast<double>(batch_docs))));
}

std::vector<int> TrainSetup::state_parts() const {
  const formats::StoreIdentity& id = data.identity();
  std::vector<int> parts;
  for (TapLayer t : taps) {
    const auto it = std::find(id.taps.begin(), id.taps.end(), t.n);
    DS_REQUIRE(it != id.taps.end(), "the store does not hold the state after {} layers; it has {}", t.n, fmt::join(id.taps, " "));
    parts.push_back(static_cast<int>(it - id.taps.begin()));
  }
  parts.push_back(static_cast<int>(id.taps.size()));
  return parts;
}

OrderedJson run_identity(const TrainOptions& o, const TrainSetup& setup) {
  const DrafterConfig& c = setup.config;
  std::string ids;
  for (const auto& d : setup.data.training()) ids += fmt::format("{:016x}", d.id);
  OrderedJson states;
  for (const auto& s : setup.data.sources()) states[fmt::format("store {}", states.size() + 1)] = OrderedJson::parse(formats::identity_text(s->identity()));
  std::string kept_text;
  for (int32_t id : setup.kept) kept_text += fmt::format("{},", id);
  return OrderedJson{{"drafter", OrderedJson::parse(drafter_config_json(c, {}))}, {"draft_vocabulary", sha256_hex(kept_text)}, {"documents", sha256_hex(ids)}, {"states", states},
                     {"algorithm", o.algorithm}, {"loss", o.loss}, {"layers", o.layers}, {"block", o.block}, {"rank", c.rank}, {"steps", setup.steps}, {"batch_docs", setup.batch_docs},
                     {"row_tokens", o.row_tokens}, {"chunk_slots", o.chunk_slots}, {"anchors", o.anchors}, {"optimizer", o.optimizer}, {"lr", o.lr}, {"muon_lr", o.muon_lr}, {"weight_decay", o.weight_decay}, {"muon_weight_decay", o.muon_weight_decay}, {"clip", o.clip}, {"decay", o.decay},
                     {"warmup", o.warmup}, {"denominator", o.denominator}, {"slots", o.slots}, {"label", o.label}, {"dpace", o.dpace}, {"detach_confidence", o.detach_confidence}, {"tap_noise", o.tap_noise},
                     {"anchors_per", o.anchors_per}, {"schedule", o.schedule}, {"weights", o.weights}, {"precision", o.common.precision}, {"seed", o.common.seed}, {"warm_start", o.warm_start},
                     {"store_weights", o.store_weights}, {"rotary", o.rotary}, {"hidden", c.hidden}, {"init", printable(o.init.string())}, {"init_partial", o.init_partial}};
}

void check_same_run(const Json& saved, const OrderedJson& now, const fs::path& out) {
  const std::string difference = run_difference(saved, Json::parse(now.dump()));
  DS_REQUIRE(difference.empty(), "{} holds another run ({}); choose another --out or remove it", out.string(), difference);
}

}  // namespace dspark::job
