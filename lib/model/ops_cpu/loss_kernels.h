// The sweeps of the vocabulary loss over one row of logits (isa/vocab_loss.cc). A row is given in one of two forms:
//   probabilities: exp(logit - top), written over the logits by loss_stats (cheap; all that ce, tv and nla need);
//   logits: as they are, exponentials taken in every sweep (kl, rkl, jsd and lk need logarithms).
// Sums run in blocks of fp32 lanes, added up in fp64.
#pragma once

#include "model/ops_cpu/kernel_types.h"

namespace dspark::model::cpu {

struct LogitStats {
  double sum;   // of exp(logit - top)
  float top;
  int32_t arg;  // the lowest index of top
};

struct LossRow {
  int64_t n;
  int logits;                             // form of both rows
  const float* draft;                     // [n]
  const float* target;                    // [n]
  float draft_top, target_top;
  float draft_inverse, target_inverse;    // 1 / sum
  float shift;                            // log-normaliser of draft - that of target
  int mixture;                            // logits form: jsd and its gradient are wanted
};

// With p = draft_prob, t = target_prob, m = (p + t) / 2.
struct LossSums {
  double distance;  // sum |p - t|
  double overlap;   // sum min(p, t)
  double below;     // sum of p where p < t, and of half of it where they are equal
  double kl;        // sum t log(t / p)
  double rkl;       // sum p log(p / t)
  double jsd;       // sum (p log(p / m) + t log(t / m)) / 2
  double mixture;   // sum p log(p / m)
};

// d_logit = p (shared + signs (sign(p - t) - sum p sign(p - t)) + rkl (log(p / t) - sums.rkl) + mixture (log(p / m) - sums.mixture))
//           - target t - [label] ce
struct LossGradient {
  float shared, target, ce, signs, rkl, mixture;
  int64_t label;  // -1: none
};

#define DS_LOSS_KERNELS(X)                                                                                             \
  /* keep: the row becomes exp(logit - top) */                                                                         \
  X(void, loss_stats, (float* logits, int64_t n, int keep, LogitStats* out))                                           \
  X(void, loss_sums, (const LossRow& row, LossSums* out))                                                              \
  /* out [n], fp32 or bf16, may begin where row.draft begins: it is written behind the reading */                      \
  X(void, loss_gradient, (const LossRow& row, const LossSums& sums, const LossGradient& g, Out out))                   \
  /* y += a x */                                                                                                       \
  X(void, loss_add, (float* y, In x, float a, int64_t n))

}  // namespace dspark::model::cpu
