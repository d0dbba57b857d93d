// Cases of sum_squares, finish_norm, adamw, muon.
#include "op_table.h"

namespace dspark::test {

using namespace model;

namespace {

std::vector<double> step_scalars(double finite, double clip) {
  std::vector<double> s(kNumStepScalars, 0.0);
  s[kLr] = 0.0078125;
  s[kGradScale] = 0.5;
  s[kMaxNorm] = 1;
  s[kSteps] = 4;
  s[kBias1] = 0.09999999403953552;
  s[kBias2] = 0.0010000000474974513;
  s[kGradNorm] = 3;
  s[kClip] = clip;
  s[kFinite] = finite;
  return s;
}

void finish(OpRun& run, const std::vector<double>& sums, double max_norm, bool finite) {
  std::vector<double> s = step_scalars(0, 0);
  s[kMaxNorm] = max_norm;
  // The scalars are in-out: given first, then copied where they are compared.
  const Tensor out = run.output("scalars", Kind::acc, 1, kNumStepScalars);
  copy(run.ctx(), {out, run.given("start", Kind::acc, 1, kNumStepScalars, s)});
  if (!finite) run.watch("scalars", "finite", kFinite, 1, true);
  finish_norm(run.ctx(), {out, run.given("sums", Kind::acc, 1, static_cast<int64_t>(sums.size()), sums)});
}

}  // namespace

void add_optimizer_cases(OpCases& cases) {
  for (const auto& [r, c] : {std::pair<int64_t, int64_t>{0, 4}, {1, 1}, {3, 7}, {5, 65}, {33, 129}, {2, 4099}}) {
    cases.push_back({"sum_squares", fmt::format("[{}, {}]", r, c), [=, r = r, c = c](OpRun& run) {
                       sum_squares(run.ctx(), {run.output("sum", Kind::acc, 1, 1), run.input("grad", Kind::acc, r, c)});
                     }});
    for (const bool with_value : {true, false}) {
      cases.push_back(
          {"adamw", fmt::format("[{}, {}]{}", r, c, with_value ? " with a cast" : ""), [=, r = r, c = c](OpRun& run) {
             AdamW a;
             a.master = run.inout("master", Kind::acc, r, c);
             a.m = run.inout("m", Kind::acc, r, c, 0.1);
             // v is a mean of squares: never negative
             a.v = run.output("v", Kind::acc, r, c);
             const Tensor start =
                 run.given("v_start", Kind::acc, r, c, std::vector<double>(static_cast<size_t>(r * c), 0.0625));
             copy(run.ctx(), {a.v, start});
             a.grad = run.input("grad", Kind::acc, r, c);
             if (with_value) a.value = run.output("value", Kind::act, r, c);
             a.scalars = run.given("scalars", Kind::acc, 1, kNumStepScalars, step_scalars(1, 0.25));
             a.weight_decay = 0.1;
             a.lr_factor = 2;
             adamw(run.ctx(), a);
           }});
    }
  }
  cases.push_back({"adamw", "nothing changes when the norm is not finite", [](OpRun& run) {
                     AdamW a;
                     a.master = run.inout("master", Kind::acc, 3, 19, 1, true);
                     a.m = run.inout("m", Kind::acc, 3, 19, 1, true);
                     a.v = run.inout("v", Kind::acc, 3, 19, 1, true);
                     a.value = run.inout("value", Kind::act, 3, 19, 1, true);
                     a.grad = run.given("grad", Kind::acc, 3, 19,
                                        std::vector<double>(57, std::numeric_limits<double>::quiet_NaN()));
                     a.scalars = run.given("scalars", Kind::acc, 1, kNumStepScalars, step_scalars(0, 1));
                     adamw(run.ctx(), a);
                   }});
  for (const auto& [r, c] : {std::pair<int64_t, int64_t>{2, 2}, {5, 65}, {65, 5}, {33, 33}, {129, 70}, {70, 129}})
    for (const bool with_value : {true, false})
      cases.push_back({"muon", fmt::format("[{}, {}]{}", r, c, with_value ? " with a cast" : ""), [=, r = r, c = c](OpRun& run) {
                         Muon a;
                         a.master = run.inout("master", Kind::acc, r, c);
                         a.buf = run.inout("buf", Kind::acc, r, c, 0.1);
                         a.grad = run.input("grad", Kind::acc, r, c);
                         // Products see X, which is made of these two, rounded.
                         run.stored("grad rounded", Kind::act, a.grad);
                         run.stored("buf rounded", Kind::act, a.buf);
                         if (with_value) a.value = run.output("value", Kind::act, r, c);
                         a.scalars = run.given("scalars", Kind::acc, 1, kNumStepScalars, step_scalars(1, 0.25));
                         a.work = run.work_bytes(muon_work(run.ctx(), r, c));
                         a.size = muon_size(r, c), a.weight_decay = 0.1, a.lr_factor = 2;
                         // Three iterations: five make a bf16 difference of any size (the singular values oscillate).
                         a.iterations = 3;
                         muon(run.ctx(), a);
                       }});
  cases.push_back({"muon", "nothing changes when the norm is not finite", [](OpRun& run) {
                     Muon a;
                     a.master = run.inout("master", Kind::acc, 3, 19, 1, true);
                     a.buf = run.inout("buf", Kind::acc, 3, 19, 1, true);
                     a.value = run.inout("value", Kind::act, 3, 19, 1, true);
                     a.grad = run.given("grad", Kind::acc, 3, 19, std::vector<double>(57, std::numeric_limits<double>::quiet_NaN()));
                     a.scalars = run.given("scalars", Kind::acc, 1, kNumStepScalars, step_scalars(0, 1));
                     a.work = run.work_bytes(muon_work(run.ctx(), 3, 19));
                     muon(run.ctx(), a);
                   }});
  constexpr double kInfinity = std::numeric_limits<double>::infinity(), kNan = std::numeric_limits<double>::quiet_NaN();
  cases.push_back({"finish_norm", "clipped", [](OpRun& run) { finish(run, {4, 9, 0.25}, 1, true); }});
  cases.push_back({"finish_norm", "below the limit", [](OpRun& run) { finish(run, {0.25, 0.0625}, 1, true); }});
  cases.push_back({"finish_norm", "no limit", [](OpRun& run) { finish(run, {1e6, 3}, 0, true); }});
  cases.push_back({"finish_norm", "no gradient", [](OpRun& run) { finish(run, {}, 1, true); }});
  cases.push_back({"finish_norm", "infinite", [=](OpRun& run) { finish(run, {1, kInfinity}, 1, false); }});
  cases.push_back({"finish_norm", "not a number", [=](OpRun& run) { finish(run, {kNan, 1}, 1, false); }});
}

}  // namespace dspark::test
