#include "model/batch_plan.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "model/rope.h"

namespace dspark::model {
namespace {

const PackedDocument& document_of(std::span<const PackedDocument> documents, int64_t row) {
  auto it = std::upper_bound(documents.begin(), documents.end(), row,
                             [](int64_t r, const PackedDocument& d) { return r < d.end; });
  DS_ASSERT(it != documents.end() && row >= it->begin, "anchor row {} is in no document", row);
  return *it;
}

// Chunks of whole anchors of at most chunk_slots slots; `first_slot[a]` is anchor a's first slot.
void make_chunks(const std::vector<int64_t>& first_slot, int64_t chunk_slots, BatchPlan& plan) {
  const auto n_anchors = static_cast<int64_t>(first_slot.size()) - 1;
  for (int64_t a = 0; a < n_anchors;) {
    int64_t end = a + 1;
    while (end < n_anchors && (chunk_slots <= 0 || first_slot[end + 1] - first_slot[a] <= chunk_slots)) ++end;
    LossChunk chunk{first_slot[a], first_slot[end] - first_slot[a], 0, 0};
    a = end;
    if (chunk.slots == 0) continue;
    const auto begin = plan.target_row.begin() + chunk.slot0;
    const auto [low, high] = std::minmax_element(begin, begin + chunk.slots);
    chunk.row0 = *low;
    chunk.rows = *high - *low + 1;
    plan.max_chunk_slots = std::max(plan.max_chunk_slots, chunk.slots);
    plan.max_chunk_rows = std::max(plan.max_chunk_rows, chunk.rows);
    plan.chunks.push_back(chunk);
  }
}

// Indices grouped by token, in order, so that each row of a table's gradient is one ordered sum.
ScatterList make_scatter(const std::vector<int32_t>& tokens) {
  ScatterList list;
  list.source.resize(tokens.size());
  std::iota(list.source.begin(), list.source.end(), 0);
  std::stable_sort(list.source.begin(), list.source.end(), [&](int32_t x, int32_t y) { return tokens[x] < tokens[y]; });
  for (size_t i = 0; i < list.source.size(); ++i) {
    const int32_t token = tokens[list.source[i]];
    if (list.row_of.empty() || list.row_of.back() != token) {
      list.row_of.push_back(token);
      list.begin.push_back(static_cast<int32_t>(i));
    }
  }
  list.begin.push_back(static_cast<int32_t>(list.source.size()));
  return list;
}

// `dynamic` rope follows the row's largest position, blocks included.
std::vector<double> row_frequencies(const PlanInput& in, const BatchPlan& plan) {
  if (in.rope.type != "dynamic") return {};
  int64_t length = 0;
  for (const auto* positions : {&plan.context_position, &plan.block_position})
    for (const int32_t p : *positions) length = std::max<int64_t>(length, p + 1);
  if (length <= in.max_position) return {};
  return make_rope_table(in.rope, in.head_dim, in.max_position, length).inv_freq;
}

}  // namespace

int64_t supervised_prefix(std::span<const uint8_t> mask, const PackedDocument& document, int64_t anchor_row, int64_t block,
                          bool sample_from_anchor) {
  const int64_t first_label = anchor_row + 1, n = sample_from_anchor ? block : block - 1;
  int64_t k = 0;
  while (k < n && first_label + k < document.end && mask[first_label + k] != 0) ++k;
  return k;
}

PlanInput plan_input(const DrafterConfig& c) {
  PlanInput in;
  in.block = c.block, in.mask_token = c.mask_token, in.sample_from_anchor = c.sample_from_anchor;
  in.markov = c.rank > 0, in.markov_rnn = c.markov == Markov::rnn;
  in.train_embeddings = c.own_embeddings();
  in.rope = c.rope, in.head_dim = c.head_dim, in.max_position = c.max_position;
  return in;
}

BatchPlan make_batch_plan(const PlanInput& in) {
  constexpr int64_t kMostSlots = 1 << 24;  // their numbers, and those of what lies between them, are 32 bits
  const auto slots = static_cast<int64_t>(in.anchors.size()) * in.block;
  DS_REQUIRE(slots <= kMostSlots, "a row of {} blocks of {} slots: {} slots are more than {}; lower --anchors, --row-tokens or --block", in.anchors.size(), in.block, slots, kMostSlots);
  BatchPlan plan;
  plan.n_context = static_cast<int64_t>(in.tokens.size());
  plan.n_anchors = static_cast<int64_t>(in.anchors.size());
  plan.block = in.block;
  plan.context_position.assign(in.tokens.size(), 0);
  for (const auto& d : in.documents)
    for (int64_t t = d.begin; t < d.end; ++t) plan.context_position[t] = static_cast<int32_t>(t - d.begin);

  std::vector<int64_t> first_slot{0};
  std::vector<int32_t> target_source;  // per slot, the context row
  for (int64_t a = 0; a < plan.n_anchors; ++a) {
    const int64_t r = in.anchors[a];
    plan.anchor_row.push_back(static_cast<int32_t>(r));
    if (r < 0) {  // padding
      plan.doc_start.push_back(0);
      plan.block_token.insert(plan.block_token.end(), in.block, static_cast<int32_t>(in.mask_token));
      plan.block_position.insert(plan.block_position.end(), in.block, 0);
      if (in.markov_rnn) plan.block_previous.insert(plan.block_previous.end(), in.block, static_cast<int32_t>(in.mask_token));
      first_slot.push_back(plan.n_slots());
      continue;
    }
    const PackedDocument& doc = document_of(in.documents, r);
    plan.doc_start.push_back(static_cast<int32_t>(doc.begin));
    for (int64_t k = 0; k < in.block; ++k) {
      plan.block_token.push_back(k == 0 ? in.tokens[r] : static_cast<int32_t>(in.mask_token));
      plan.block_position.push_back(static_cast<int32_t>(r - doc.begin + k));
      const int64_t previous_row = in.sample_from_anchor ? r + k : std::max(r, r + k - 1);
      if (in.markov_rnn)
        plan.block_previous.push_back(previous_row < plan.n_context ? in.tokens[previous_row] : static_cast<int32_t>(in.mask_token));
    }
    const int64_t first = in.sample_from_anchor ? 0 : 1, n = supervised_prefix(in.mask, doc, r, in.block, in.sample_from_anchor);
    const int64_t before = plan.n_slots();
    for (int64_t k = first; k < in.block; ++k) {
      const int64_t i = k - first, label_row = r + i + 1;
      if (in.slots == SlotRule::label_prefix ? i >= n : r + k >= plan.n_context || in.mask[r + k] == 0) continue;
      plan.slot_row.push_back(static_cast<int32_t>(a * in.block + k));
      plan.slot_index.push_back(static_cast<int32_t>(k));
      plan.block_of.push_back(static_cast<int32_t>(a));
      target_source.push_back(static_cast<int32_t>(label_row - 1));
      const int32_t token = label_row < plan.n_context ? in.tokens[label_row] : -1;
      plan.label_token.push_back(token);
      plan.label.push_back(token < 0 || in.draft_id.empty() ? token : in.draft_id[token]);
      plan.previous_token.push_back(in.tokens[label_row - 1]);
      const double w = in.gamma > 0 ? std::exp(-static_cast<double>(i) / in.gamma) : 1.0;
      plan.weight.push_back(w);
      plan.weight_sum += w;
    }
    plan.supervised_blocks += plan.n_slots() > before ? 1 : 0;
    first_slot.push_back(plan.n_slots());
  }
  plan.target_source = target_source;
  std::sort(plan.target_source.begin(), plan.target_source.end());
  plan.target_source.erase(std::unique(plan.target_source.begin(), plan.target_source.end()), plan.target_source.end());
  for (int32_t row : target_source)
    plan.target_row.push_back(static_cast<int32_t>(
        std::lower_bound(plan.target_source.begin(), plan.target_source.end(), row) - plan.target_source.begin()));
  make_chunks(first_slot, in.chunk_slots, plan);
  if (in.markov) plan.markov = make_scatter(in.markov_rnn ? plan.block_previous : plan.previous_token);
  if (in.train_embeddings) plan.embed = make_scatter(plan.block_token);
  plan.inv_freq = row_frequencies(in, plan);
  return plan;
}

DeviceBatch upload_batch(Context& ctx, Arena& arena, const BatchPlan& plan, Queue queue, std::vector<int32_t>& lists) {
  DeviceBatch b;
  b.n_anchors = plan.n_anchors;
  b.block = plan.block;
  const std::pair<const std::vector<int32_t>*, Tensor*> all[] = {
      {&plan.context_position, &b.context_position}, {&plan.block_token, &b.block_token}, {&plan.block_position, &b.block_position},
      {&plan.anchor_row, &b.anchor_row}, {&plan.doc_start, &b.doc_start}, {&plan.slot_row, &b.slot_row},
      {&plan.block_of, &b.block_of}, {&plan.target_row, &b.target_row}, {&plan.label, &b.label},
      {&plan.previous_token, &b.previous_token}, {&plan.block_previous, &b.block_previous}, {&plan.target_source, &b.target_source},
      {&plan.markov.row_of, &b.markov.row_of}, {&plan.markov.begin, &b.markov.begin}, {&plan.markov.source, &b.markov.source},
      {&plan.embed.row_of, &b.embed.row_of}, {&plan.embed.begin, &b.embed.begin}, {&plan.embed.source, &b.embed.source}};
  constexpr size_t kAligned = 64 / sizeof(int32_t);
  lists.clear();
  for (const auto& [list, tensor] : all) {
    lists.insert(lists.end(), list->begin(), list->end());
    lists.resize((lists.size() + kAligned - 1) / kAligned * kAligned);
  }
  const auto n_all = static_cast<int64_t>(lists.size());
  const Tensor whole = arena.vector(DType::i32, n_all);
  if (n_all > 0) ctx.device().upload(queue, whole, {lists.data(), DType::i32, 1, n_all, n_all});
  int64_t at = 0;
  for (const auto& [list, tensor] : all) {
    const auto n = static_cast<int64_t>(list->size());
    *tensor = whole.col_range(at, n);
    at += (n + static_cast<int64_t>(kAligned) - 1) / static_cast<int64_t>(kAligned) * static_cast<int64_t>(kAligned);
  }
  if (const auto n = static_cast<int64_t>(plan.inv_freq.size()); n > 0) {
    b.inv_freq = arena.vector(ctx.acc_dtype(), n);
    ctx.device().upload(queue, b.inv_freq, {plan.inv_freq.data(), DType::f64, 1, n, n});
  }
  const int64_t s = plan.n_slots();
  b.weight = arena.vector(ctx.acc_dtype(), s);
  if (s > 0) ctx.device().upload(queue, b.weight, {plan.weight.data(), DType::f64, 1, s, s});
  return b;
}

}  // namespace dspark::model
