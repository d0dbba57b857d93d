#include "train/data.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <unordered_map>

#include "core/rng.h"
#include "train/anchors.h"

namespace dspark::train {

using formats::SampleSource;

namespace {

// One name for all conversations that share a document, the smallest of theirs. Two stores may disagree: an older one knows
// no conversations, and a conversation may begin as another does, answer and all.
class Conversations {
 public:
  // `all` is sorted by id.
  explicit Conversations(const std::vector<DocumentRef>& all) {
    for (size_t i = 1; i < all.size(); ++i)
      if (all[i].id == all[i - 1].id) join(all[i].conversation, all[i - 1].conversation);
  }
  uint64_t of(uint64_t c) const {
    for (auto it = smaller_.find(c); it != smaller_.end(); it = smaller_.find(c)) c = it->second;
    return c;
  }

 private:
  void join(uint64_t a, uint64_t b) {
    a = of(a), b = of(b);
    if (a != b) smaller_[std::max(a, b)] = std::min(a, b);
  }
  std::unordered_map<uint64_t, uint64_t> smaller_;
};

}  // namespace

Dataset::Dataset(std::vector<std::unique_ptr<SampleSource>> sources, double val_fraction, uint64_t seed, std::vector<double> weights)
    : sources_(std::move(sources)), seed_(seed) {
  DS_REQUIRE(!sources_.empty(), "no store to train on");
  std::vector<DocumentRef> all;
  for (const auto& source : sources_) {
    const std::string difference = formats::identity_difference(sources_.front()->identity(), source->identity(), formats::IdentityCompare::data_only, "in the one", "in the other");
    DS_REQUIRE(difference.empty(), "{} and {} cannot be trained on together: {}", sources_.front()->path().string(),
               source->path().string(), difference);
    for (int64_t i = 0; i < source->size(); ++i) {
      const auto& info = source->info(i);
      if (info.n_mask < 2) {
        ++unused_;
        continue;
      }
      all.push_back({source.get(), i, info.id, info.conversation, info.n_tokens, info.n_mask});
      longest_ = std::max(longest_, info.n_tokens);
    }
  }
  DS_REQUIRE(!all.empty(), "{}: none of the {} samples has two neighbouring tokens to learn from; was the loss mask made?",
             sources_.front()->path().string(), unused_);
  // Order by id, so that nothing depends on the order in which samples were stored.
  std::stable_sort(all.begin(), all.end(), [](const DocumentRef& a, const DocumentRef& b) { return a.id < b.id; });
  const Conversations conversations(all);
  all.erase(std::unique(all.begin(), all.end(), [](const DocumentRef& a, const DocumentRef& b) { return a.id == b.id; }), all.end());
  const Rng split(seed, RngStream::split);
  for (auto& d : all) {
    d.conversation = conversations.of(d.conversation);
    (split.uniform(d.conversation) < val_fraction ? validation_ : training_).push_back(d);
  }
  for (const auto& d : training_) tokens_ += d.n_tokens;
  DS_REQUIRE(!training_.empty(), "{}: a validation fraction of {} took all {} samples, which go by whole conversations; ask for less, or try another seed",
             sources_.front()->path().string(), val_fraction, all.size());

  shares_.resize(sources_.size());
  for (size_t i = 0; i < training_.size(); ++i) {
    const auto source = std::find_if(sources_.begin(), sources_.end(), [&](const auto& s) { return s.get() == training_[i].source; });
    shares_[static_cast<size_t>(source - sources_.begin())].documents.push_back(static_cast<int32_t>(i));
  }
  for (size_t s = 0; s < shares_.size(); ++s) {
    Share& share = shares_[s];
    const double weight = weights.empty() ? 1.0 : weights[s];
    share.whole = static_cast<int64_t>(weight);
    share.extra = std::llround((weight - static_cast<double>(share.whole)) * static_cast<double>(share.documents.size()));
    epoch_size_ += share.whole * static_cast<int64_t>(share.documents.size()) + share.extra;
    copies_ = std::max(copies_, share.whole + (share.extra > 0 ? 1 : 0));
  }
  DS_REQUIRE(epoch_size_ > 0, "an epoch has no document: the stores' weights are too small for their {} documents", training_.size());
}

int64_t Dataset::most_anchors(int64_t row_tokens, int64_t anchors) const {
  int64_t one = 0;
  double densest = 0;  // a row is no denser than its densest document
  for (const auto* documents : {&training_, &validation_})
    for (const DocumentRef& d : *documents) {
      const int64_t n = std::min(anchors, d.n_mask);
      one = std::max(one, n);
      densest = std::max(densest, static_cast<double>(n) / static_cast<double>(d.n_tokens));
    }
  return std::max(one, static_cast<int64_t>(std::ceil(densest * static_cast<double>(row_tokens))));
}

std::vector<Dataset::Visit> Dataset::make_epoch(int64_t epoch) const {
  std::vector<Visit> visits;
  visits.reserve(static_cast<size_t>(epoch_size_));
  for (size_t s = 0; s < shares_.size(); ++s) {
    const Share& share = shares_[s];
    for (int64_t copy = 0; copy < share.whole; ++copy)
      for (int32_t d : share.documents) visits.push_back({d, static_cast<int32_t>(copy)});
    if (share.extra == 0) continue;
    // The first of a shuffle of their own: its substreams begin behind every epoch's.
    std::vector<int32_t> some = share.documents;
    const Rng rng(seed_, RngStream::shuffle, static_cast<uint64_t>(epoch) + ((s + 1) << 40));
    for (int64_t i = 0; i < share.extra; ++i) {
      const auto left = static_cast<uint64_t>(some.size()) - static_cast<uint64_t>(i);
      std::swap(some[static_cast<size_t>(i)], some[static_cast<size_t>(i) + static_cast<size_t>(rng.below(static_cast<uint64_t>(i), left))]);
      visits.push_back({some[static_cast<size_t>(i)], static_cast<int32_t>(share.whole)});
    }
  }
  // By document, whatever its store: one store of weight 1 and two of its halves are the same stream.
  std::sort(visits.begin(), visits.end(), [](const Visit& a, const Visit& b) { return a.copy != b.copy ? a.copy < b.copy : a.document < b.document; });
  const Rng rng(seed_, RngStream::shuffle, static_cast<uint64_t>(epoch));
  for (int64_t i = static_cast<int64_t>(visits.size()) - 1; i > 0; --i)
    std::swap(visits[static_cast<size_t>(i)], visits[static_cast<size_t>(rng.below(static_cast<uint64_t>(i), static_cast<uint64_t>(i + 1)))]);
  return visits;
}

Dataset::Draw Dataset::draw(int64_t position) const {
  const int64_t epoch = position / epoch_size_;
  auto it = std::find_if(orders_.begin(), orders_.end(), [&](const auto& o) { return o.first == epoch; });
  if (it == orders_.end()) {
    if (orders_.size() >= 2) orders_.erase(orders_.begin());
    orders_.emplace_back(epoch, make_epoch(epoch));
    it = orders_.end() - 1;
  }
  const Visit& visit = it->second[static_cast<size_t>(position % epoch_size_)];
  return {training_[static_cast<size_t>(visit.document)], epoch * copies_ + visit.copy};
}

std::vector<int64_t> count_labels(const Dataset& data, int64_t vocab) {
  std::vector<int64_t> counts(static_cast<size_t>(vocab), 0);
  for (const auto& d : data.training()) {
    const auto t = d.source->tokens(d.index);
    for (size_t i = 0; i < t.token_ids.size(); ++i)
      if (t.loss_mask[i] != 0) {
        DS_REQUIRE(t.token_ids[i] >= 0 && t.token_ids[i] < vocab, "sample {:016x}: token {} is outside the target's vocabulary of {}",
                   d.id, t.token_ids[i], vocab);
        ++counts[static_cast<size_t>(t.token_ids[i])];
      }
  }
  return counts;
}

std::vector<int32_t> choose_draft_vocab(const std::vector<int64_t>& counts, int64_t n, const std::vector<int32_t>& always) {
  std::vector<int32_t> ids(counts.size());
  std::iota(ids.begin(), ids.end(), 0);
  auto rank = [&](int32_t id) { return std::find(always.begin(), always.end(), id) != always.end() ? INT64_MAX : counts[id]; };
  std::stable_sort(ids.begin(), ids.end(), [&](int32_t a, int32_t b) { return rank(a) > rank(b); });
  ids.resize(static_cast<size_t>(std::min<int64_t>(n, static_cast<int64_t>(ids.size()))));
  std::sort(ids.begin(), ids.end());
  return ids;
}

namespace {

void append_document(HostRow& row, const Dataset::Draw& draw, const PackTarget& target, const PackOptions& o) {
  const DocumentRef& d = draw.document;
  const auto sample = d.source->tokens(d.index);
  const auto begin = static_cast<int64_t>(row.tokens.size()), n = static_cast<int64_t>(sample.token_ids.size());
  const auto& config = *target.config;
  for (int32_t token : sample.token_ids)
    DS_REQUIRE(token >= 0 && token < config.vocab, "sample {:016x} of {}: token {} is outside the vocabulary of {}", d.id,
               d.source->path().string(), token, config.vocab);
  row.tokens.insert(row.tokens.end(), sample.token_ids.begin(), sample.token_ids.end());
  row.mask.insert(row.mask.end(), sample.loss_mask.begin(), sample.loss_mask.end());
  row.documents.push_back({begin, begin + n});
  if (!o.anchors_per_row)
    for (int32_t p : draw_anchors(anchor_candidates(sample.loss_mask), o.anchors, o.seed, draw.epoch, d.id))
      row.anchors.push_back(static_cast<int32_t>(begin) + p);
  row.first_id = row.documents.size() == 1 ? d.id : row.first_id;
  row.epoch = draw.epoch;
  if (!o.states) return;
  const int64_t width = static_cast<int64_t>(target.parts.size()) * config.target_hidden;
  row.states.resize(static_cast<size_t>((begin + n) * width));
  bf16* states = row.states.data() + begin * width;
  d.source->read_states(d.index, states, width, {}, target.parts);
  if (const auto bad = formats::first_non_finite(states, n, width, width))
    fail("{}: sample {:016x} holds {} at token {}, column {}; `dspark extract --merge {} --out NEW` leaves such samples out",
         d.source->path().string(), d.id, bad->value, bad->row, bad->column, d.source->path().string());
  if (o.tap_noise == 0) return;
  const Rng rng(o.seed, RngStream::noise, d.id ^ (static_cast<uint64_t>(draw.epoch) * 0x9E3779B97F4A7C15u));
  const int64_t taps = width - config.target_hidden;
  for (int64_t r = 0; r < n; ++r)
    for (int64_t c = 0; c < taps; ++c)
      states[r * width + c] = to_bf16(to_float(states[r * width + c]) +
                                      static_cast<float>(o.tap_noise * (2 * rng.uniform(static_cast<uint64_t>(r * taps + c)) - 1)));
}

void finish_row(HostRow& row, const PackTarget& target, const PackOptions& o) {
  const auto& config = *target.config;
  if (o.anchors_per_row) row.anchors = draw_anchors(row_anchor_candidates(row.mask, config.block), o.anchors, o.seed, row.epoch, row.first_id);
  model::PlanInput in = model::plan_input(config);
  in.slots = o.slots;
  in.tokens = row.tokens, in.mask = row.mask, in.documents = row.documents, in.anchors = row.anchors;
  in.draft_id = target.draft_id;
  in.gamma = o.gamma, in.chunk_slots = o.chunk_slots;
  row.batch.plan = model::make_batch_plan(in);
  const auto t = static_cast<int64_t>(row.tokens.size()), e = config.target_hidden;
  const int64_t tap_cols = config.n_taps() * e, width = tap_cols + e;
  row.batch.taps = {row.states.data(), DType::bf16, t, tap_cols, width};
  row.batch.last = {row.states.data() + tap_cols, DType::bf16, t, e, width};
}

}  // namespace

namespace {
int64_t tokens_of(const RowDocuments& row) {
  int64_t n = 0;
  for (const auto& d : row) n += d.document.n_tokens;
  return n;
}
}  // namespace

std::vector<RowDocuments> pack_documents(const std::vector<Dataset::Draw>& documents, int64_t row_tokens) {
  std::vector<RowDocuments> rows;
  for (const auto& d : documents) {
    if (rows.empty() || tokens_of(rows.back()) + d.document.n_tokens > row_tokens) rows.emplace_back();
    rows.back().push_back(d);
  }
  return rows;
}

std::vector<std::vector<size_t>> deal_rows(const std::vector<RowDocuments>& rows, int64_t ranks) {
  std::vector<size_t> order(rows.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return tokens_of(rows[a]) > tokens_of(rows[b]); });
  std::vector<std::vector<size_t>> dealt(static_cast<size_t>(ranks));
  // There and back again: who had the longest of one round has the shortest of the next.
  for (size_t i = 0; i < order.size(); ++i) {
    const size_t round = i / dealt.size(), at = i % dealt.size();
    dealt[round % 2 == 0 ? at : dealt.size() - 1 - at].push_back(order[i]);
  }
  for (auto& own : dealt) std::sort(own.begin(), own.end());
  return dealt;
}

StepBatch make_rows(const std::vector<RowDocuments>& rows, const PackTarget& target, const PackOptions& options) {
  StepBatch batch;
  for (const RowDocuments& documents : rows) {
    batch.rows.push_back(std::make_unique<HostRow>());
    for (const auto& d : documents) append_document(*batch.rows.back(), d, target, options);
  }
  for (auto& row : batch.rows) {
    finish_row(*row, target, options);
    batch.weight_sum += row->batch.plan.weight_sum;
    batch.tokens += static_cast<int64_t>(row->tokens.size());
    batch.slots += row->batch.plan.n_slots();
  }
  batch.micro_steps = static_cast<int64_t>(batch.rows.size());
  return batch;
}

StepBatch make_step_batch(const std::vector<Dataset::Draw>& documents, const PackTarget& target, const PackOptions& options) {
  return make_rows(pack_documents(documents, options.row_tokens), target, options);
}

}  // namespace dspark::train
