#include "cuda_cases.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>

#include "core/rng.h"

namespace dspark::test {

using model::Context;
using model::Precision;
using model::Tensor;

OpCases wide_cases() {
  OpCases cases;
  const auto add = [&](const char* op, std::function<void(OpRun&)> run) { cases.push_back({op, "wide", std::move(run)}); };
  add("copy", [](OpRun& run) {
    const Tensor x = run.input("x", Kind::acc, 70, 264);
    const Tensor y = run.output("y", Kind::act, 70, 264, true);
    model::copy(run.ctx(), {y, x});
    model::copy(run.ctx(), {run.output("z", Kind::acc, 70, 264, true), y});
    model::fill(run.ctx(), {run.output("filled", Kind::act, 70, 264, true), -3});
  });
  add("rmsnorm", [](OpRun& run) {
    const Tensor x = run.input("x", Kind::acc, 67, 2064), w = run.input("w", Kind::acc, 1, 2064), delta = run.input("delta", Kind::act, 67, 2064);
    const Tensor sum = run.output("sum", Kind::acc, 67, 2064), inv_rms = run.output("inv_rms", Kind::acc, 1, 67);
    model::add_rmsnorm(run.ctx(), {.y = run.output("y", Kind::act, 67, 2064), .x_out = sum, .x = x, .delta = delta, .weight = w, .inv_rms = inv_rms});
    const Tensor dy = run.input("dy", Kind::act, 67, 2064);
    model::rmsnorm_backward(run.ctx(), {.d_x = run.output("gradient", Kind::acc, 67, 2064), .d_weight = run.output("weight gradient", Kind::acc, 1, 2064), .dy = dy, .x = sum, .weight = w, .inv_rms = inv_rms});
    const Tensor biased = run.inout("biased", Kind::act, 67, 2064);
    model::add_bias(run.ctx(), {biased, w});
  });
  add("qk_norm_rope", [](OpRun& run) {
    const int64_t n = 3, heads = 40, hd = 128;
    std::vector<double> frequencies;
    for (int i = 0; i < 64; ++i) frequencies.push_back(static_cast<double>(static_cast<float>(std::pow(1e6, -i / 64.0))));
    const Tensor x = run.input("x", Kind::act, n, heads * hd), w = run.input("w", Kind::acc, 1, hd), inv_rms = run.output("inv_rms", Kind::acc, n, heads);
    const Tensor position = run.ints("position", {0, 777, 1000003});
    const model::Rope rope{run.given("inv_freq", Kind::acc, 1, 64, frequencies), hd, 1.25};
    model::qk_norm_rope(run.ctx(), {.y = run.output("y", Kind::act, n, heads * hd), .x = x, .weight = w, .position = position, .inv_rms = inv_rms, .rope = rope, .head_dim = hd});
    model::qk_norm_rope_backward(run.ctx(), {.d_x = run.output("gradient", Kind::act, n, heads * hd), .d_weight = run.output("weight gradient", Kind::acc, 1, hd),
                                             .dy = run.input("dy", Kind::act, n, heads * hd), .x = x, .weight = w, .position = position, .inv_rms = inv_rms, .rope = rope, .head_dim = hd});
  });
  add("swiglu", [](OpRun& run) {
    const Tensor gate_up = run.input("gate_up", Kind::act, 5, 2 * 1032), dy = run.input("dy", Kind::act, 5, 1032);
    model::swiglu(run.ctx(), {run.output("y", Kind::act, 5, 1032), gate_up});
    model::swiglu_backward(run.ctx(), {run.output("gradient", Kind::act, 5, 2 * 1032), dy, gate_up});
  });
  add("scatter_add_rows", [](OpRun& run) {
    const Tensor table = run.written("table", Kind::acc, 4, 264, model::Write::overwrite), rows = run.input("rows", Kind::act, 5, 264);
    model::scatter_add_rows(run.ctx(), {table, rows, run.ints("row_of", {3, 1}), run.ints("begin", {0, 2, 5}), run.ints("source", {4, 0, 1, 2, 3}), model::Write::overwrite});
    model::gather_rows(run.ctx(), {run.output("gathered", Kind::act, 3, 264), table, run.ints("index", {1, -1, 3})});
  });
  add("adamw", [](OpRun& run) {
    const Tensor grad = run.input("grad", Kind::acc, 33, 4104);
    model::sum_squares(run.ctx(), {run.output("sum", Kind::acc, 1, 1), grad});
    std::vector<double> scalars(model::kNumStepScalars, 0.0);
    scalars[model::kLr] = 0.0078125, scalars[model::kGradScale] = 0.5, scalars[model::kClip] = 0.25, scalars[model::kFinite] = 1;
    scalars[model::kBias1] = 0.125, scalars[model::kBias2] = 0.0009765625;
    const Tensor v = run.output("v", Kind::acc, 33, 4104);
    model::fill(run.ctx(), {v, 0.0625});
    model::adamw(run.ctx(), {run.inout("master", Kind::acc, 33, 4104), run.inout("m", Kind::acc, 33, 4104, 0.1), v, grad, run.output("value", Kind::act, 33, 4104),
                             run.given("scalars", Kind::acc, 1, model::kNumStepScalars, scalars)});
  });
  add("linear", [](OpRun& run) {
    model::Weight* w = run.weight("w", 24, 40);
    const Tensor x = run.input("x", Kind::act, 8, 40), dy = run.input("dy", Kind::act, 8, 24);
    model::linear(run.ctx(), {run.output("y", Kind::act, 8, 24), x, w});
    model::linear_dx(run.ctx(), {run.output("dx", Kind::acc, 8, 40), dy, w});
    model::linear_dw(run.ctx(), {run.output("dw", Kind::acc, 24, 40), dy, x});
    model::linear_dw(run.ctx(), {run.output("nothing", Kind::acc, 24, 40), dy.row_range(0, 0), x.row_range(0, 0)});
  });
  return cases;
}

void check_choices(Context& cuda) {
  const auto cpu = model::make_cpu_backend({.precision = Precision::fp32, .threads = 1});
  constexpr int64_t kVocab = 3001, kDrafted = 5, kMapped = 700;
  const Rng values(3, RngStream::test), uniforms(4, RngStream::sampling);
  std::vector<double> logits(static_cast<size_t>((2 * kDrafted + 1) * kVocab));
  for (size_t i = 0; i < logits.size(); ++i) logits[i] = std::round(6 * values.normal(i)) / 4;  // many ties
  std::vector<int32_t> map(kMapped);
  for (size_t j = 0; j < map.size(); ++j) map[j] = static_cast<int32_t>((j * 1009 + 17) % kVocab);

  struct Outcome {
    std::vector<double> draft, target;
    std::vector<int32_t> ids, raw, result;
  };
  const auto run = [&](Context& ctx, const model::SamplingParams& params, bool mapped, uint64_t round) {
    std::vector<Tensor> owned;
    const auto put = [&](DType dtype, int64_t rows, int64_t cols, const void* p, DType from) {
      owned.push_back(ctx.allocate(dtype, rows, cols));
      if (p != nullptr) ctx.upload_now(owned.back(), {p, from, rows, cols, cols});
      return owned.back();
    };
    const int64_t draft_vocab = mapped ? kMapped : kVocab;
    const Tensor draft = put(DType::f32, kDrafted, draft_vocab, logits.data(), DType::f64), target = put(DType::f32, kDrafted + 1, kVocab, logits.data() + kDrafted * kVocab, DType::f64);
    const Tensor draft_probs = put(DType::f32, kDrafted, draft_vocab, nullptr, DType::f32), target_probs = put(DType::f32, kDrafted + 1, kVocab, nullptr, DType::f32);
    model::token_probs(ctx, {draft_probs, draft, params});
    model::token_probs(ctx, {target_probs, target, params});
    std::vector<double> u;
    for (uint64_t i = 0; i < 2 * kDrafted + 1; ++i) u.push_back(uniforms.uniform(round * 100 + i));
    const Tensor draws = put(DType::f64, 1, kDrafted, u.data(), DType::f64), accepts = put(DType::f64, 1, kDrafted + 1, u.data() + kDrafted, DType::f64);
    const Tensor ids = put(DType::i32, 1, kDrafted, nullptr, DType::i32), raw = put(DType::i32, 1, kDrafted, nullptr, DType::i32), result = put(DType::i32, 1, 2, nullptr, DType::i32);
    const Tensor ids_of = mapped ? put(DType::i32, 1, kMapped, map.data(), DType::i32) : Tensor{};
    model::sample_tokens(ctx, {ids, draft_probs, draws, ids_of, raw});
    model::verify_block(ctx, {result, ids, draft_probs, ids_of, target_probs, accepts, put(DType::f32, 1, kVocab, nullptr, DType::f32)});
    const auto floats = [&](const Tensor& t) {
      std::vector<double> v(static_cast<size_t>(t.size()));
      ctx.download_now({v.data(), DType::f64, t.rows, t.cols, t.cols}, t);
      return v;
    };
    const auto ints = [&](const Tensor& t) {
      std::vector<int32_t> v(static_cast<size_t>(t.size()));
      ctx.download_now({v.data(), DType::i32, t.rows, t.cols, t.cols}, t);
      return v;
    };
    const Outcome o{floats(draft_probs), floats(target_probs), ints(ids), ints(raw), ints(result)};
    for (const Tensor& t : owned) ctx.free(t);
    return o;
  };
  const model::SamplingParams settings[] = {{}, {.temperature = 0}, {.temperature = 0.7, .top_k = 50, .top_p = 0.9}, {.top_p = 0.95, .min_p = 0.01}};
  std::set<int32_t> accepted;
  uint64_t round = 0;
  for (const model::SamplingParams& params : settings)
    for (const bool mapped : {false, true})
      for (int repeat = 0; repeat < 4; ++repeat, ++round) {
        INFO("temperature " << params.temperature << " top_k " << params.top_k << " top_p " << params.top_p << (mapped ? ", mapped" : "") << ", round " << round);
        const Outcome got = run(cuda, params, mapped, round), want = run(cpu->context(), params, mapped, round);
        for (const auto& [g, w] : {std::pair{&got.draft, &want.draft}, std::pair{&got.target, &want.target}})
          for (size_t i = 0; i < w->size(); ++i) {
            const bool same = ((*g)[i] > 0) == ((*w)[i] > 0) && std::fabs((*g)[i] - (*w)[i]) <= 1e-6 * (*w)[i];
            if (!same) FAIL("probability " << i << ": " << (*g)[i] << " for " << (*w)[i]);
          }
        CHECK(got.ids == want.ids);
        CHECK(got.raw == want.raw);
        CHECK(got.result == want.result);
        accepted.insert(want.result[0]);
      }
  CHECK(accepted.size() >= 3);  // rounds of several lengths
}

// fp32: the fixtures' bounds. bf16:
// outputs. Rounding to bf16 is off by at most 2^-9, 1.1e-3 in root mean square; some sixty roundings lie between the taps and a hidden
// state (7 a layer and side of each sum, 2 or 3 layers), which add up as a random walk to 8e-3: seen are 5e-3 to 1e-2. The confidence's
// bias is the difference of two means of a third of their size or less, so three times that: 3e-2.
// gradients. Smooth terms pass the outputs' error on, and sums of opposite signs magnify it; so does the public trainers' own bf16, whose
// error each fixture tells: three times that, as everywhere. The gradient of tv has jumps besides, d (sign(d - t) - mean) / 2: a logit
// with an error e turns the sign where |ln d/t| < e. With e = 7.4e-3 of the logits' root mean square, 0.014, that is 0.2 to 0.5 % of the entries
// of the dsp_* cases, and as each is then off by all of its d, 3 to 40 % of the gradient's norm (drawn from dsp_dspark_gated's own logits: 0.16;
// seen there in o_proj: 0.197, in the trainers' bf16: 0.0997). Which entries turn is luck in both, hence again the factor.
golden::Tolerance cuda_tolerance(const std::string& device, Precision precision, const Json& description) {
  model::BackendOptions options;
  options.device = device, options.precision = precision;
  if (precision == Precision::fp32) return {options, 5e-6, 2e-5, 1e-7, "cuda fp32"};
  const double observed = description.at("observed").at("bf16_autocast_vs_float64").at("worst_relative_2norm_gradients");
  return {options, 3e-2, 3 * observed, 1e-7, "cuda bf16", false};
}

}  // namespace dspark::test
