// Cases of vocab_loss: every term alone and together, with chunks, a pruned gradient of the head, all shapes of the
// confidence head.
#include "op_table.h"

namespace dspark::test {

using namespace model;

namespace {

struct LossCase {
  std::string name;
  int64_t slots = 0, rows = 0, hidden = 0, rank = 0, target_width = 0, vocab = 0;
  std::vector<LossChunk> chunks;
  std::vector<int64_t> target_row, label;
  std::array<double, kNumTerms> coef{};
  enum Conf { none, hidden_only, with_markov, own_e } conf = none;
  bool detach = false, backward = true;
  int64_t head_grad_cols = -1;  // -1: all, 0: frozen
  Write write = Write::overwrite;
  double sharpness = 1, draft_sharpness = 1;
  bool label_from_target = false, dpace_confidence = false;
  double dpace_alpha = 0;
};

std::vector<double> ramp(int64_t n, double first, double step) {
  std::vector<double> v;
  for (int64_t i = 0; i < n; ++i) v.push_back(first + step * static_cast<double>(i));
  return v;
}

void loss_all(OpRun& run, const LossCase& c) {
  const int64_t cols = c.hidden + c.rank;
  VocabLoss a;
  a.joint = run.input("joint", Kind::act, c.slots, cols);
  a.head = run.weight("head", c.vocab, cols, c.draft_sharpness * 1.5 / std::sqrt(static_cast<double>(cols)));
  a.target_state = run.input("target_state", Kind::act, c.rows, c.target_width);
  a.target_head = run.weight("target_head", c.vocab, c.target_width,
                             c.sharpness * 1.5 / std::sqrt(static_cast<double>(c.target_width)), false);
  a.target_row = run.ints("target_row", c.target_row);
  a.label = run.ints("label", c.label);
  const std::vector<double> weight = ramp(c.slots, 1.0, -0.0625), conf_weight = ramp(c.slots, 0.5, 0.0625),
                            scale = ramp(kNumTerms, 0.25, 0.125);
  a.weight = run.given("weight", Kind::acc, 1, c.slots, weight);
  a.conf_weight = run.given("conf_weight", Kind::acc, 1, c.slots, conf_weight);
  a.scale = run.given("scale", Kind::acc, 1, kNumTerms, scale);
  a.coef = c.coef;
  a.hidden_cols = c.hidden;
  a.detach_confidence = c.detach;
  a.label_from_target = c.label_from_target;
  a.dpace_alpha = c.dpace_alpha;
  a.dpace_confidence = c.dpace_confidence;
  std::vector<int64_t> block_of;
  for (int64_t s = 0; s < c.slots; ++s) block_of.push_back(s / 3);
  if (c.dpace_alpha > 0) a.block_of = run.ints("block_of", block_of);
  a.chunks = c.chunks;
  a.backward = c.backward;
  a.write_dw = c.write;
  a.slot_out = run.output("slot_out", Kind::acc, c.slots, kSlotOutCols);
  const char* const columns[kSlotOutCols] = {"ce",        "tv",   "kl",     "rkl",        "jsd",       "nla",
                                             "lk_hybrid", "conf", "accept", "conf_logit", "draft_top", "target_top", "weight_used",
                                             "conf_weight_used"};
  for (int64_t j = 0; j < kSlotOutCols; ++j) run.watch("slot_out", columns[j], j, 1, j == kDraftTop || j == kTargetTop);
  const int64_t conf_cols = c.conf == LossCase::none ? 0 : c.conf == LossCase::hidden_only ? c.hidden : cols;
  if (c.conf != LossCase::none) {
    a.conf_w = run.input("conf_w", Kind::acc, 1, conf_cols, 0.25);
    a.conf_b = run.input("conf_b", Kind::acc, 1, 1);
    if (c.conf == LossCase::with_markov) a.conf_e = a.joint.col_range(c.hidden, c.rank);
    if (c.conf == LossCase::own_e) a.conf_e = run.input("conf_e", Kind::act, c.slots, c.rank);
  }
  if (c.backward) {
    a.d_joint = run.output("d_joint", Kind::acc, c.slots, cols);
    const int64_t grad_cols = c.head_grad_cols < 0 ? cols : c.head_grad_cols;
    if (grad_cols > 0) a.d_head = run.written("d_head", Kind::acc, c.vocab, grad_cols, c.write);
    if (c.conf != LossCase::none) {
      a.d_conf_w = run.written("d_conf_w", Kind::acc, 1, conf_cols, c.write);
      a.d_conf_b = run.written("d_conf_b", Kind::acc, 1, 1, c.write);
      if (c.conf == LossCase::with_markov) a.d_conf_e = a.d_joint.col_range(c.hidden, c.rank);
      if (c.conf == LossCase::own_e) a.d_conf_e = run.inout("d_conf_e", Kind::acc, c.slots, c.rank);
    }
  }
  int64_t max_slots = 0, max_rows = 0;
  for (const LossChunk& k : c.chunks) {
    max_slots = std::max(max_slots, k.slots);
    max_rows = std::max(max_rows, k.rows);
  }
  a.work = run.work_bytes(vocab_loss_work(run.ctx(), max_slots, max_rows, c.vocab, cols));
  vocab_loss(run.ctx(), a);

  // The weights that were used: D-PACE's come out of the forward.
  Array by_slot_out(c.slots, kSlotOutCols), used(c.slots, 2);
  if (c.slots > 0) run.ctx().download_now({used.values.data(), DType::f64, c.slots, 2, 2}, a.slot_out.col_range(kWeight, 2));
  for (int64_t s = 0; s < c.slots; ++s)
    for (size_t t = 0; t < kNumTerms; ++t) by_slot_out(s, static_cast<int64_t>(t)) = c.coef[t] * scale[t] * used(s, t == kConf ? 1 : 0);
  if (c.backward) run.cotangent_values("slot_out", by_slot_out);
}

// Slots 0..n-1 over `rows` target rows, in chunks of `chunk` slots; every third label is -1.
LossCase evenly(std::string name, int64_t slots, int64_t rows, int64_t chunk, int64_t vocab) {
  LossCase c;
  c.name = std::move(name);
  c.slots = slots;
  c.rows = rows;
  c.vocab = vocab;
  c.hidden = 9;
  c.rank = 4;
  c.target_width = 11;
  for (int64_t s = 0; s < slots; ++s) {
    c.target_row.push_back(s * rows / slots);
    c.label.push_back(s % 3 == 2 ? -1 : (s * 7 + 3) % vocab);
  }
  for (int64_t s = 0; s < slots; s += chunk) {
    const int64_t n = std::min(chunk, slots - s), first = c.target_row[static_cast<size_t>(s)];
    c.chunks.push_back({s, n, first, c.target_row[static_cast<size_t>(s + n - 1)] - first + 1});
  }
  return c;
}

// The rows of slot_out do not depend on the slots around them.
void loss_rows(OpRun& run) {
  const int64_t n = 7, cols = 21, vocab = 67;
  VocabLoss a;
  a.joint = run.row_input("joint", Kind::act, n, 1, cols);
  a.head = run.weight("head", vocab, cols, 0.4);
  a.target_state = run.input("target_state", Kind::act, 4, 13);
  a.target_head = run.weight("target_head", vocab, 13, 0.4, false);
  a.target_row = run.ints("target_row", run.slice(std::vector<int64_t>{0, 1, 1, 2, 3, 2, 3}));
  a.label = run.ints("label", run.slice(std::vector<int64_t>{5, 66, -1, 0, 9, 31, 32}));
  a.weight = run.given("weight", Kind::acc, 1, run.units(n), run.slice(ramp(n, 1, -0.125)));
  a.conf_weight = run.given("conf_weight", Kind::acc, 1, run.units(n), run.slice(ramp(n, 1, -0.125)));
  a.scale = run.given("scale", Kind::acc, 1, kNumTerms, ramp(kNumTerms, 1, 0.5));
  a.coef = {0.1, 1.8, 0.5, 0.25, 0.25, 0.5, 0.5, 0};
  a.hidden_cols = cols;
  const LossChunk whole{0, run.units(n), 0, 4};
  a.chunks = {&whole, 1};
  a.slot_out = run.row_output("slot_out", Kind::acc, n, 1, kSlotOutCols);
  a.d_joint = run.row_output("d_joint", Kind::acc, n, 1, cols);
  a.work = run.work_bytes(vocab_loss_work(run.ctx(), run.units(n), 4, vocab, cols));
  vocab_loss(run.ctx(), a);
  Array by_slot_out(run.units(n), kSlotOutCols);
  for (int64_t i = 0; i < by_slot_out.rows; ++i)
    for (size_t t = 0; t < kNumTerms; ++t)
      by_slot_out(i, static_cast<int64_t>(t)) =
          a.coef[t] * (1 + 0.5 * static_cast<double>(t)) * (1 - 0.125 * static_cast<double>(run.first_unit() + i));
  run.cotangent_values("slot_out", by_slot_out);
}

}  // namespace

void add_loss_cases(OpCases& cases) {
  std::vector<LossCase> list;
  const char* const names[] = {"ce", "tv", "kl", "rkl", "jsd", "nla", "lk_hybrid"};
  for (size_t t = 0; t < kConf; ++t) {
    LossCase c = evenly(fmt::format("{} alone", names[t]), 5, 3, 3, 19);
    c.coef[t] = 0.75;
    list.push_back(c);
  }
  LossCase deepspec = evenly("deepspec terms, several chunks", 23, 9, 7, 67);
  deepspec.coef = {0.1, 1.8, 0, 0, 0, 0, 0, 1.0};
  deepspec.conf = LossCase::with_markov;
  list.push_back(deepspec);
  LossCase c = deepspec;
  c.name = "deepspec terms, one chunk";
  c.chunks = {{0, 23, 0, 9}};
  list.push_back(c);
  c = deepspec;
  c.name = "confidence detached, gradients added";
  c.detach = true;
  c.write = Write::add;
  list.push_back(c);
  c = deepspec;
  c.name = "confidence on hidden alone, only markov_w2 trained";
  c.conf = LossCase::hidden_only;
  c.head_grad_cols = 4;
  list.push_back(c);
  c = deepspec;
  c.name = "confidence with features of its own, frozen head";
  c.conf = LossCase::own_e;
  c.head_grad_cols = 0;
  list.push_back(c);
  c = deepspec;
  c.name = "validation: no gradient";
  c.backward = false;
  list.push_back(c);
  c = evenly("every term at once, one over a tile", 33, 17, 33, 129);
  c.coef = {0.1, 1.8, 0.5, 0.25, 0.75, 0.5, 0.25, 1.0};
  c.conf = LossCase::with_markov;
  list.push_back(c);
  c = evenly("labels are the target's arg-max", 9, 5, 6, 67);
  c.coef = {0.5, 0, 1, 0, 0, 0, 0, 1.0};
  c.conf = LossCase::with_markov;
  c.label_from_target = true;
  list.push_back(c);
  c.name = "D-PACE, confidence with the given weights";
  c.coef = {1, 0, 0, 0, 0, 0, 0, 1.0};
  c.dpace_alpha = 0.5;
  list.push_back(c);
  c.name = "D-PACE of the data's labels, confidence with its own";
  c.label_from_target = false;
  c.dpace_alpha = 0.3;
  c.dpace_confidence = true;
  list.push_back(c);
  c = evenly("rank 0 (DFlash)", 6, 6, 4, 33);
  c.hidden = 17;
  c.rank = 0;
  c.coef[kCe] = 1;
  list.push_back(c);
  c = evenly("little acceptance: nla divides by it", 4, 2, 4, 31);
  c.sharpness = 60;
  c.coef[kNla] = 1;
  c.coef[kCe] = 0.5;
  list.push_back(c);
  c.name = "no acceptance: nla at its floor";
  c.draft_sharpness = 30;
  list.push_back(c);
  c = evenly("one slot, vocabulary of one", 1, 1, 1, 1);
  c.coef = {1, 1, 1, 0, 0, 0, 0, 0};
  list.push_back(c);
  c = evenly("a slot and a target row outside every chunk", 6, 3, 6, 19);
  c.chunks = {{0, 3, 0, 2}, {4, 2, 2, 1}};
  c.coef = {0.1, 1.8, 0, 0, 0, 0, 0, 0};
  list.push_back(c);
  c = LossCase{};
  c.name = "no slot: weight gradients are zero";
  c.hidden = 5;
  c.rank = 3;
  c.target_width = 7;
  c.vocab = 13;
  c.coef = {1, 1, 0, 0, 0, 0, 0, 1};
  c.conf = LossCase::with_markov;
  list.push_back(c);
  for (const LossCase& l : list) cases.push_back({"vocab_loss", l.name, [=](OpRun& run) { loss_all(run, l); }});
  cases.push_back({"vocab_loss", "rows", loss_rows, 7});
}

}  // namespace dspark::test
