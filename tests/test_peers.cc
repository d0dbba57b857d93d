// Our side of `make test-peers` (tests/peers/check.py), hidden by default. The script runs one of the two cases here with
// DSPARK_PEERS naming a folder. [peers-store]: what a trainer reads from a store, copied out:
//   case.json           store (path)
//   out.safetensors     lengths [N], tokens and mask [T], states [T, L+1, E] of all samples, taps [L]
// [peers-drafter]: a packed drafter on inputs that the script chose:
//   case.json           drafter, target (paths); the objective, as in the training fixtures
//   in.safetensors      one packed row, as in the training fixtures of speculators (tests/golden/train/spk_*)
//   out.safetensors     one row a supervised slot: slot (anchor * B + k), logits and targets [S, VD], label, the loss head's
//                       results; loss [1], tau [1]
#include <catch2/catch.hpp>

#include <cstdlib>
#include <nlohmann/json.hpp>

#include "formats/store.h"
#include "golden_train.h"

using namespace dspark;
using namespace dspark::golden;
using namespace dspark::model;

namespace {

fs::path peers_folder() {
  const char* named = std::getenv("DSPARK_PEERS");
  if (named == nullptr) FAIL("DSPARK_PEERS names no folder; `make test-peers` sets it");
  return named;
}

template <typename T>
formats::TensorView view(const std::string& name, DType dtype, std::vector<int64_t> shape, const std::vector<T>& values) {
  return {name, dtype, std::move(shape), std::as_bytes(std::span<const T>(values))};
}

// Whole rows of logits [S, VD] of the drafter and of the target, after a step: the loss head never keeps them.
struct Rows {
  std::vector<float> logits, targets;
};
Rows whole_rows(Harness& h, const PackedCase& p) {
  const DrafterConfig& c = h.config;
  const BatchPlan& plan = p.batch.plan;
  Context& ctx = h.backend->context();
  const int64_t n = plan.n_slots();
  Arena arena(ctx.device(), int64_t{512} << 20);
  const Tensor rows = arena.matrix(ctx.acc_dtype(), n, c.draft_vocab);
  auto download = [&] {
    std::vector<float> v(static_cast<size_t>(rows.size()));
    ctx.download_now({v.data(), DType::f32, rows.rows, rows.cols, rows.cols}, rows);
    return v;
  };
  Rows out;
  std::vector<int32_t> lists;
  const DeviceBatch b = upload_batch(ctx, arena, plan, Queue::compute, lists);
  const Tensor joint = arena.matrix(ctx.act_dtype(), n, c.joint_cols());
  gather_rows(ctx, {joint.col_range(0, c.hidden), h.step->state().hidden, b.slot_row});
  MarkovSaved saved;
  if (c.rank > 0) h.drafter->markov_forward(arena, h.step->state().hidden, b, joint.col_range(c.hidden, c.rank), saved);
  linear(ctx, {rows, joint, &h.drafter->head});
  out.logits = download();

  std::vector<double> last;
  for (int32_t row : plan.target_row) {
    const auto at = p.last.begin() + plan.target_source[static_cast<size_t>(row)] * c.target_hidden;
    last.insert(last.end(), at, at + c.target_hidden);
  }
  const Tensor raw = arena.matrix(ctx.acc_dtype(), n, c.target_hidden), state = arena.matrix(ctx.act_dtype(), n, c.target_hidden);
  ctx.upload_now(raw, {last.data(), DType::f64, n, c.target_hidden, c.target_hidden});
  add_rmsnorm(ctx, {.y = state, .x = raw, .weight = h.target.norm, .eps = h.target.eps});
  linear(ctx, {rows, state, &h.target.head});
  out.targets = download();
  return out;
}

}  // namespace

TEST_CASE("the samples of a store for tests/peers/check.py", "[.peers-store]") {
  const fs::path folder = peers_folder();
  const auto store = formats::open_store(read_json(folder / "case.json").at("store").get<std::string>());
  REQUIRE(store->problems().empty());
  REQUIRE(store->identity().last_state == formats::LastState::pre_norm);
  std::vector<int64_t> lengths;
  std::vector<int32_t> tokens, taps(store->identity().taps.begin(), store->identity().taps.end());
  std::vector<uint8_t> mask;
  std::vector<bf16> states;
  for (int64_t i = 0; i < store->size(); ++i) {
    const formats::SampleTokens t = store->tokens(i);
    lengths.push_back(static_cast<int64_t>(t.token_ids.size()));
    tokens.insert(tokens.end(), t.token_ids.begin(), t.token_ids.end());
    mask.insert(mask.end(), t.loss_mask.begin(), t.loss_mask.end());
    const size_t begin = states.size();
    states.resize(begin + t.token_ids.size() * static_cast<size_t>(store->row_width()));
    store->read_states(i, states.data() + begin, store->row_width());
  }
  const auto n = static_cast<int64_t>(tokens.size());
  formats::write_safetensors(folder / "out.safetensors",
                             {view("lengths", DType::i64, {store->size()}, lengths), view("tokens", DType::i32, {n}, tokens),
                              view("mask", DType::u8, {n}, mask), view("taps", DType::i32, {static_cast<int64_t>(taps.size())}, taps),
                              view("states", DType::bf16, {n, store->identity().n_parts(), store->identity().hidden_size}, states)});
}

TEST_CASE("logits and slot terms of a packed drafter for tests/peers/check.py", "[.peers-drafter]") {
  const fs::path folder = peers_folder();
  const Json d = read_json(folder / "case.json");
  const DrafterFiles files = read_drafter(d.at("drafter").get<std::string>());
  const target::TargetFiles target(d.at("target").get<std::string>());
  BackendOptions options;
  options.device = "cpu", options.precision = Precision::fp32;
  Harness h(options, files, target, objective(d));

  std::vector<int32_t> draft_id;
  if (!files.kept.empty()) draft_id.assign(static_cast<size_t>(h.config.vocab), -1);
  for (size_t i = 0; i < files.kept.size(); ++i) draft_id[static_cast<size_t>(files.kept[i])] = static_cast<int32_t>(i);
  const formats::SafetensorsFile file(folder / "in.safetensors");
  const auto p = pack_case(file, "in.", h.config, h.objective, 0, 0, draft_id);
  const BatchPlan& plan = p->batch.plan;
  std::vector<double> slot_out;
  const train::StepMetrics m = h.step->run(p->batch, false, Write::overwrite, &slot_out);
  const Rows rows = whole_rows(h, *p);

  const int64_t n = plan.n_slots();
  const std::vector<int64_t> slot(plan.slot_row.begin(), plan.slot_row.end());
  const std::vector<double> loss{m.loss(h.objective)}, tau{m.tau()};
  std::vector<formats::TensorView> out{view("slot", DType::i64, {n}, slot), view("label", DType::i32, {n}, plan.label),
                                       view("logits", DType::f32, {n, h.config.draft_vocab}, rows.logits),
                                       view("targets", DType::f32, {n, h.config.draft_vocab}, rows.targets),
                                       view("loss", DType::f64, {1}, loss), view("tau", DType::f64, {1}, tau)};
  const char* names[] = {"ce", "tv", "kl_div", "rkl", "jsd", "nla", "lk_hybrid", "conf",
                         "accept", "confidence", "draft_top", "target_top", "weight", "conf_weight"};
  static_assert(std::size(names) == kSlotOutCols);
  std::vector<std::vector<double>> columns(kSlotOutCols);
  for (size_t c = 0; c < columns.size(); ++c) {
    for (size_t s = 0; s < slot.size(); ++s) columns[c].push_back(slot_out[s * kSlotOutCols + c]);
    out.push_back(view(names[c], DType::f64, {n}, columns[c]));
  }
  formats::write_safetensors(folder / "out.safetensors", out);
}
