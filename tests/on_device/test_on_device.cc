// On a GPU what the emulation shows of the cuda backend: the table of operators, the public trainers' steps and their whole
// trajectories, equal bits in two runs. Exits with 77 where there is no GPU to use.
#define CATCH_CONFIG_RUNNER
#include <catch2/catch.hpp>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "cuda_cases.h"
#include "op_check.h"

using namespace dspark;
using model::Precision;

namespace {

constexpr int kSkipped = 77;  // ctest's SKIP_RETURN_CODE

std::unique_ptr<model::Backend> gpu(Precision precision = Precision::bf16) {
  model::BackendOptions options;
  options.device = "cuda";
  options.precision = precision;
  return model::make_backend(options);
}

}  // namespace

TEST_CASE("operators on the GPU agree with the reference in fp32 and bf16", "[ops]") {
  for (const Precision precision : {Precision::fp32, Precision::bf16}) {
    test::run_table(*gpu(precision));
    test::run_table(*gpu(precision), test::wide_cases());
  }
}

TEST_CASE("on the GPU a row's bits depend on nothing but the row, and repeat", "[ops]") {
  const auto first = gpu(), second = gpu();
  test::same_bits_on(first->context(), second->context());
  test::rows_alone(first->context());
}

TEST_CASE("the GPU keeps, draws and accepts the tokens the cpu backend does", "[ops]") { test::check_choices(gpu(Precision::fp32)->context()); }

TEST_CASE("drafter steps on the GPU agree with the public trainers", "[golden]") {
  int n = 0;
  for (const golden::Case& c : golden::cases("drafter_step"))
    for (const Precision precision : {Precision::fp32, Precision::bf16}) check_step(c, test::cuda_tolerance("cuda", precision, golden::description(c))), ++n;
  CHECK(n >= 6);
}

TEST_CASE("trajectories on the GPU are the public trainers'", "[golden]") {
  int n = 0;
  for (const golden::Case& c : golden::cases("trajectory")) {
    const Json d = golden::description(c);
    const golden::Tolerance tol = test::cuda_tolerance("cuda", Precision::fp32, d);
    if (d.at("rules").at("slots") == "label_prefix") check_trajectory(c, tol), ++n;
    else
      for (const std::string run : {"adamw", "muon"}) check_trajectory(c, tol, run), ++n;
  }
  CHECK(n >= 3);
}

int main(int argc, char** argv) {
  try {
    std::printf("%s\n", gpu()->describe().c_str());
  } catch (const Error& e) {
    std::printf("skipped: %s\n", e.what());
    return kSkipped;
  }
  return Catch::Session().run(argc, argv);
}
