// The vocabulary loss, chunk by chunk: contract in model/ops.h. Products by cuBLASLt, sweeps in cuda/vocab_loss.cu; the gradient
// takes the place of the draft logits, in the dtype of the products back (a bf16 row fills the front half of its fp32 row).
#include <algorithm>

#include "cuda/backend.h"
#include "cuda/matrices.h"

namespace dspark::cuda {

using namespace model;

namespace {

constexpr bool same(int a, int b) { return a == b; }
static_assert(same(kLossCe, kCe) && same(kLossTv, kTv) && same(kLossKl, kKl) && same(kLossRkl, kRkl) && same(kLossJsd, kJsd) && same(kLossNla, kNla) && same(kLossLk, kLk) &&
              same(kLossConf, kConf) && same(kLossAccept, kAccept) && same(kLossConfLogit, kConfLogit) && same(kLossDraftTop, kDraftTop) && same(kLossTargetTop, kTargetTop) &&
              same(kLossWeight, kWeight) && same(kLossConfWeight, kConfWeight));
static_assert(sizeof(LogitRow) <= 32 * sizeof(float));  // what vocab_loss_work plans a row

void clear(Stream stream, const Tensor& t) {
  if (t) fill(stream, BackendAccess::raw(t.data), t.rows, t.cols, t.stride, 4, 0);
}

// Slots that no chunk holds have zeros.
void clear_gaps(Stream stream, const VocabLoss& a) {
  int64_t next = 0;
  const auto clear_to = [&](int64_t end) {
    clear(stream, a.slot_out.row_range(next, end - next));
    if (a.backward) clear(stream, a.d_joint.row_range(next, end - next));
  };
  for (const LossChunk& c : a.chunks) {
    clear_to(c.slot0);
    next = c.slot0 + c.slots;
  }
  clear_to(a.joint.rows);
}

}  // namespace

void CudaOps::vocab_loss(Context&, const VocabLoss& a) {
  const Stream s = stream();
  const int64_t vocab = a.head->out();
  int64_t max_slots = 0, max_rows = 0;
  for (const LossChunk& c : a.chunks) max_slots = std::max(max_slots, c.slots), max_rows = std::max(max_rows, c.rows);
  auto part = [at = a.work.data](int64_t bytes) mutable {
    const Address here = at;
    at = at + (bytes + 63) / 64 * 64;
    return here;
  };
  const Tensor draft{part(max_slots * vocab * 4), DType::f32, max_slots, vocab, vocab}, target{part(max_rows * vocab * 4), DType::f32, max_rows, vocab, vocab};
  auto* target_rows = static_cast<LogitRow*>(BackendAccess::raw(part(max_rows * 128)));
  auto* draft_rows = static_cast<LogitRow*>(BackendAccess::raw(part(max_slots * 128)));
  const bool half = a.joint.dtype == DType::bf16;
  const int64_t e_cols = a.conf_w ? a.conf_w.cols - a.hidden_cols : 0;

  clear_gaps(s, a);
  bool add = a.write_dw == Write::add;
  for (const LossChunk& c : a.chunks) {
    if (c.slots == 0) continue;
    LossChunkArgs k;
    k.draft = mat(draft.row_range(0, c.slots)), k.target = mat(target.row_range(0, c.rows));
    k.draft_rows = draft_rows, k.target_rows = target_rows, k.row0 = c.row0;
    k.target_row = pointer<int32_t>(a.target_row) + c.slot0, k.label = pointer<int32_t>(a.label) + c.slot0;
    k.weight = pointer<float>(a.weight) + c.slot0, k.conf_weight = pointer<float>(a.conf_weight) + c.slot0, k.scale = pointer<float>(a.scale);
    k.slot_out = pointer<float>(a.slot_out) + c.slot0 * a.slot_out.stride, k.slot_stride = a.slot_out.stride;
    std::copy(a.coef.begin(), a.coef.end(), k.coef);
    k.label_from_target = a.label_from_target, k.backward = a.backward, k.half_gradient = half;
    k.dpace_alpha = a.dpace_alpha;
    if (a.dpace_alpha > 0) k.block_of = pointer<int32_t>(a.block_of) + c.slot0;
    const Tensor joint = a.joint.row_range(c.slot0, c.slots);
    if (a.conf_w) {
      k.conf_w = mat(a.conf_w.col_range(0, a.hidden_cols)), k.joint_hidden = mat(joint.col_range(0, a.hidden_cols)), k.conf_b = pointer<float>(a.conf_b);
      if (e_cols > 0) k.conf_w_e = mat(a.conf_w.col_range(a.hidden_cols, e_cols)), k.conf_e = mat(a.conf_e.row_range(c.slot0, c.slots));
    }

    blas_.multiply(s, {k.target, mat(a.target_state.row_range(c.row0, c.rows)), mat(a.target_head->value), false, true, false});
    loss_stats(s, k.target, target_rows);
    blas_.multiply(s, {k.draft, mat(joint), mat(a.head->value), false, true, false});
    loss_stats(s, k.draft, draft_rows);
    loss_labels(s, k);
    if (a.dpace_alpha > 0) loss_dpace(s, k, false);
    loss_slots(s, k);
    if (a.dpace_confidence) loss_dpace(s, k, true);
    if (!a.backward) continue;
    const Matrix gradient{k.draft.data, c.slots, vocab, half ? 2 * vocab : vocab, half, k.draft.vector};
    blas_.multiply(s, {mat(a.d_joint.row_range(c.slot0, c.slots)), gradient, mat(a.head->value), false, false, false});
    if (a.d_head) blas_.multiply(s, {mat(a.d_head), gradient, mat(joint.col_range(joint.cols - a.d_head.cols, a.d_head.cols)), true, false, add});
    add = true;
  }
  if (!a.backward) return;
  if (!add) clear(s, a.d_head);  // no chunk wrote it
  if (a.coef[kConf] == 0) {
    if (a.write_dw == Write::overwrite) clear(s, a.d_conf_w), clear(s, a.d_conf_b);
    return;
  }
  const int64_t slots = a.joint.rows;
  auto* d_logit = static_cast<float*>(scratch_.data);
  DS_REQUIRE(slots * 4 <= scratch_.bytes, "the cuda backend takes {} slots in one loss, not {}", scratch_.bytes / 4, slots);
  loss_conf_logits(s, d_logit, pointer<float>(a.slot_out), a.slot_out.stride, slots, pointer<float>(a.scale), a.coef[kConf]);
  const Tensor hidden = a.joint.col_range(0, a.hidden_cols), w_hidden = a.conf_w.col_range(0, a.hidden_cols), w_e = a.conf_w.col_range(a.hidden_cols, e_cols);
  if (!a.detach_confidence) {
    add_outer(s, mat(a.d_joint.col_range(0, a.hidden_cols)), d_logit, mat(w_hidden));
    if (e_cols > 0 && a.d_conf_e) add_outer(s, mat(a.d_conf_e), d_logit, mat(w_e));
  }
  const bool add_weights = a.write_dw == Write::add;
  if (a.d_conf_b) column_sum(s, mat(a.d_conf_b), {d_logit, slots, 1, 1, false, false}, {}, nullptr, add_weights);
  if (!a.d_conf_w) return;
  column_sum(s, mat(a.d_conf_w.col_range(0, a.hidden_cols)), mat(hidden), {}, d_logit, add_weights);
  if (e_cols > 0) column_sum(s, mat(a.d_conf_w.col_range(a.hidden_cols, e_cols)), mat(a.conf_e), {}, d_logit, add_weights);
}

}  // namespace dspark::cuda
