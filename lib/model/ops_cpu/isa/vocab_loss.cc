// Sweeps over one row of the vocabulary: maximum and normaliser, sums of the terms, gradient.
#include "model/ops_cpu/isa/vec.h"

namespace dspark::model::cpu::DS_ISA {
namespace {

constexpr int64_t kBlock = 1024;  // elements whose sums stay in fp32
constexpr float kLowest = -1e30f;  // a logit without weight; finite, so that differences are

// Sums of a block's vectors, added up in double.
template <int kSums>
struct Accumulator {
  vf lanes[kSums] = {};
  double total[kSums] = {};
  void flush() {
    for (int i = 0; i < kSums; ++i) {
      total[i] += static_cast<double>(sum_of(lanes[i]));
      lanes[i] = vf{};
    }
  }
};

// What p, t and their logarithms are at one vector of a row; tails are filled up with elements of no weight.
template <bool kLogits>
struct Reader {
  const LossRow& row;
  vf draft(int64_t i) const { return at(row.draft, i); }
  vf target(int64_t i) const { return at(row.target, i); }
  vf p(vf u) const { return (kLogits ? exp_v(u - row.draft_top) : u) * row.draft_inverse; }
  vf t(vf v) const { return (kLogits ? exp_v(v - row.target_top) : v) * row.target_inverse; }
  vf at(const float* x, int64_t i) const {
    return i + kWidth <= row.n ? load_v(x + i) : load_part(x + i, row.n - i, kLogits ? kLowest : 0.0f);
  }
};

// log(p / m) and log(t / m) from d = log(p / t): log(m / max) = log1p(exp(-|d|)) - log 2.
DS_INLINE void mixture_logs(vf d, vf* p_over_m, vf* t_over_m) {
  const vi larger = d > vf{};
  const vf below = select(larger, -d, d);
  const vf m = log1p_v(exp_v(below)) - 0.693147180559945309f;
  *p_over_m = select(larger, vf{}, d) - m;
  *t_over_m = select(larger, -d, vf{}) - m;
}

template <bool kLogits, bool kMixture>
void sums(const LossRow& row, LossSums* out) {
  const Reader<kLogits> read{row};
  Accumulator<7> acc;
  for (int64_t block = 0; block < row.n; block += kBlock) {
    const int64_t end = block + kBlock < row.n ? block + kBlock : row.n;
    for (int64_t i = block; i < end; i += kWidth) {
      const vf u = read.draft(i), v = read.target(i), p = read.p(u), t = read.t(v), d = p - t;
      const vi more = d > vf{}, less = d < vf{};
      acc.lanes[0] += select(more, d, -d);
      acc.lanes[1] += select(more, t, p);
      acc.lanes[2] += select(more, vf{}, select(less, p, 0.5f * p));
      if (kLogits) {
        const vf log_ratio = (u - v) - row.shift;  // log(p / t)
        acc.lanes[3] -= t * log_ratio;
        acc.lanes[4] += p * log_ratio;
        if (kMixture) {
          vf p_log, t_log;
          mixture_logs(log_ratio, &p_log, &t_log);
          acc.lanes[5] += p * p_log + t * t_log;
          acc.lanes[6] += p * p_log;
        }
      }
    }
    acc.flush();
  }
  *out = {.distance = acc.total[0], .overlap = acc.total[1], .below = acc.total[2], .kl = acc.total[3],
          .rkl = acc.total[4], .jsd = 0.5 * acc.total[5], .mixture = acc.total[6]};
}

template <bool kLogits, bool kMixture, typename T>
void gradient(const LossRow& row, const LossSums& s, const LossGradient& g, T* out) {
  const Reader<kLogits> read{row};
  // sign - sum p sign = 2 (sum p below - below), below = 1, 1/2 or 0: without the ones, which would cancel only up to rounding
  // where almost all of p lies above t, just where nla's factor 1 / acceptance is large.
  const float constant = g.shared + 2 * g.signs * static_cast<float>(s.below) - g.rkl * static_cast<float>(s.rkl) -
                         g.mixture * static_cast<float>(s.mixture);
  const auto element = [&](vf u, vf v) {
    const vf p = read.p(u), t = read.t(v);
    vf factor = splat(constant);
    factor -= select(p > t, vf{}, select(p < t, splat(2 * g.signs), splat(g.signs)));
    if (kLogits) {
      const vf log_ratio = (u - v) - row.shift;
      factor += g.rkl * log_ratio;
      if (kMixture) {
        vf p_log, t_log;
        mixture_logs(log_ratio, &p_log, &t_log);
        factor += g.mixture * p_log;
      }
    }
    return p * factor - g.target * t;
  };
  // Before the row is overwritten; rounded once.
  const float at_label =
      g.label < 0 ? 0.0f : element(splat(row.draft[g.label]), splat(row.target[g.label]))[0] - g.ce;
  int64_t i = 0;
  for (; i + kWidth <= row.n; i += kWidth) store_v(out + i, element(read.draft(i), read.target(i)));
  if (i < row.n) store_part(out + i, row.n - i, element(read.draft(i), read.target(i)));
  if (g.label >= 0) store(out + g.label, at_label);
}

template <bool kValue>
struct Constant {
  static constexpr bool value = kValue;
};
// Calls f with the constants of the row's form.
template <typename F>
DS_INLINE void by_form(const LossRow& row, F f) {
  if (!row.logits)
    f(Constant<false>{}, Constant<false>{});
  else if (row.mixture)
    f(Constant<true>{}, Constant<true>{});
  else
    f(Constant<true>{}, Constant<false>{});
}

}  // namespace

void loss_stats(float* logits, int64_t n, int keep, LogitStats* out) {
  vf tops[4];
  for (vf& t : tops) t = splat(-__builtin_inff());
  int64_t i = 0;
  for (; i + 4 * kWidth <= n; i += 4 * kWidth)
    for (int j = 0; j < 4; ++j) tops[j] = max(tops[j], load_v(logits + i + j * kWidth));
  for (; i < n; i += kWidth)
    tops[0] = max(tops[0], i + kWidth <= n ? load_v(logits + i) : load_part(logits + i, n - i, kLowest));
  const float top = max_of(max(max(tops[0], tops[1]), max(tops[2], tops[3])));

  int64_t arg = 0;  // the block that holds it, then itself; 0 where nothing compares equal (NaN)
  for (int64_t block = 0; block < n; block += kBlock) {
    const int64_t end = block + kBlock < n ? block + kBlock : n;
    int found = 0;
    for (int64_t j = block; j < end; ++j) found |= logits[j] == top;
    if (!found) continue;
    for (arg = block; logits[arg] != top; ++arg) {
    }
    break;
  }

  Accumulator<1> acc;
  for (int64_t block = 0; block < n; block += kBlock) {
    const int64_t end = block + kBlock < n ? block + kBlock : n;
    for (i = block; i + kWidth <= end; i += kWidth) {
      const vf e = exp_v(load_v(logits + i) - top);
      acc.lanes[0] += e;
      if (keep) store_v(logits + i, e);
    }
    if (i < end) {
      const vf e = exp_v(load_part(logits + i, end - i, kLowest) - top);
      acc.lanes[0] += e;
      if (keep) store_part(logits + i, end - i, e);
    }
    acc.flush();
  }
  *out = {.sum = acc.total[0], .top = top, .arg = static_cast<int32_t>(arg)};
}

void loss_sums(const LossRow& row, LossSums* out) {
  by_form(row, [&](auto logits, auto mixture) { sums<logits.value, mixture.value>(row, out); });
}

void loss_gradient(const LossRow& row, const LossSums& s, const LossGradient& g, Out out) {
  with(out, [&](auto* o) {
    by_form(row, [&](auto logits, auto mixture) { gradient<logits.value, mixture.value>(row, s, g, o); });
  });
}

void loss_add(float* y, In x, float a, int64_t n) {
  with(x, [&](auto* v) {
    int64_t i = 0;
    for (; i + kWidth <= n; i += kWidth) store_v(y + i, load_v(y + i) + a * load_v(v + i));
    for (; i < n; ++i) y[i] += a * load(v[i]);
  });
}

}  // namespace dspark::model::cpu::DS_ISA
