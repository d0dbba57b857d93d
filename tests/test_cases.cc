// Faults that people reported against other trainers, in what is trained: each on the input of the report where it gives one, and
// the rule that keeps its whole kind out. What files must keep is in test_cases_files.cc.
#include <catch2/catch.hpp>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>

#include "core/error.h"
#include "core/rng.h"
#include "model/batch_plan.h"
#include "scratch.h"
#include "target_run.h"
#include "tiny_target.h"
#include "train/anchors.h"
#include "train/data.h"
#include "train/init.h"

using namespace dspark;
using namespace dspark::model;

namespace {

// Which slots of each anchor are supervised, [A][B].
std::vector<std::vector<int>> slot_masks(const BatchPlan& plan) {
  std::vector<std::vector<int>> out(static_cast<size_t>(plan.n_anchors), std::vector<int>(static_cast<size_t>(plan.block), 0));
  for (size_t s = 0; s < plan.slot_row.size(); ++s) out[static_cast<size_t>(plan.block_of[s])][static_cast<size_t>(plan.slot_index[s])] = 1;
  return out;
}

// One packed row whose token at row t is 100 + t.
struct Row {
  std::vector<int32_t> tokens, anchors;
  std::vector<uint8_t> mask;
  std::vector<PackedDocument> documents;
  Row(std::vector<uint8_t> m, std::vector<PackedDocument> d, std::vector<int32_t> a) : anchors(std::move(a)), mask(std::move(m)), documents(std::move(d)) {
    tokens.resize(mask.size());
    std::iota(tokens.begin(), tokens.end(), 100);
  }
  BatchPlan plan(int64_t block, SlotRule rule = SlotRule::label_prefix, bool from_anchor = true) const {
    PlanInput in;
    in.tokens = tokens, in.mask = mask, in.documents = documents, in.anchors = anchors;
    in.block = block, in.mask_token = 7, in.slots = rule, in.sample_from_anchor = from_anchor;
    return make_batch_plan(in);
  }
};

std::vector<uint8_t> ones(int64_t n) { return std::vector<uint8_t>(static_cast<size_t>(n), 1); }
std::vector<uint8_t> ones(int64_t n, int64_t begin, int64_t end) {
  std::vector<uint8_t> m(static_cast<size_t>(n), 0);
  std::fill(m.begin() + begin, m.begin() + end, 1);
  return m;
}

// A random mask of spans and documents of random lengths, with every candidate as an anchor.
Row random_row(uint64_t seed) {
  const Rng rng(seed, RngStream::test);
  uint64_t draws = 0;
  std::vector<uint8_t> mask;
  std::vector<PackedDocument> documents;
  std::vector<int32_t> anchors;
  for (int d = 0; d < 4; ++d) {
    const auto begin = static_cast<int64_t>(mask.size());
    const auto n = static_cast<int64_t>(1 + rng.below(draws++, 30));
    std::vector<uint8_t> own;
    while (static_cast<int64_t>(own.size()) < n) {
      const auto length = static_cast<size_t>(1 + rng.below(draws++, 6));
      own.insert(own.end(), length, static_cast<uint8_t>(rng.below(draws++, 3) > 0));
    }
    own.resize(static_cast<size_t>(n));
    for (const int32_t p : train::anchor_candidates(own)) anchors.push_back(static_cast<int32_t>(begin) + p);
    mask.insert(mask.end(), own.begin(), own.end());
    documents.push_back({begin, begin + n});
  }
  return {mask, documents, anchors};
}

}  // namespace

// speculators#865: slot k took mask[p + k] while its label is token p + k + 1: the token after the turn's end was trained on.
TEST_CASE("a slot is supervised by the mask at its label", "[cases]") {
  const Row row(ones(64, 8, 40), {{0, 64}}, {37});
  CHECK(slot_masks(row.plan(4)) == std::vector<std::vector<int>>{{1, 1, 0, 0}});
  CHECK(row.plan(4).label_token == std::vector<int32_t>{138, 139});
  // --slots row-mask is speculators' rule, to be comparable with it.
  CHECK(slot_masks(row.plan(4, SlotRule::row_mask)) == std::vector<std::vector<int>>{{1, 1, 1, 0}});
  // The bonus layout: slot 0 proposes nothing, slot k predicts token p + k.
  CHECK(slot_masks(row.plan(4, SlotRule::label_prefix, false)) == std::vector<std::vector<int>>{{0, 1, 1, 0}});
  CHECK(row.plan(4, SlotRule::label_prefix, false).label_token == std::vector<int32_t>{138, 139});
}

// speculators#901: only the last B of the *row* were no anchors, so blocks ran into the next packed document.
TEST_CASE("a block ends with its document", "[cases]") {
  for (const int32_t before : {1, 2, 3, 8, 9}) {
    const int32_t anchor = 20 - before;
    const Row row(ones(40), {{0, 20}, {20, 40}}, {anchor});
    const BatchPlan plan = row.plan(8);
    INFO("anchor " << before << " tokens before the boundary");
    CHECK(plan.n_slots() == std::min(8, before - 1));
    for (const int32_t token : plan.label_token) CHECK(token < 120);
    for (const int32_t r : plan.target_source) CHECK(r < 19);
    for (const int32_t token : plan.previous_token) CHECK(token < 119);
    CHECK(plan.doc_start == std::vector<int32_t>{0});
    // speculators' rule reaches over: with --slots row-mask only.
    CHECK(row.plan(8, SlotRule::row_mask).n_slots() == 8);
  }
  const Row second(ones(40), {{0, 20}, {20, 40}}, {20});
  CHECK(second.plan(8).doc_start == std::vector<int32_t>{20});
  CHECK(second.plan(8).block_position.front() == 0);
}

// TorchSpec#129: the first token of a span at index 0, and how a rule drifts from DeepSpec's mask[p] & mask[p + 1].
TEST_CASE("a span at the first token has its anchors", "[cases]") {
  CHECK(train::anchor_candidates(ones(6, 0, 4)) == std::vector<int32_t>{0, 1, 2});
  CHECK(train::anchor_candidates(ones(2)) == std::vector<int32_t>{0});
  CHECK(train::anchor_candidates(ones(1)).empty());
  CHECK(train::anchor_candidates(std::vector<uint8_t>{}).empty());
  CHECK(train::anchor_candidates(std::vector<uint8_t>{1, 0, 1, 1, 0, 1}) == std::vector<int32_t>{2});
  const BatchPlan plan = Row(ones(6, 0, 4), {{0, 6}}, {0, 1, 2}).plan(4);
  CHECK(slot_masks(plan) == std::vector<std::vector<int>>{{1, 1, 1, 0}, {1, 1, 0, 0}, {1, 0, 0, 0}});
  CHECK(plan.block_position[0] == 0);
  // The anchor at row 0 sees no context at all, and its first target is the state of its own token.
  CHECK(plan.target_source.front() == 0);
}

// SpecForge#885: ids were shifted and the mask was not, so that the first tokens of an answer were never supervised. The target
// itself gives an answer's first token; every token after it is a label, of one slot at each distance.
TEST_CASE("labels, mask, Markov input and target state move together", "[cases]") {
  const BatchPlan plan = Row(ones(64, 8, 40), {{0, 64}}, train::anchor_candidates(ones(64, 8, 40))).plan(4);
  std::vector<int32_t> first;  // labels of slot 0, in order
  for (size_t s = 0; s < plan.label_token.size(); ++s)
    if (plan.slot_index[s] == 0) first.push_back(plan.label_token[s] - 100);
  std::vector<int32_t> wanted(31);
  std::iota(wanted.begin(), wanted.end(), 9);
  CHECK(first == wanted);

  for (uint64_t seed = 0; seed < 200; ++seed) {
    const Row row = random_row(seed);
    for (const bool from_anchor : {true, false}) {
      const BatchPlan p = row.plan(5, SlotRule::label_prefix, from_anchor);
      std::set<std::pair<int32_t, int32_t>> seen;
      for (size_t s = 0; s < p.label_token.size(); ++s) {
        const int64_t anchor = row.anchors[static_cast<size_t>(p.block_of[s])], label = anchor + p.slot_index[s] + (from_anchor ? 1 : 0);
        REQUIRE(p.label_token[s] == 100 + label);
        REQUIRE(row.mask[static_cast<size_t>(label)] == 1);
        REQUIRE(p.previous_token[s] == 100 + label - 1);
        REQUIRE(p.target_source[static_cast<size_t>(p.target_row[s])] == label - 1);
        const auto document = std::find_if(row.documents.begin(), row.documents.end(), [&](const PackedDocument& d) { return anchor < d.end; });
        REQUIRE(label < document->end);
        REQUIRE(p.doc_start[static_cast<size_t>(p.block_of[s])] == document->begin);
        seen.insert({p.label_token[s], p.slot_index[s]});
      }
      REQUIRE(seen.size() == p.label_token.size());
      // Every masked token behind a masked one of its document is the first label of some block.
      for (const auto& d : row.documents)
        for (int64_t t = d.begin + 1; t < d.end; ++t) {
          const bool supervised = seen.count({static_cast<int32_t>(100 + t), from_anchor ? 0 : 1}) == 1;
          REQUIRE(supervised == (row.mask[static_cast<size_t>(t - 1)] == 1 && row.mask[static_cast<size_t>(t)] == 1));
        }
    }
  }
}

// TorchSpec#169: the last hidden state before the final norm was taken for the one after it. Both kinds of store give the same
// targets, and these are the target's own.
TEST_CASE("states before and after the final norm give the target's own distribution", "[cases]") {
  const Scratch scratch;
  const fs::path path = scratch.folder / "tiny.gguf";
  write_tiny_target(path, {.seed = 3});
  test::LoadedTarget loaded(path, Precision::fp32, 1);
  const auto& t = loaded.config();
  const Rng rng(4, RngStream::test);
  std::vector<int32_t> ids;
  for (uint64_t i = 0; i < 40; ++i) ids.push_back(static_cast<int32_t>(rng.below(i, static_cast<uint64_t>(t.vocab))));
  const auto said = test::run_target(loaded, ids, {1, 3});
  const auto n = static_cast<int64_t>(ids.size());

  train::NewDrafter choice;
  choice.layers = 1, choice.block = 4, choice.rank = 0, choice.confidence = false;
  const DrafterConfig config = train::drafter_config_for(loaded.files, choice, {{1}, {3}}, 0);
  const auto backend = make_backend({.device = "ref", .precision = Precision::fp64});
  Context& ctx = backend->context();
  Drafter drafter(ctx, config, DrafterOptions{.trainable = false});
  const TensorValues from_target = train::target_values(loaded.files, {});
  for (Parameter& p : drafter.parameters()) {
    std::vector<float> v(static_cast<size_t>(p.value.size()));
    for (size_t i = 0; i < v.size(); ++i) v[i] = static_cast<float>(p.is_vector ? 1.0 : 0.1 * rng.normal(i));
    if (p.name == "embed_tokens.weight" || p.name == "lm_head.weight") v = from_target(p.name);
    drafter.set(p, {v.data(), DType::f32, p.value.rows, p.value.cols, p.value.cols});
  }
  drafter.refresh();
  train::TargetHead target;
  const auto head = from_target("lm_head.weight"), norm = loaded.files.tensor("model.norm.weight");
  target.head.value = ctx.allocate(ctx.act_dtype(), t.vocab, t.hidden);
  ctx.upload_now(target.head.value, {head.data(), DType::f32, t.vocab, t.hidden, t.hidden});
  refresh(ctx, {&target.head});
  target.norm = ctx.allocate(ctx.acc_dtype(), 1, t.hidden);
  ctx.upload_now(target.norm, {norm.data(), DType::f32, 1, t.hidden, t.hidden});
  target.eps = t.eps;

  const int64_t width = 3 * t.hidden;
  std::vector<double> before, after;  // [T, E]
  for (int64_t r = 0; r < n; ++r) {
    const float* h = said.states.data() + r * width + 2 * t.hidden;
    double square = 0;
    for (int64_t i = 0; i < t.hidden; ++i) square += static_cast<double>(h[i]) * static_cast<double>(h[i]) / static_cast<double>(t.hidden);
    for (int64_t i = 0; i < t.hidden; ++i) {
      before.push_back(h[i]);
      after.push_back(h[i] / std::sqrt(square + t.eps) * static_cast<double>(norm[static_cast<size_t>(i)]));
    }
  }
  std::vector<int32_t> anchors;
  for (int32_t a = 0; a + 1 < n; a += 3) anchors.push_back(a);
  const std::vector<uint8_t> mask = ones(n);
  const std::vector<PackedDocument> documents{{0, n}};
  PlanInput in = plan_input(config);
  in.tokens = ids, in.mask = mask, in.documents = documents, in.anchors = anchors;
  train::MicroBatch batch;
  batch.plan = make_batch_plan(in);
  batch.taps = {said.states.data(), DType::f32, n, 2 * t.hidden, width};
  const auto slots_with = [&](const std::vector<double>& last, bool apply_norm) {
    target.apply_norm = apply_norm;
    batch.last = {last.data(), DType::f64, n, t.hidden, t.hidden};
    train::TrainStep step(ctx, drafter, target, train::deepspec_objective(false), {int64_t{64} << 20, int64_t{64} << 20, 1 << 20});
    std::vector<double> slots;
    step.run(batch, false, Write::overwrite, &slots);
    return slots;
  };
  const auto pre = slots_with(before, true), post = slots_with(after, false), wrong = slots_with(before, false);
  REQUIRE(pre.size() == post.size());
  double difference = 0, fault = 0;
  for (size_t i = 0; i < pre.size(); ++i) {
    difference = std::max(difference, std::abs(pre[i] - post[i]));
    fault = std::max(fault, i % kSlotOutCols == kTv ? std::abs(pre[i] - wrong[i]) : 0.0);
  }
  CHECK(difference < 1e-11);
  CHECK(fault > 1e-3);
  for (int64_t s = 0; s < batch.plan.n_slots(); ++s) {
    const int64_t row = batch.plan.target_source[static_cast<size_t>(batch.plan.target_row[static_cast<size_t>(s)])];
    const float* logits = said.logits.data() + row * t.vocab;
    CHECK(post[static_cast<size_t>(s * kSlotOutCols + kTargetTop)] == static_cast<double>(std::max_element(logits, logits + t.vocab) - logits));
  }
  ctx.free(target.head.value);
  ctx.free(target.norm);
}
