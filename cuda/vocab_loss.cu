// The sweeps of the vocabulary loss over rows of logits, one block a row; cuda/vocab_loss.cc puts them between cuBLASLt's products.
// Sums run in fp32 over a few chunks of a thread, then in fp64. What a term is: lib/model/ops.h and DESIGN section 4.
#include "cuda/matrix.h"

namespace dspark::cuda {
namespace {

constexpr int kWarps = kBlock / kWarp;
constexpr int kFlush = 16;  // chunks whose sum stays in fp32
constexpr float kLog2 = 0.693147180559945309f;

// Maximum, its lowest index, and sum exp(logit - maximum).
DS_KERNEL void DS_THREADS(kBlock) loss_stats_kernel(Matrix logits, LogitRow* out) {
  const Shared<float> tops(0, kWarps);
  const Shared<int> args(kWarps * 4, kWarps);
  const Shared<double> scratch(kWarps * 8, kWarps);
  const int64_t row = block_x();
  constexpr int kNowhere = 0x7fffffff;
  float top = -INFINITY;
  int arg = kNowhere;
  for_row_chunks(logits.cols, [&](int64_t col) {
    float v[kChunk];
    load_chunk(v, logits, row, col);
    for (int i = 0; i < kChunk; ++i)
      if (col + i < logits.cols && v[i] > top) top = v[i], arg = static_cast<int>(col) + i;
  });
  for (int step = kWarp / 2; step > 0; step /= 2) {
    const float other = shuffle_xor(top, step);
    const int other_arg = shuffle_xor(arg, step);
    if (other > top || (other == top && other_arg < arg)) top = other, arg = other_arg;
  }
  if (lane() == 0) tops.set(warp(), top), args.set(warp(), arg);
  sync_block();
  for (int w = 0; w < kWarps; ++w)
    if (tops[w] > top || (tops[w] == top && args[w] < arg)) top = tops[w], arg = args[w];
  double sum = 0;
  float part = 0;
  int chunks = 0;
  for_row_chunks(logits.cols, [&](int64_t col) {
    float v[kChunk];
    load_chunk(v, logits, row, col);
    for (int i = 0; i < kChunk; ++i) part += col + i < logits.cols ? expf(v[i] - top) : 0.0f;
    if (++chunks % kFlush == 0) sum += static_cast<double>(part), part = 0;
  });
  sum = block_sum(sum + static_cast<double>(part), scratch);
  if (thread() != 0) return;
  LogitRow r{};
  r.inverse = static_cast<float>(1 / sum), r.log_norm = log(sum) + static_cast<double>(top), r.top = top, r.arg = arg == kNowhere ? 0 : arg;
  store(out + row, r);
}

// Labels, their logits and the weights given, where the first sweep left the rest. One thread a slot.
DS_KERNEL void DS_THREADS(kBlock) loss_labels_kernel(LossChunkArgs a) {
  const int64_t s = block_x() * threads() + thread();
  if (s >= a.draft.rows) return;
  LogitRow d = load(a.draft_rows + s);
  const int64_t target = load(a.target_row + s) - a.row0;
  d.label = a.label_from_target ? load(a.target_rows + target).arg : load(a.label + s);
  d.label_logit = d.label < 0 ? 0.0f : load(static_cast<const float*>(a.draft.data) + s * a.draft.stride + d.label);
  d.weight = load(a.weight + s);
  store(a.draft_rows + s, d);
}

// D-PACE's weights (ops.h): the first slot of a block does its block. `confidence`: those of the confidence term, into slot_out.
DS_KERNEL void DS_THREADS_ALONE(kBlock) loss_dpace_kernel(LossChunkArgs a, bool confidence) {
  const int64_t begin = block_x() * threads() + thread(), slots = a.draft.rows;
  if (begin >= slots || (begin > 0 && load(a.block_of + begin) == load(a.block_of + begin - 1))) return;
  int64_t end = begin + 1;
  while (end < slots && load(a.block_of + end) == load(a.block_of + begin)) ++end;
  const auto out = [&](int64_t s, int column) { return a.slot_out + s * a.slot_stride + column; };
  double product = 1, sum = 0;
  for (int64_t s = begin; s < end; ++s) {
    LogitRow d = load(a.draft_rows + s);
    const double q = confidence ? exp(-static_cast<double>(load(out(s, kLossConf)))) : d.label < 0 ? 1.0 : exp(static_cast<double>(d.label_logit) - d.log_norm);
    product *= (1 - a.dpace_alpha) * q + a.dpace_alpha;
    d.weight = static_cast<float>(product);
    if (confidence) store(out(s, kLossConfWeight), d.weight);
    else store(a.draft_rows + s, d);
  }
  for (int64_t s = end; s-- > begin;) {
    LogitRow d = load(a.draft_rows + s);
    sum += static_cast<double>(confidence ? load(out(s, kLossConfWeight)) : d.weight);
    d.weight = static_cast<float>(sum);
    if (confidence) store(out(s, kLossConfWeight), d.weight);
    else store(a.draft_rows + s, d);
  }
}

// p, t and their logarithms at one element.
struct Pair {
  float draft_top, target_top, draft_inverse, target_inverse, shift;
  DS_DEVICE float p(float u) const { return expf(u - draft_top) * draft_inverse; }
  DS_DEVICE float t(float v) const { return expf(v - target_top) * target_inverse; }
  DS_DEVICE float log_ratio(float u, float v) const { return (u - v) - shift; }  // log(p / t)
};
DS_DEVICE Pair pair_of(const LogitRow& d, const LogitRow& t) { return {d.top, t.top, d.inverse, t.inverse, static_cast<float>(d.log_norm - t.log_norm)}; }

// log(p / m) and log(t / m), m = (p + t) / 2, from d = log(p / t): log(m / max) = log1p(exp(-|d|)) - log 2.
DS_DEVICE void mixture_logs(float d, float& p_over_m, float& t_over_m) {
  const float m = log1pf(expf(d > 0 ? -d : d)) - kLog2;
  p_over_m = (d > 0 ? 0.0f : d) - m;
  t_over_m = (d > 0 ? -d : 0.0f) - m;
}

// Sums over a row in the order of kSums.
enum Sum { kDistance, kOverlap, kBelow, kKlSum, kRklSum, kJsdSum, kMixture, kSums };

DS_DEVICE double confidence_target(double tv) { return tv > 1 ? 0.0 : tv < 0 ? 1.0 : 1 - tv; }

// The terms of one slot, and its gradient in the place of its draft logits: as bf16 in the front half of the row, or as fp32.
template <bool kMixtures>
DS_KERNEL void DS_THREADS(kBlock) loss_slot_kernel(LossChunkArgs a) {
  const Shared<double> scratch(0, kWarps);
  const int64_t s = block_x(), target_row = load(a.target_row + s) - a.row0, vocab = a.draft.cols;
  const Pair pair = pair_of(load(a.draft_rows + s), load(a.target_rows + target_row));
  float part[kSums] = {};
  double sums[kSums] = {};
  int chunks = 0;
  const auto flush = [&] {
    DS_UNROLL
    for (int k = 0; k < kSums; ++k) sums[k] += static_cast<double>(part[k]), part[k] = 0;
  };
  for_row_chunks(vocab, [&](int64_t col) {
    float u[kChunk], v[kChunk];
    load_chunk(u, a.draft, s, col);
    load_chunk(v, a.target, target_row, col);
    for (int i = 0; i < kChunk; ++i) {
      if (col + i >= vocab) break;
      const float p = pair.p(u[i]), q = pair.t(v[i]), log_ratio = pair.log_ratio(u[i], v[i]);
      part[kDistance] += p > q ? p - q : q - p;
      part[kOverlap] += p > q ? q : p;
      part[kBelow] += p > q ? 0.0f : p < q ? p : 0.5f * p;
      part[kKlSum] -= q * log_ratio;
      part[kRklSum] += p * log_ratio;
      if constexpr (kMixtures) {
        float p_log, t_log;
        mixture_logs(log_ratio, p_log, t_log);
        part[kJsdSum] += p * p_log + q * t_log;
        part[kMixture] += p * p_log;
      }
    }
    if (++chunks % kFlush == 0) flush();
  });
  flush();
  for (int k = 0; k < kSums; ++k) sums[k] = block_sum(sums[k], scratch);

  const LogitRow d = load(a.draft_rows + s);  // here, for the registers that the sweep needs
  const double tv = 0.5 * sums[kDistance], accept = sums[kOverlap], lk = exp(-3 * accept);  // lk's weight is detached
  const bool floored = accept <= 1e-5;
  float confidence = 0;
  if (a.conf_w) {
    float dot = 0;
    for_row_chunks(a.conf_w.cols, [&](int64_t col) {
      float w[kChunk], x[kChunk];
      load_chunk(w, a.conf_w, 0, col);
      load_chunk(x, a.joint_hidden, s, col);
      for (int i = 0; i < kChunk; ++i) dot += w[i] * x[i];
    });
    if (a.conf_w_e)
      for_row_chunks(a.conf_w_e.cols, [&](int64_t col) {
        float w[kChunk], x[kChunk];
        load_chunk(w, a.conf_w_e, 0, col);
        load_chunk(x, a.conf_e, s, col);
        for (int i = 0; i < kChunk; ++i) dot += w[i] * x[i];
      });
    confidence = static_cast<float>(block_sum(static_cast<double>(dot), scratch) + static_cast<double>(load(a.conf_b)));
  }
  if (thread() == 0) {
    float* out = a.slot_out + s * a.slot_stride;
    const auto put = [&](int term, double v) { store(out + term, static_cast<float>(term == kLossTv || term > kLossConf || a.coef[term] != 0 ? v : 0.0)); };
    put(kLossCe, d.label < 0 ? 0.0 : d.log_norm - static_cast<double>(d.label_logit));
    put(kLossTv, tv);
    put(kLossKl, sums[kKlSum]);
    put(kLossRkl, sums[kRklSum]);
    put(kLossJsd, 0.5 * sums[kJsdSum]);
    put(kLossNla, -log(floored ? 1e-5 : accept));
    put(kLossLk, lk * sums[kKlSum] + (1 - lk) * tv);
    const double z = static_cast<double>(confidence);
    put(kLossConf, (z > 0 ? z : 0.0) + log1p(exp(-fabs(z))) - confidence_target(tv) * z);
    put(kLossAccept, accept);
    put(kLossConfLogit, z);
    put(kLossDraftTop, d.arg);
    put(kLossTargetTop, load(a.target_rows + target_row).arg);
    put(kLossWeight, static_cast<double>(d.weight));
    put(kLossConfWeight, static_cast<double>(load(a.conf_weight + s)));
  }
  if (!a.backward) return;

  const auto factor = [&](int term) { return a.coef[term] * static_cast<double>(load(a.scale + term)) * static_cast<double>(d.weight); };
  const double ce = d.label < 0 ? 0.0 : factor(kLossCe), kl = factor(kLossKl) + lk * factor(kLossLk);
  const double variation = factor(kLossTv) + (1 - lk) * factor(kLossLk) + (floored ? 0.0 : factor(kLossNla) / accept);
  const auto signs = static_cast<float>(0.5 * variation), rkl = static_cast<float>(factor(kLossRkl)), mixture = static_cast<float>(0.5 * factor(kLossJsd));
  const auto of_target = static_cast<float>(kl), at_label = static_cast<float>(ce);
  // sign - sum p sign = 2 (sum p below - below), below = 1, 1/2 or 0: without the ones, which would cancel only up to rounding
  // where almost all of p lies above t, just where nla's factor 1 / acceptance is large.
  const float constant = static_cast<float>(ce + kl) + 2 * signs * static_cast<float>(sums[kBelow]) - rkl * static_cast<float>(sums[kRklSum]) - mixture * static_cast<float>(sums[kMixture]);
  Matrix out = a.draft;
  if (a.half_gradient) out.half = true, out.stride *= 2;
  // All threads take a stretch of the row together: it is read as a whole before the gradient goes over its front.
  for (int64_t base = 0; base < vocab; base += int64_t{kBlock} * kChunk) {
    const int64_t col = base + int64_t{thread()} * kChunk;
    float u[kChunk] = {}, v[kChunk] = {};
    if (col < vocab) {
      load_chunk(u, a.draft, s, col);
      load_chunk(v, a.target, target_row, col);
      for (int i = 0; i < kChunk; ++i) {
        const float p = pair.p(u[i]), q = pair.t(v[i]), log_ratio = pair.log_ratio(u[i], v[i]);
        float f = constant - (p > q ? 0.0f : p < q ? 2 * signs : signs) + rkl * log_ratio;
        if constexpr (kMixtures) {
          float p_log, t_log;
          mixture_logs(log_ratio, p_log, t_log);
          f += mixture * p_log;
        }
        u[i] = p * f - of_target * q - (col + i == d.label ? at_label : 0.0f);
      }
    }
    sync_block();
    if (col < vocab) store_chunk(u, out, s, col);
  }
}

// Gradient by the confidence logit of every slot.
DS_KERNEL void DS_THREADS(kBlock) loss_conf_logits_kernel(float* d_logit, const float* slot_out, int64_t slot_stride, int64_t slots, const float* scale, double coef) {
  for (int64_t s = block_x() * threads() + thread(); s < slots; s += blocks_x() * threads()) {
    const float* out = slot_out + s * slot_stride;
    const double sigmoid = 1 / (1 + exp(-static_cast<double>(load(out + kLossConfLogit))));
    store(d_logit + s, static_cast<float>(coef * static_cast<double>(load(scale + kLossConf)) * static_cast<double>(load(out + kLossConfWeight)) *
                                          (sigmoid - confidence_target(static_cast<double>(load(out + kLossTv))))));
  }
}

// y[s] += d[s] w.
DS_KERNEL void DS_THREADS(kBlock) add_outer_kernel(Matrix y, const float* d, Matrix w) {
  for_chunks(y.rows, y.cols, [&](int64_t row, int64_t col) {
    float v[kChunk], x[kChunk];
    load_chunk(v, y, row, col);
    load_chunk(x, w, 0, col);
    const float factor = load(d + row);
    DS_UNROLL
    for (int i = 0; i < kChunk; ++i) v[i] += factor * x[i];
    store_chunk(v, y, row, col);
  });
}

Dim a_thread_each(int64_t n) { return {static_cast<unsigned>((n + kBlock - 1) / kBlock)}; }

}  // namespace

void loss_stats(Stream stream, Matrix logits, LogitRow* out) { launch(stream, {static_cast<unsigned>(logits.rows)}, {kBlock}, kWarps * 16, loss_stats_kernel, logits, out); }
void loss_labels(Stream stream, const LossChunkArgs& a) { launch(stream, a_thread_each(a.draft.rows), {kBlock}, 0, loss_labels_kernel, a); }
void loss_dpace(Stream stream, const LossChunkArgs& a, bool confidence) { launch(stream, a_thread_each(a.draft.rows), {kBlock}, 0, loss_dpace_kernel, a, confidence); }
void loss_slots(Stream stream, const LossChunkArgs& a) {
  launch(stream, {static_cast<unsigned>(a.draft.rows)}, {kBlock}, kWarps * 8, a.coef[kLossJsd] != 0 ? loss_slot_kernel<true> : loss_slot_kernel<false>, a);
}
void loss_conf_logits(Stream stream, float* d_logit, const float* slot_out, int64_t slot_stride, int64_t slots, const float* scale, double coef) {
  if (slots > 0) launch(stream, a_thread_each(slots), {kBlock}, 0, loss_conf_logits_kernel, d_logit, slot_out, slot_stride, slots, scale, coef);
}
void add_outer(Stream stream, Matrix y, const float* d, Matrix w) {
  if (y.rows * y.cols > 0) launch(stream, chunk_grid(y.rows, y.cols), {kBlock}, 0, add_outer_kernel, y, d, w);
}

}  // namespace dspark::cuda
