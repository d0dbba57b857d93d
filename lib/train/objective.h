// The training objective's choices (DESIGN 4) and what comes out of the loss head a step.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "model/batch_plan.h"

namespace dspark::train {

// The loss terms as --loss, --json and the report call them.
inline constexpr std::array<const char*, model::kNumTerms> kTermNames = {"ce", "tv", "kl", "rkl", "jsd", "nla", "lk_hybrid", "conf"};

enum class Denominator : uint8_t {
  pooled,  // sum of w over the whole batch, all ranks and micro-steps: applied by the optimizer
  micro,   // (sum of w + 1e-6) of one micro-step over all ranks; micro-steps averaged (DeepSpec to the letter)
  count,   // supervised slots of one micro-step on one rank (+ 1e-5; conf: + 1e-8); ranks and micro-steps averaged (speculators)
};

struct Objective {
  std::array<double, model::kNumTerms> coef{};  // per term; DeepSpec's l1 0.9 is tv 1.8
  double gamma = 4.0;
  Denominator denominator = Denominator::pooled;
  model::SlotRule slots = model::SlotRule::label_prefix;
  bool label_from_target = false;  // ce's label is the target's arg-max (speculators), not the data's token
  double dpace_alpha = 0;          // > 0: D-PACE weights instead of exp(-k/gamma), but for conf
  bool dpace_confidence = false;   // for conf too (speculators before 0.9)
  bool detach_confidence = false;  // the confidence loss stops at its own weights

  // What a micro-step's sum of weighted terms is multiplied with before the backward. weight_sum: of the micro-step over all ranks;
  // < 0: this row is all of it.
  double scale(int term, const model::BatchPlan& plan, double weight_sum = -1) const;
};

// The bundles: deepspec DSpark (ce 0.1, tv 1.8, conf 1) and DFlash (ce only).
Objective deepspec_objective(bool confidence);
Objective dflash_objective();

// Slots whose predicted confidence lies in one tenth of [0, 1]: a point of a reliability diagram.
struct CalibrationBin {
  double slots = 0, confidence_sum = 0, accept_sum = 0;
};

// Sums over supervised slots, in fp64 in slot order; micro-steps and ranks add up.
struct StepMetrics {
  std::array<double, model::kNumTerms> term_sum{};  // of w * term
  double weight_sum = 0;                            // of the decay weights (conf's), whatever the terms used
  double slots = 0, blocks = 0;                     // blocks: with at least one supervised slot
  double tau_sum = 0;                               // over blocks: 1 + sum of prefix products of acceptance
  double conf_bias_sum = 0, conf_abs_sum = 0;       // of w * (sigmoid(logit) - accept), absolute; with `count` every w is 1
  double conf_sum = 0;                              // of those w
  std::array<CalibrationBin, 10> calibration{};     // every slot counts the same
  std::vector<double> accept_sum, top1_sum, slot_count;  // [B] per slot index

  void add(const StepMetrics& other);
  double loss(const Objective& o) const;  // over everything that was added
  double term(const Objective& o, int t) const;  // mean of one term, as the loss divides it
  double tau() const { return blocks > 0 ? tau_sum / blocks : 0; }
};

// The sums as one list, whose length depends on the block alone, and back: how ranks add them up.
std::vector<double> metric_sums(const StepMetrics& m, int64_t block);
StepMetrics metrics_from_sums(std::span<const double> sums, int64_t block);

// slot_out: [S, kSlotOutCols] as downloaded.
StepMetrics reduce_metrics(const model::BatchPlan& plan, std::span<const double> slot_out, const Objective& objective, bool confidence);

}  // namespace dspark::train
