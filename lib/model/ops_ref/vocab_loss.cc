// vocab_loss: both vocabulary products, every term, and the gradients by the chain rule on probabilities.
#include <array>
#include <vector>

#include "model/ops_ref/scalar.h"

namespace dspark::model::ref {
namespace {

// logits, log-probabilities and probabilities of one row.
template <typename S>
struct Distribution {
  std::vector<S> log_prob, prob;
  int64_t top = 0;  // arg-max, lowest id on ties
};

template <typename S>
Distribution<S> distribution(const Matrix<S>& x, int64_t row, const Matrix<S>& head) {
  Distribution<S> d;
  d.log_prob.resize(static_cast<size_t>(head.rows()));
  d.prob.resize(d.log_prob.size());
  size_t top = 0;
  for (size_t j = 0; j < d.prob.size(); ++j) {
    S logit = 0;
    for (int64_t c = 0; c < head.cols(); ++c) logit += mul(x(row, c), head(static_cast<int64_t>(j), c));
    d.log_prob[j] = logit;
    if (real(logit) > real(d.log_prob[top])) top = j;
  }
  S sum = 0;
  const S largest = d.log_prob[top];
  for (const S& l : d.log_prob) sum += std::exp(l - largest);
  const S lse = std::log(sum) + largest;
  for (size_t j = 0; j < d.prob.size(); ++j) d.prob[j] = std::exp(d.log_prob[j] -= lse);
  d.top = static_cast<int64_t>(top);
  return d;
}

// p log(p / r) with its limit 0 at p = 0.
template <typename S>
S p_log_ratio(S p, S log_p, S log_r) {
  return real(p) == 0 ? S(0) : p * (log_p - log_r);
}

// All terms but the confidence loss of one slot, and d(sum of factor * term) / d(draft logits).
template <typename S>
class SlotLoss {
 public:
  SlotLoss(const Distribution<S>& draft, const Distribution<S>& target, int64_t label,
           const std::array<double, kNumTerms>& coef)
      : draft_(draft), target_(target), label_(label), n_(draft.prob.size()) {
    for (size_t j = 0; j < n_; ++j) {
      const S d = draft.prob[j], t = target.prob[j];
      tv_ += 0.5 * sign(j) * (d - t);
      accept_ += real(d) < real(t) ? d : t;
      kl_ += p_log_ratio(t, target.log_prob[j], draft.log_prob[j]);
      if (coef[kRkl] != 0) rkl_ += p_log_ratio(d, draft.log_prob[j], target.log_prob[j]);
      if (coef[kJsd] != 0)
        jsd_ += 0.5 * (p_log_ratio(d, draft.log_prob[j], log_mixture(j)) +
                       p_log_ratio(t, target.log_prob[j], log_mixture(j)));
    }
    lk_weight_ = std::exp(-3 * real(accept_));  // detached
  }

  S tv() const { return tv_; }
  S accept() const { return accept_; }
  S term(int t) const {
    switch (t) {
      case kCe:
        return label_ < 0 ? S(0) : -draft_.log_prob.at(static_cast<size_t>(label_));
      case kTv:
        return tv_;
      case kKl:
        return kl_;
      case kRkl:
        return rkl_;
      case kJsd:
        return jsd_;
      case kNla:
        return -std::log(floored() ? S(1e-5) : accept_);
      case kLk:
        return lk_weight_ * kl_ + (1 - lk_weight_) * tv_;
      default:
        return S(0);
    }
  }

  // factor[t] is what multiplies term t in the loss.
  std::vector<S> d_logits(const std::array<S, kNumTerms>& factor) const {
    const S ce = label_ < 0 ? S(0) : factor[kCe], kl = factor[kKl] + lk_weight_ * factor[kLk];
    const S tv = factor[kTv] + (1 - lk_weight_) * factor[kLk];
    // Terms that are functions of draft_prob: their derivative by it, then through the softmax.
    std::vector<S> by_prob(n_), d(n_);
    S mean = 0;
    for (size_t j = 0; j < n_; ++j) {
      by_prob[j] = tv * 0.5 * sign(j);
      if (factor[kNla] != S(0) && !floored()) by_prob[j] -= factor[kNla] / accept_ * 0.5 * (1 - sign(j));
      if (factor[kRkl] != S(0)) by_prob[j] += factor[kRkl] * (draft_.log_prob[j] - target_.log_prob[j] + 1.0);
      if (factor[kJsd] != S(0) && real(draft_.prob[j]) > 0)
        by_prob[j] += factor[kJsd] * 0.5 * (draft_.log_prob[j] - log_mixture(j));
      mean += draft_.prob[j] * by_prob[j];
    }
    for (size_t j = 0; j < n_; ++j) {
      d[j] = draft_.prob[j] * (by_prob[j] - mean);
      d[j] += kl * (draft_.prob[j] - target_.prob[j]);
      d[j] += ce * (draft_.prob[j] - (static_cast<int64_t>(j) == label_ ? 1.0 : 0.0));
    }
    return d;
  }

 private:
  double sign(size_t j) const {
    const double diff = real(draft_.prob[j]) - real(target_.prob[j]);
    return diff > 0 ? 1 : diff < 0 ? -1 : 0;
  }
  S log_mixture(size_t j) const { return std::log(0.5 * (draft_.prob[j] + target_.prob[j])); }
  bool floored() const { return real(accept_) <= 1e-5; }

  const Distribution<S>&draft_, &target_;
  int64_t label_;
  size_t n_;
  S tv_ = 0, accept_ = 0, kl_ = 0, rkl_ = 0, jsd_ = 0;
  double lk_weight_ = 0;
};

// The confidence head on one slot: logit = conf_w [hidden | e] + conf_b.
template <typename S>
class Confidence {
 public:
  explicit Confidence(const VocabLoss& a) : a_(a), joint_(a.joint), w_(a.conf_w), b_(a.conf_b), e_(a.conf_e) {}
  explicit operator bool() const { return static_cast<bool>(w_); }

  S feature(int64_t slot, int64_t c) const {
    const S f = c < a_.hidden_cols ? joint_(slot, c) : e_(slot, c - a_.hidden_cols);
    return a_.detach_confidence ? S(real(f)) : f;
  }
  S logit(int64_t slot) const {
    S sum = b_(0);
    for (int64_t c = 0; c < w_.cols(); ++c) sum += mul(w_(c), feature(slot, c));
    return sum;
  }
  // Adds d_logit's share to every gradient.
  void backward(int64_t slot, S d_logit) const {
    const Matrix<S> d_w(a_.d_conf_w), d_b(a_.d_conf_b), d_joint(a_.d_joint), d_e(a_.d_conf_e);
    if (d_b) d_b(0) += d_logit;
    for (int64_t c = 0; c < w_.cols(); ++c) {
      if (d_w) d_w(c) += d_logit * feature(slot, c);
      if (a_.detach_confidence) continue;
      if (c < a_.hidden_cols)
        d_joint(slot, c) += d_logit * w_(c);
      else if (d_e)
        d_e(slot, c - a_.hidden_cols) += d_logit * w_(c);
    }
  }

 private:
  const VocabLoss& a_;
  Matrix<S> joint_, w_, b_, e_;
};

// BCE of a logit against a target in [0, 1], without overflow.
template <typename S>
S binary_cross_entropy(S logit, double target) {
  const S softplus = real(logit) > 0 ? logit + std::log(S(1) + std::exp(-logit)) : std::log(S(1) + std::exp(logit));
  return softplus - target * logit;
}

template <typename S>
int64_t label_of(const VocabLoss& a, int64_t slot, const Distribution<S>& target) {
  return a.label_from_target ? target.top : Ints(a.label)(slot);
}

// D-PACE's weights of a chunk's slots from the probabilities q of what they should have said; detached.
std::vector<double> dpace_weights(const VocabLoss& a, const LossChunk& chunk, const std::vector<double>& q) {
  const Ints block_of(a.block_of);
  const auto n = static_cast<size_t>(chunk.slots);
  const auto same_block = [&](size_t i, size_t j) { return block_of(chunk.slot0 + static_cast<int64_t>(i)) == block_of(chunk.slot0 + static_cast<int64_t>(j)); };
  std::vector<double> product(n), weight(n);
  for (size_t i = 0; i < n; ++i) product[i] = (i > 0 && same_block(i, i - 1) ? product[i - 1] : 1) * ((1 - a.dpace_alpha) * q[i] + a.dpace_alpha);
  for (size_t i = n; i-- > 0;) weight[i] = product[i] + (i + 1 < n && same_block(i, i + 1) ? weight[i + 1] : 0);
  return weight;
}

template <typename S>
void one_slot(const VocabLoss& a, int64_t slot, const Distribution<S>& target, S weight, S conf_weight, bool backward) {
  const Matrix<S> joint(a.joint), head(a.head->value), out(a.slot_out), scale(a.scale);
  const Confidence<S> confidence(a);
  const Distribution<S> draft = distribution(joint, slot, head);
  const SlotLoss<S> loss(draft, target, label_of(a, slot, target), a.coef);
  const double conf_target = 1 - real(loss.tv());  // detached

  for (int64_t c = 0; c < kSlotOutCols; ++c) out(slot, c) = S(0);
  for (int t = 0; t < kConf; ++t)
    if (a.coef[static_cast<size_t>(t)] != 0 || t == kTv) out(slot, t) = loss.term(t);
  out(slot, kAccept) = loss.accept();
  out(slot, kDraftTop) = static_cast<double>(draft.top);
  out(slot, kTargetTop) = static_cast<double>(target.top);
  const S logit = confidence ? confidence.logit(slot) : S(0);
  out(slot, kConfLogit) = logit;
  out(slot, kWeight) = weight;
  out(slot, kConfWeight) = conf_weight;
  if (a.coef[kConf] != 0) out(slot, kConf) = binary_cross_entropy(logit, conf_target);
  if (!backward) return;

  std::array<S, kNumTerms> factor;
  for (int t = 0; t < kNumTerms; ++t)
    factor[static_cast<size_t>(t)] =
        a.coef[static_cast<size_t>(t)] * scale(t) * (t == kConf ? conf_weight : weight);
  const std::vector<S> d_logits = loss.d_logits(factor);
  const Matrix<S> d_joint(a.d_joint), d_head(a.d_head);
  for (int64_t c = 0; c < joint.cols(); ++c) {
    S sum = 0;
    for (int64_t j = 0; j < head.rows(); ++j) sum += mul(d_logits[static_cast<size_t>(j)], head(j, c));
    d_joint(slot, c) = sum;
  }
  const int64_t skipped = d_head ? joint.cols() - d_head.cols() : 0;
  for (int64_t j = 0; j < head.rows() && d_head; ++j)
    for (int64_t c = 0; c < d_head.cols(); ++c)
      d_head(j, c) += mul(d_logits[static_cast<size_t>(j)], joint(slot, skipped + c));
  if (a.coef[kConf] != 0) confidence.backward(slot, factor[kConf] * (sigmoid(logit) - conf_target));
}

}  // namespace

template <typename S>
void vocab_loss(const VocabLoss& a) {
  const Matrix<S> target_state(a.target_state), target_head(a.target_head->value);
  const Ints target_row(a.target_row);
  fill_zero(Matrix<S>(a.slot_out));  // slots outside every chunk
  if (a.backward) {
    fill_zero(Matrix<S>(a.d_joint));
    for (const Tensor& t : {a.d_head, a.d_conf_w, a.d_conf_b})
      if (t && a.write_dw == Write::overwrite) fill_zero(Matrix<S>(t));
  }
  for (const LossChunk& chunk : a.chunks) {
    std::vector<Distribution<S>> targets;
    for (int64_t r = 0; r < chunk.rows; ++r) targets.push_back(distribution(target_state, chunk.row0 + r, target_head));
    for (int64_t slot = chunk.slot0; slot < chunk.slot0 + chunk.slots; ++slot) {
      const int64_t r = target_row(slot) - chunk.row0;
      DS_ASSERT(r >= 0 && r < chunk.rows, "vocab_loss: slot {} needs target row {}, its chunk has [{}, +{})", slot,
                target_row(slot), chunk.row0, chunk.rows);
    }
    const auto n = static_cast<size_t>(chunk.slots);
    const auto slot_of = [&](size_t i) { return chunk.slot0 + static_cast<int64_t>(i); };
    const auto target_of = [&](size_t i) -> const Distribution<S>& { return targets[static_cast<size_t>(target_row(slot_of(i)) - chunk.row0)]; };
    const Matrix<S> given(a.weight), given_conf(a.conf_weight), out(a.slot_out);
    std::vector<S> weight(n), conf_weight(n);
    for (size_t i = 0; i < n; ++i) weight[i] = given(slot_of(i)), conf_weight[i] = given_conf(slot_of(i));
    if (a.dpace_alpha > 0) {
      std::vector<double> q(n), conf_q(n);
      for (size_t i = 0; i < n; ++i) {
        const int64_t label = label_of(a, slot_of(i), target_of(i));
        q[i] = label < 0 ? 1 : real(distribution(Matrix<S>(a.joint), slot_of(i), Matrix<S>(a.head->value)).prob[static_cast<size_t>(label)]);
        one_slot(a, slot_of(i), target_of(i), weight[i], conf_weight[i], false);
        conf_q[i] = std::exp(-real(out(slot_of(i), kConf)));
      }
      const auto terms = dpace_weights(a, chunk, q), conf = dpace_weights(a, chunk, conf_q);
      for (size_t i = 0; i < n; ++i) {
        weight[i] = terms[i];
        if (a.dpace_confidence) conf_weight[i] = conf[i];
      }
    }
    for (size_t i = 0; i < n; ++i) one_slot(a, slot_of(i), target_of(i), weight[i], conf_weight[i], a.backward);
  }
}

DS_REF_INSTANTIATE(vocab_loss, VocabLoss)

}  // namespace dspark::model::ref
