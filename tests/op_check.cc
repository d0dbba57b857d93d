#include "op_check.h"

#include <catch2/catch.hpp>

#include <cmath>
#include <cstring>
#include <limits>

namespace dspark::test {

using model::Precision;

std::unique_ptr<model::Backend> ref_backend(Precision precision) {
  model::BackendOptions options;
  options.device = "ref";
  options.precision = precision;
  return model::make_ref_backend(options);
}

namespace {

// Half an ulp of bf16 at v, with room for the fp32 value before it; 2^-22 relative of fp32.
double result_rounding(DType dtype, double v) {
  switch (dtype) {
    case DType::bf16:
      return v == 0 || !std::isfinite(v) ? 0 : std::ldexp(1.0 + 0x1p-12, std::ilogb(v) - 8);
    case DType::f32:
      return 0x1p-22 * std::fabs(v);
    default:
      return 0x1p-50 * std::fabs(v);
  }
}

double input_noise(DType dtype) {
  switch (dtype) {
    case DType::bf16:
      return 0x1p-8;
    case DType::f32:
      return 0x1p-20;
    default:
      return 0x1p-46;
  }
}

using Tolerances = std::map<std::string, Array>;

// How far each output moves under noise: per element, smoothed over its row and (a quarter of) the tensor.
Tolerances noise_yardstick(const OpCase& c, const CaseResult& want, model::Context& ref, DType act, DType acc) {
  Tolerances moves;
  for (const auto& [name, out] : want.outputs) moves[name] = Array(out.value.rows, out.value.cols);
  for (uint64_t draw = 1; draw <= 6; ++draw) {
    const CaseResult noisy =
        run_case(c, ref, {.noise_act = input_noise(act), .noise_acc = input_noise(acc), .noise_seed = draw});
    for (auto& [name, move] : moves) {
      const Output &a = noisy.outputs.at(name), &b = want.outputs.at(name);
      double whole = 0;
      std::vector<double> row_max(static_cast<size_t>(move.rows), 0.0);
      for (int64_t i = 0; i < move.rows; ++i)
        for (int64_t j = 0; j < move.cols; ++j) {
          const double d = std::fabs(a.value(i, j) - b.value(i, j));
          if (std::isfinite(d)) row_max[static_cast<size_t>(i)] = std::max(row_max[static_cast<size_t>(i)], d);
        }
      for (const double m : row_max) whole = std::max(whole, m);
      for (int64_t i = 0; i < move.rows; ++i)
        for (int64_t j = 0; j < move.cols; ++j)
          move(i, j) = std::max({move(i, j), row_max[static_cast<size_t>(i)], whole / 4});
    }
  }
  return moves;
}

}  // namespace

void run_table(model::Backend& backend, const OpCases& cases) {
  const auto ref = ref_backend(Precision::fp64);
  model::Context& ctx = backend.context();
  double worst = 0;
  int count = 0;
  std::string worst_case;
  for (const OpCase& c : cases) {
    ++count;
    const CaseResult want = run_case(c, ref->context(), {});
    const Tolerances moves = noise_yardstick(c, want, ref->context(), ctx.act_dtype(), ctx.acc_dtype());
    for (const bool strided : {false, true}) {
      INFO(backend.describe() << ": " << c.title() << (strided ? ", strided" : ""));
      CaseResult got;
      REQUIRE_NOTHROW(got = run_case(c, ctx, {.strided = strided}));
      for (const auto& [name, out] : got.outputs) {
        if (!out.compared) continue;
        const Output& expected = want.outputs.at(name);
        Array tolerance = moves.at(name), reference = expected.value;
        for (size_t i = 0; i < tolerance.values.size(); ++i) {
          double& v = reference.values[i];
          if (out.exact && out.dtype == DType::bf16) v = to_float(to_bf16(static_cast<float>(v)));
          if (out.exact && out.dtype == DType::f32) v = static_cast<float>(v);
          tolerance.values[i] = out.exact ? 0 : 4 * tolerance.values[i] + result_rounding(out.dtype, v) + 1e-30;
        }
        const Comparison result = compare(out.value, reference, tolerance);
        INFO("output " << name << ": " << result.text);
        CHECK(result.ok);
        if (result.worst > worst) {
          worst = result.worst;
          worst_case = c.title() + ", " + name;
        }
      }
    }
  }
  WARN(backend.describe() << ": " << count << " cases, largest error " << worst << " of its tolerance ("
                          << worst_case << ")");
}

namespace {

bool same_bits(const Array& a, const Array& b) {
  return a.rows == b.rows && a.cols == b.cols &&
         (a.values.empty() || std::memcmp(a.values.data(), b.values.data(), a.values.size() * sizeof(double)) == 0);
}

}  // namespace

void same_bits_on(model::Context& first, model::Context& second) {
  for (const OpCase& c : op_cases()) {
    const CaseResult a = run_case(c, first, {}), b = run_case(c, second, {});
    for (const auto& [name, out] : a.outputs) {
      INFO(c.title() << ", " << name);
      CHECK(same_bits(out.value, b.outputs.at(name).value));
    }
  }
}

void rows_alone(model::Context& ctx) {
  for (const OpCase& c : op_cases()) {
    if (c.row_units < 2) continue;
    const CaseResult whole = run_case(c, ctx, {});
    std::vector<std::pair<int64_t, int64_t>> slices = {{0, c.row_units / 2},
                                                       {c.row_units / 2, c.row_units - c.row_units / 2}};
    for (int64_t u = 0; u < c.row_units; ++u) slices.push_back({u, 1});
    for (const auto& [first, n] : slices) {
      const CaseResult part = run_case(c, ctx, {.first_unit = first, .n_units = n});
      for (const auto& [name, out] : part.outputs) {
        if (out.unit_rows == 0) continue;
        const Array& all = whole.outputs.at(name).value;
        Array expected(n * out.unit_rows, all.cols);
        for (int64_t i = 0; i < expected.rows; ++i)
          for (int64_t j = 0; j < expected.cols; ++j) expected(i, j) = all(first * out.unit_rows + i, j);
        INFO(c.title() << ", " << name << ", units [" << first << ", +" << n << ")");
        CHECK(same_bits(out.value, expected));
      }
    }
  }
}

}  // namespace dspark::test
