// The operator table on every backend. See op_run.h for what a case is.
//
// Tolerance of a comparison with ref fp64. All inputs are exact in every dtype, so what differs is rounding inside the
// operator. The yardstick is how far the fp64 result moves when every random input moves by a relative noise of 2^-8
// (bf16: what rounding an operand does at most) or 2^-20 (fp32: 16 ulp, which leaves room for sums of some thousand
// terms, whose rounding errors grow like sqrt(n) ulp); acc inputs get the fp32 noise on every backend. The largest move
// of six draws in the same row (or a quarter of the largest of the whole tensor, if more) times 4, plus the rounding of
// the result itself: half an ulp of bf16 or 2^-22 of fp32. So the bound is what a plain version with rounded operands
// does to the same row, four times.
#include <catch2/catch.hpp>

#include <cmath>
#include <cstring>

#include "model/backends.h"
#include "model/ops_cpu/gemm.h"
#include "op_table.h"

namespace dspark::test {
namespace {

using model::BackendOptions;
using model::Precision;

std::unique_ptr<model::Backend> ref_backend(Precision precision) {
  BackendOptions options;
  options.device = "ref";
  options.precision = precision;
  return model::make_ref_backend(options);
}

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

// Runs the whole table on `backend` and compares with ref fp64.
void run_table(model::Backend& backend) {
  const auto ref = ref_backend(Precision::fp64);
  model::Context& ctx = backend.context();
  double worst = 0;
  std::string worst_case;
  for (const OpCase& c : op_cases()) {
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
  WARN(backend.describe() << ": " << op_cases().size() << " cases, largest error " << worst << " of its tolerance ("
                          << worst_case << ")");
}

bool same_bits(const Array& a, const Array& b) {
  return a.rows == b.rows && a.cols == b.cols &&
         (a.values.empty() || std::memcmp(a.values.data(), b.values.data(), a.values.size() * sizeof(double)) == 0);
}

// Two runs of everything give the same bits, on one backend or two.
void same_bits_on(model::Context& first, model::Context& second) {
  for (const OpCase& c : op_cases()) {
    const CaseResult a = run_case(c, first, {}), b = run_case(c, second, {});
    for (const auto& [name, out] : a.outputs) {
      INFO(c.title() << ", " << name);
      CHECK(same_bits(out.value, b.outputs.at(name).value));
    }
  }
}

// Each row unit alone, and the halves, give the bits of the whole.
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

// Complex step: Im(loss(x + i h v)) / h = <d_x, v>, relative to the sum of |d_x v|.
void check_gradients(const OpCase& c, model::Context& ctx, int& checked) {
  const CaseResult base = run_case(c, ctx, {});
  for (const auto& [name, gradient] : base.outputs) {
    if (name.rfind("d_", 0) != 0 || !base.inputs.count(name.substr(2))) continue;
    const std::string input = name.substr(2);
    const Array& x = base.inputs.at(input);
    const int64_t skipped = x.cols - gradient.value.cols;  // vocab_loss: the last columns of the head only
    for (uint64_t seed = 1; seed <= 3; ++seed) {
      const CaseResult moved = run_case(c, ctx, {.step_input = input, .step_seed = seed, .step_first_col = skipped});
      const Array v = OpRun(ctx, c.title(), {.step_seed = seed}).direction(input, x.rows, x.cols);
      double by_step = 0, by_gradient = 0, magnitude = 0;
      for (const auto& [output, cotangent] : base.cotangents) {
        const Array& im = moved.outputs.at(output).imaginary;
        for (size_t i = 0; i < im.values.size(); ++i) by_step += cotangent.values[i] * im.values[i] / kStep;
      }
      for (int64_t i = 0; i < x.rows; ++i)
        for (int64_t j = skipped; j < x.cols; ++j) {
          double g = gradient.value(i, j - skipped);
          if (const double start = gradient.initial(i, j - skipped); std::isfinite(start)) g -= start;
          by_gradient += g * v(i, j);
          magnitude += std::fabs(g * v(i, j));
        }
      INFO(c.title() << ": " << name << ", direction " << seed << ": step " << by_step << ", gradient " << by_gradient);
      CHECK(std::fabs(by_step - by_gradient) <= 1e-10 * magnitude);
      ++checked;
    }
  }
}

}  // namespace

TEST_CASE("every backward agrees with the complex step of its forward", "[ops]") {
  const auto backend = ref_backend(Precision::complex128);
  int checked = 0;
  for (const OpCase& c : op_cases()) check_gradients(c, backend->context(), checked);
  WARN(checked << " directional derivatives checked");
  CHECK(checked > 300);
}

TEST_CASE("the reference agrees with itself in complex128, strided, and row by row", "[ops]") {
  const auto complex = ref_backend(Precision::complex128);
  run_table(*complex);
  same_bits_on(complex->context(), complex->context());
  rows_alone(complex->context());
}

namespace {

std::unique_ptr<model::Backend> cpu_backend(Precision precision, int threads, const std::string& kernel = "auto") {
  BackendOptions options;
  options.device = "cpu";
  options.precision = precision;
  options.threads = threads;
  options.cpu_kernel = kernel;
  return model::make_backend(options);
}

}  // namespace

TEST_CASE("the operator table notices what a backend must not do", "[ops]") {
  const auto backend = ref_backend(Precision::fp64);
  const auto broken = [](int64_t extra_cols, int64_t extra_rows) {
    return OpCase{"fill", "beyond its tensor", [=](OpRun& run) {
                    model::Tensor t = run.output("dst", Kind::acc, 3, 5);
                    t.cols += extra_cols;
                    t.rows += extra_rows;
                    model::fill(run.ctx(), {t, 1});
                  }};
  };
  CHECK_NOTHROW(run_case(broken(0, 0), backend->context(), {.strided = true}));
  CHECK_THROWS_WITH(run_case(broken(1, 0), backend->context(), {.strided = true}),
                    Catch::Contains("sentinel at (0, 5)"));
  CHECK_THROWS_WITH(run_case(broken(0, 1), backend->context(), {.strided = true}),
                    Catch::Contains("sentinel at (3, 0)"));
  CHECK_THROWS_WITH(run_case(broken(0, 1), backend->context(), {}), Catch::Contains("sentinel at (3, 0)"));
  // What an operator leaves unwritten stays NaN, which no comparison accepts.
  const CaseResult partial = run_case(broken(-1, 0), backend->context(), {});
  const Array& value = partial.outputs.at("dst").value;
  CHECK_FALSE(compare(value, value, 1.0).ok);
}

// Every kernel level that this CPU runs; the ones it lacks are named by `dspark bench gemm`.
TEST_CASE("the cpu backend agrees with the reference in fp32 and bf16, with every kernel", "[ops]") {
  for (const model::cpu::Kernel* kernel : model::cpu::available_kernels())
    for (const Precision precision : {Precision::fp32, Precision::bf16})
      run_table(*cpu_backend(precision, 2, std::string(kernel->name())));
}

TEST_CASE("on the cpu a row's bits depend on nothing but the row", "[ops]") {
  for (const Precision precision : {Precision::bf16, Precision::fp32}) {
    const auto one = cpu_backend(precision, 1), two = cpu_backend(precision, 2);
    same_bits_on(two->context(), two->context());
    same_bits_on(one->context(), two->context());
    rows_alone(two->context());
  }
}

}  // namespace dspark::test
