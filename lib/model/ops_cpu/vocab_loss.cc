// vocab_loss on CPUs: contract in model/ops.h.
//
// A chunk is: target logits and their normalisers, draft logits, then slot by slot (one thread each) the three sweeps over
// one row of each, which stay in its cache; the gradient takes the place of the draft logits, in the dtype of the products
// back (a bf16 row fills the front half of its fp32 row). Work memory: draft logits, target logits, target statistics.
#include <array>
#include <cmath>
#include <cstring>

#include "model/ops_cpu/backend.h"

namespace dspark::model::cpu {
namespace {

struct TargetRow {
  float top, inverse;
  double log_norm;  // log sum exp of the logits
  int32_t arg;
};

// What a slot's first sweep leaves for the rest.
struct DraftRow {
  double log_norm;
  LogitStats stats;
  float label_logit;
  int32_t label;
  float weight;
};

class Loss {
 public:
  Loss(const VocabLoss& a, Machine& m)
      : a_(a), m_(m), k_(m.kernels()), vocab_(a.head->out()),
        divergences_(a.coef[kKl] != 0 || a.coef[kRkl] != 0 || a.coef[kJsd] != 0 || a.coef[kLk] != 0) {
    int64_t slots = 0, rows = 0;
    for (const LossChunk& c : a.chunks) slots = std::max(slots, c.slots), rows = std::max(rows, c.rows);
    auto part = [at = a.work.data](int64_t bytes) mutable {
      const Address here = at;
      at = at + (bytes + 63) / 64 * 64;
      return here;
    };
    draft_ = {part(slots * vocab_ * 4), DType::f32, slots, vocab_, vocab_};
    target_ = {part(rows * vocab_ * 4), DType::f32, rows, vocab_, vocab_};
    target_rows_ = static_cast<TargetRow*>(BackendAccess::raw(part(rows * static_cast<int64_t>(sizeof(TargetRow)))));
    draft_rows_ = static_cast<DraftRow*>(BackendAccess::raw(part(slots * static_cast<int64_t>(sizeof(DraftRow)))));
  }

  void run() {
    Write write = a_.write_dw;
    for (const LossChunk& c : a_.chunks) {
      if (c.slots == 0) continue;
      product(target_, a_.target_state.row_range(c.row0, c.rows), *a_.target_head);
      m_.pool().parallel_for(c.rows, 1, [&](int64_t begin, int64_t end, int) {
        for (int64_t r = begin; r < end; ++r) target_statistics(r);
      });
      product(draft_, a_.joint.row_range(c.slot0, c.slots), *a_.head);
      m_.pool().parallel_for(c.slots, 1, [&](int64_t begin, int64_t end, int) {
        for (int64_t s = begin; s < end; ++s) {
          draft_statistics(c, s);
          if (!dpace()) slot(c, s);
        }
      });
      if (dpace()) {
        dpace_weights(
            c,
            [&](int64_t s) {
              const DraftRow& d = draft_rows_[s];
              return d.label < 0 ? 1.0 : std::exp(d.label_logit - d.log_norm);  // no label: nothing to learn there
            },
            [&](int64_t s) -> float& { return draft_rows_[s].weight; });
        m_.pool().parallel_for(c.slots, 1, [&](int64_t begin, int64_t end, int) {
          for (int64_t s = begin; s < end; ++s) slot(c, s);
        });
      }
      if (a_.dpace_confidence)
        dpace_weights(
            c, [&](int64_t s) { return std::exp(-static_cast<double>(row<float>(a_.slot_out, c.slot0 + s)[kConf])); },
            [&](int64_t s) -> float& { return row<float>(a_.slot_out, c.slot0 + s)[kConfWeight]; });
      if (!a_.backward) continue;
      products_back(c, write);
      write = Write::add;
    }
    if (!a_.backward) return;
    if (write == Write::overwrite && a_.d_head) clear(a_.d_head);  // no chunk wrote it
    if (a_.coef[kConf] != 0)
      confidence_backward();
    else if (a_.write_dw == Write::overwrite)
      for (const Tensor* t : {&a_.d_conf_w, &a_.d_conf_b})
        if (*t) clear(*t);
  }

  // Slots that no chunk holds have zeros.
  void clear_gaps() {
    int64_t next = 0;
    const auto clear_to = [&](int64_t end) {
      clear(a_.slot_out.row_range(next, end - next));
      if (a_.backward) clear(a_.d_joint.row_range(next, end - next));
    };
    for (const LossChunk& c : a_.chunks) {
      clear_to(c.slot0);
      next = c.slot0 + c.slots;
    }
    clear_to(a_.joint.rows);
  }

 private:
  static void clear(const Tensor& t) {
    for (int64_t r = 0; r < t.rows; ++r) std::memset(row<float>(t, r), 0, static_cast<size_t>(t.cols) * sizeof(float));
  }

  void product(const Tensor& logits, const Tensor& x, const Weight& w) {
    gemm_packed(m_.gemm(), x.rows, w.out(), w.in(), mat(x), packing(w).forward, mat_out(logits));
  }

  void target_statistics(int64_t r) {
    LogitStats s;
    k_.loss_stats(row<float>(target_, r), vocab_, !divergences_, &s);
    target_rows_[r] = {.top = s.top, .inverse = static_cast<float>(1 / s.sum), .log_norm = std::log(s.sum) + s.top, .arg = s.arg};
  }

  bool dpace() const { return a_.dpace_alpha > 0; }
  int64_t target_of(const LossChunk& c, int64_t s) const { return pointer<int32_t>(a_.target_row)[c.slot0 + s] - c.row0; }

  // First sweep over slot `s` of a chunk.
  void draft_statistics(const LossChunk& c, int64_t s) {
    const int64_t index = c.slot0 + s, target_row = target_of(c, s);
    DS_ASSERT(target_row >= 0 && target_row < c.rows, "vocab_loss: slot {} needs target row {}, its chunk has [{}, +{})",
              index, target_row + c.row0, c.row0, c.rows);
    float* draft = row<float>(draft_, s);
    DraftRow& d = draft_rows_[s];
    d.label = a_.label_from_target ? target_rows_[target_row].arg : pointer<int32_t>(a_.label)[index];
    d.label_logit = d.label < 0 ? 0.0f : draft[d.label];
    k_.loss_stats(draft, vocab_, !divergences_, &d.stats);
    d.log_norm = std::log(d.stats.sum) + d.stats.top;
    d.weight = pointer<float>(a_.weight)[index];
  }

  // weight(s) for the chunk's slots, from the probabilities q(s). Chunks hold whole blocks, so a block's slots are all here.
  template <typename Q, typename W>
  void dpace_weights(const LossChunk& c, const Q& q, const W& weight) {
    const int32_t* block_of = pointer<int32_t>(a_.block_of) + c.slot0;
    for (int64_t begin = 0, end; begin < c.slots; begin = end) {
      for (end = begin; end < c.slots && block_of[end] == block_of[begin]; ++end) {
      }
      double product = 1, sum = 0;
      for (int64_t s = begin; s < end; ++s) weight(s) = static_cast<float>(product *= (1 - a_.dpace_alpha) * q(s) + a_.dpace_alpha);
      for (int64_t s = end; s-- > begin;) weight(s) = static_cast<float>(sum += weight(s));
    }
  }

  // Terms and gradient of slot `s` of a chunk; leaves the gradient in its row of draft_.
  void slot(const LossChunk& c, int64_t s) {
    const int64_t index = c.slot0 + s;
    const DraftRow& d = draft_rows_[s];
    const TargetRow& t = target_rows_[target_of(c, s)];
    float* draft = row<float>(draft_, s);
    const int64_t label = d.label;
    const LogitStats& stats = d.stats;
    const LossRow pair{.n = vocab_, .logits = divergences_, .draft = draft, .target = row<float>(target_, target_of(c, s)),
                       .draft_top = stats.top, .target_top = t.top, .draft_inverse = static_cast<float>(1 / stats.sum),
                       .target_inverse = t.inverse, .shift = static_cast<float>(d.log_norm - t.log_norm),
                       .mixture = a_.coef[kJsd] != 0};
    LossSums sums;
    k_.loss_sums(pair, &sums);

    const double tv = 0.5 * sums.distance, accept = sums.overlap, lk = std::exp(-3 * accept);  // lk's weight is detached
    const bool floored = accept <= 1e-5;
    std::array<double, kSlotOutCols> out{};
    out[kCe] = label < 0 ? 0 : d.log_norm - d.label_logit;
    out[kKl] = sums.kl, out[kRkl] = sums.rkl, out[kJsd] = sums.jsd;
    out[kNla] = -std::log(floored ? 1e-5 : accept);
    out[kLk] = lk * sums.kl + (1 - lk) * tv;
    for (int j = 0; j < kConf; ++j)
      if (a_.coef[static_cast<size_t>(j)] == 0) out[static_cast<size_t>(j)] = 0;
    out[kTv] = tv, out[kAccept] = accept;
    out[kDraftTop] = stats.arg, out[kTargetTop] = t.arg;
    out[kConfLogit] = confidence_logit(index);
    out[kWeight] = d.weight;
    out[kConfWeight] = pointer<float>(a_.conf_weight)[index];
    if (a_.coef[kConf] != 0) {
      const double z = out[kConfLogit];
      out[kConf] = std::max(z, 0.0) + std::log1p(std::exp(-std::fabs(z))) - confidence_target(tv) * z;
    }
    for (size_t j = 0; j < out.size(); ++j) row<float>(a_.slot_out, index)[j] = static_cast<float>(out[j]);
    if (!a_.backward) return;

    const auto factor = [&](Term j) {
      return a_.coef[static_cast<size_t>(j)] * pointer<float>(a_.scale)[j] * static_cast<double>(d.weight);
    };
    const double ce = label < 0 ? 0 : factor(kCe), kl = factor(kKl) + lk * factor(kLk);
    const double total_variation = factor(kTv) + (1 - lk) * factor(kLk) + (floored ? 0 : factor(kNla) / accept);
    k_.loss_gradient(pair, sums,
                     {.shared = static_cast<float>(ce + kl), .target = static_cast<float>(kl), .ce = static_cast<float>(ce),
                      .signs = static_cast<float>(0.5 * total_variation), .rkl = static_cast<float>(factor(kRkl)),
                      .mixture = static_cast<float>(0.5 * factor(kJsd)), .label = label},
                     {draft, a_.joint.dtype == DType::bf16});
  }

  // d_joint = G head and d_head (+)= G^T joint, G in the chunk's rows of draft_.
  void products_back(const LossChunk& c, Write write) {
    const bool half = a_.joint.dtype == DType::bf16;
    const MatRef g{BackendAccess::raw(draft_.data), a_.joint.dtype, half ? 2 * vocab_ : vocab_};
    input_gradient(m_, c.slots, *a_.head, g, mat_out(a_.d_joint.row_range(c.slot0, c.slots)), false);
    if (!a_.d_head) return;
    const Tensor x = a_.joint.row_range(c.slot0, c.slots).col_range(a_.joint.cols - a_.d_head.cols, a_.d_head.cols);
    gemm_tn(m_.gemm(), vocab_, x.cols, c.slots, g, mat(x), mat_out(a_.d_head), write == Write::add);
  }

  // ---- confidence head: logit = conf_w [hidden | e] + conf_b ----

  int64_t conf_e_cols() const { return a_.conf_w.cols - a_.hidden_cols; }
  static double confidence_target(double tv) { return std::clamp(1 - tv, 0.0, 1.0); }

  double confidence_logit(int64_t index) const {
    if (!a_.conf_w) return 0;
    double z = static_cast<double>(*pointer<float>(a_.conf_b)) +
               k_.attention_dot(in_row(a_.joint, index), in_row(a_.conf_w, 0), a_.hidden_cols);
    if (conf_e_cols() > 0)
      z += k_.attention_dot(in_row(a_.conf_e, index), in_row(a_.conf_w, 0, a_.hidden_cols), conf_e_cols());
    return z;
  }

  // Gradient by the confidence logit of a slot.
  double d_logit(int64_t index) const {
    const float* out = row<float>(a_.slot_out, index);
    const double sigmoid = 1 / (1 + std::exp(-static_cast<double>(out[kConfLogit])));
    return a_.coef[kConf] * pointer<float>(a_.scale)[kConf] * out[kConfWeight] *
           (sigmoid - confidence_target(out[kTv]));
  }

  template <typename F>
  void each_slot(F f) const {
    for (const LossChunk& c : a_.chunks)
      for (int64_t s = c.slot0; s < c.slot0 + c.slots; ++s) f(s, static_cast<float>(d_logit(s)));
  }

  void confidence_backward() {
    if (!a_.detach_confidence)
      each_slot([&](int64_t s, float d) {
        k_.loss_add(row<float>(a_.d_joint, s), in_row(a_.conf_w, 0), d, a_.hidden_cols);
        if (conf_e_cols() > 0 && a_.d_conf_e)
          k_.loss_add(row<float>(a_.d_conf_e, s), in_row(a_.conf_w, 0, a_.hidden_cols), d, conf_e_cols());
      });
    if (a_.d_conf_b) {
      double sum = a_.write_dw == Write::add ? *pointer<float>(a_.d_conf_b) : 0;
      for (const LossChunk& c : a_.chunks)
        for (int64_t s = c.slot0; s < c.slot0 + c.slots; ++s) sum += d_logit(s);
      *pointer<float>(a_.d_conf_b) = static_cast<float>(sum);
    }
    if (!a_.d_conf_w) return;
    if (a_.write_dw == Write::overwrite) clear(a_.d_conf_w);
    float* d_w = pointer<float>(a_.d_conf_w);
    each_slot([&](int64_t s, float d) {
      k_.loss_add(d_w, in_row(a_.joint, s), d, a_.hidden_cols);
      if (conf_e_cols() > 0) k_.loss_add(d_w + a_.hidden_cols, in_row(a_.conf_e, s), d, conf_e_cols());
    });
  }

  const VocabLoss& a_;
  Machine& m_;
  const Kernels& k_;
  const int64_t vocab_;
  const bool divergences_;  // terms that need logarithms
  Tensor draft_, target_;
  TargetRow* target_rows_;
  DraftRow* draft_rows_;
};

}  // namespace

void CpuOps::vocab_loss(Context&, const VocabLoss& a) {
  Loss loss(a, m_);
  loss.clear_gaps();
  loss.run();
}

}  // namespace dspark::model::cpu
