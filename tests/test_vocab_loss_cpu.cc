// The cpu backend's vocabulary loss against the scalar reference, term by term, at vocabularies around its block and
// vector sizes, with target rows shared by slots, unkept labels and chunks that are cut differently.
#include <catch2/catch.hpp>

#include <cmath>
#include <vector>

#include "model/backends.h"

using namespace dspark;
using namespace dspark::model;

namespace {

struct Setting {
  int64_t vocab, slots, rows, hidden, rank;
  std::array<double, kNumTerms> coef;
  bool detach = false;
  std::vector<LossChunk> chunks;
};

struct Results {
  std::vector<double> slot_out, d_joint, d_head, d_conf_w, d_conf_b;
};

Results run(const BackendOptions& options, const Setting& s, bool add = false) {
  const auto backend = options.device == "ref" ? make_ref_backend(options) : make_cpu_backend(options);
  Context& ctx = backend->context();
  uint32_t state = 12345;
  const auto random = [&](DType dtype, int64_t rows, int64_t cols, float size) {
    std::vector<float> v(static_cast<size_t>(rows * cols));
    for (float& x : v) {
      state = state * 1664525u + 1013904223u;
      x = to_float(to_bf16(size * (static_cast<float>(state >> 8) / 16777216.0f - 0.5f)));  // the same in any precision
    }
    const Tensor t = ctx.allocate(dtype, rows, cols);
    ctx.upload_now(t, {v.data(), DType::f32, rows, cols, cols});
    return t;
  };
  const auto indices = [&](const std::vector<int32_t>& v) {
    const int64_t n = static_cast<int64_t>(v.size());
    const Tensor t = ctx.allocate(DType::i32, 1, n);
    ctx.upload_now(t, {v.data(), DType::i32, 1, n, n});
    return t;
  };
  const DType act = ctx.act_dtype(), acc = ctx.acc_dtype();
  const int64_t cols = s.hidden + s.rank, width = 24;
  Weight head, target_head;
  head.needs_input_gradient = true;
  head.value = random(act, s.vocab, cols, 1.0f);
  target_head.value = random(act, s.vocab, width, 1.0f);
  refresh(ctx, {&head});
  refresh(ctx, {&target_head});
  VocabLoss a;
  a.joint = random(act, s.slots, cols, 4.0f);
  a.head = &head, a.target_head = &target_head;
  a.target_state = random(act, s.rows, width, 4.0f);
  std::vector<int32_t> target_row, label;
  for (int64_t i = 0; i < s.slots; ++i) {
    const LossChunk* chunk = &s.chunks.front();
    for (const LossChunk& c : s.chunks)
      if (i >= c.slot0) chunk = &c;
    target_row.push_back(static_cast<int32_t>(chunk->row0 + i * 5 % chunk->rows));
    label.push_back(i % 4 == 3 ? -1 : static_cast<int32_t>(i * 7919 % s.vocab));
  }
  a.target_row = indices(target_row), a.label = indices(label);
  a.weight = random(acc, 1, s.slots, 2.0f), a.conf_weight = random(acc, 1, s.slots, 2.0f);
  a.scale = random(acc, 1, kNumTerms, 2.0f);
  a.coef = s.coef;
  a.conf_w = random(acc, 1, cols, 0.5f), a.conf_b = random(acc, 1, 1, 1.0f);
  if (s.rank > 0) a.conf_e = a.joint.col_range(s.hidden, s.rank);
  a.hidden_cols = s.hidden, a.detach_confidence = s.detach, a.chunks = s.chunks;
  a.slot_out = random(acc, s.slots, kSlotOutCols, 1.0f);
  a.d_joint = random(acc, s.slots, cols, 1.0f);
  if (s.rank > 0) a.d_conf_e = a.d_joint.col_range(s.hidden, s.rank);
  a.d_head = random(acc, s.vocab, std::max<int64_t>(s.rank, 3), 1.0f);
  a.d_conf_w = random(acc, 1, cols, 1.0f), a.d_conf_b = random(acc, 1, 1, 1.0f);
  a.write_dw = add ? Write::add : Write::overwrite;
  int64_t most_slots = 0, most_rows = 0;
  for (const LossChunk& c : s.chunks) most_slots = std::max(most_slots, c.slots), most_rows = std::max(most_rows, c.rows);
  a.work = ctx.allocate(DType::u8, 1, vocab_loss_work(ctx, most_slots, most_rows, s.vocab, cols));
  vocab_loss(ctx, a);
  const auto values = [&](const Tensor& t) {
    std::vector<double> v(static_cast<size_t>(t.size()));
    ctx.download_now({v.data(), DType::f64, t.rows, t.cols, t.cols}, t);
    return v;
  };
  return {values(a.slot_out), values(a.d_joint), values(a.d_head), values(a.d_conf_w), values(a.d_conf_b)};
}

double error(const std::vector<double>& got, const std::vector<double>& want) {
  double diff = 0, size = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    if (!std::isfinite(got[i])) return INFINITY;
    diff += (got[i] - want[i]) * (got[i] - want[i]);
    size += want[i] * want[i];
  }
  return size > 0 ? std::sqrt(diff / size) : std::sqrt(diff);
}

const BackendOptions kReference{.device = "ref", .precision = Precision::fp64};
const BackendOptions kFp32{.device = "cpu", .precision = Precision::fp32};
const BackendOptions kBf16{.device = "cpu", .precision = Precision::bf16};

}  // namespace

TEST_CASE("vocab_loss on the CPU: every term alone and all at once", "[loss]") {
  const int64_t vocab = GENERATE(1, 2, 37, 1024, 1024 + 5, 3000);
  const int term = GENERATE(range(0, static_cast<int>(kNumTerms) + 2));
  Setting s{.vocab = vocab, .slots = 13, .rows = 9, .hidden = 20, .rank = 6, .coef = {}, .chunks = {{0, 8, 0, 5}, {8, 5, 4, 5}}};
  if (term < kNumTerms)
    s.coef[static_cast<size_t>(term)] = 1;
  else if (term == kNumTerms)
    s.coef = {0.1, 1.8, 0, 0, 0, 0, 0, 1};
  else
    s.coef = {0.1, 0.9, 0.2, 0.3, 0.4, 0.5, 0.6, 1}, s.detach = true;
  const bool add = term % 2 == 1;
  const Results want = run(kReference, s, add), got = run(kFp32, s, add), half = run(kBf16, s, add);
  CAPTURE(vocab, term);
  // The fixtures' fp32 bounds. A vocabulary of one has gradients that are exactly zero.
  CHECK(error(got.slot_out, want.slot_out) <= 5e-6);
  CHECK(error(got.d_joint, want.d_joint) <= 2e-5);
  CHECK(error(got.d_head, want.d_head) <= 2e-5);
  CHECK(error(got.d_conf_w, want.d_conf_w) <= 2e-5);
  CHECK(error(got.d_conf_b, want.d_conf_b) <= 2e-5);
  // bf16: logits and terms are fp32 sums of exact products, so nothing but the gradient's one rounding (2^-9 at most) shows.
  CHECK(error(half.slot_out, want.slot_out) <= 5e-6);
  CHECK(error(half.d_joint, want.d_joint) <= 4e-3);
  CHECK(error(half.d_head, want.d_head) <= 4e-3);
  CHECK(error(half.d_conf_w, want.d_conf_w) <= 2e-5);
}

TEST_CASE("vocab_loss on the CPU: cutting into chunks changes no slot's bits", "[loss]") {
  Setting s{.vocab = 517, .slots = 12, .rows = 5, .hidden = 20, .rank = 0, .coef = {0.1, 1.8, 0.5, 0, 0, 0, 0, 1},
            .chunks = {{0, 12, 0, 5}}};
  const Results whole = run(kBf16, s);
  s.chunks = {{0, 1, 0, 5}, {1, 0, 2, 0}, {1, 6, 0, 5}, {7, 5, 0, 5}};
  BackendOptions one = kBf16;
  one.threads = 1;
  const Results cut = run(one, s);
  CHECK(whole.slot_out == cut.slot_out);
  CHECK(whole.d_joint == cut.d_joint);
  CHECK(error(cut.d_head, whole.d_head) <= 2e-6);  // summed in another order
  // Slots outside every chunk: zeros.
  s.chunks = {{2, 3, 0, 5}};
  const Results part = run(kBf16, s);
  for (size_t i = 0; i < part.slot_out.size(); ++i) {
    const bool inside = i / kSlotOutCols >= 2 && i / kSlotOutCols < 5;
    REQUIRE(part.slot_out[i] == (inside ? whole.slot_out[i] : 0.0));
  }
}
