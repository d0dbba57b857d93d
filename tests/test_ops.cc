// The operator table on the reference and on CPUs (tests/test_cuda_ops.cc: on the cuda backend). See op_run.h for what a case is
// and op_check.h for how results are compared.
#include <catch2/catch.hpp>

#include <cmath>
#include <cstring>

#include "model/backends.h"
#include "model/ops_cpu/gemm.h"
#include "op_check.h"
#include "op_table.h"

namespace dspark::test {
namespace {

using model::BackendOptions;
using model::Precision;

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
