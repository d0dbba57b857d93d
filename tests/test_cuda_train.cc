// Training on the cuda backend, on the emulation: the public trainers' steps and the beginnings of their trajectories.
#include <catch2/catch.hpp>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "cuda/backend.h"
#include "cuda_emulation/block.h"
#include "cuda_emulation/fakes.h"
#include "cuda_emulation/memory.h"
#include "golden_train_check.h"

using namespace dspark;
using namespace dspark::golden;
using namespace dspark::model;

namespace {

// The cuda backend under a name of its own: "cuda" wants a driver.
const RegisteredBackend emulated("emulated", [](const BackendOptions& options) {
  BackendOptions o = options;
  o.device = "cuda";
  return cuda::make_backend_on(o, emulation::fake_driver(), emulation::fake_blas());
});

// bf16 gradients of tv flip with the sign of draft - target, so that the reference's own are far off in some cases: there three times
// as far is allowed.
Tolerance emulated_in(Precision precision, const Json& d) {
  BackendOptions options;
  options.device = "emulated", options.precision = precision;
  if (precision == Precision::fp32) return {options, 5e-6, 2e-5, 1e-7, "cuda fp32"};
  const double observed = d.at("observed").at("bf16_autocast_vs_float64").at("worst_relative_2norm_gradients");
  return {options, 3e-2, std::max(1e-1, 3 * observed), 1e-7, "cuda bf16", false};
}

}  // namespace

TEST_CASE("drafter steps on the cuda backend agree with the public trainers", "[cuda][golden][train]") {
  emulation::set_seed(11);
  int n = 0;
  for (const Case& c : cases("drafter_step"))
    for (const Precision precision : {Precision::fp32, Precision::bf16}) check_step(c, emulated_in(precision, description(c))), ++n;
  CHECK(n >= 6);
  CHECK(emulation::live_objects() == 0);
  CHECK(emulation::global_allocations() == 0);
}

TEST_CASE("trajectories on the cuda backend begin as the public trainers' do", "[cuda][golden][train]") {
  emulation::set_seed(12);
  int n = 0;
  for (const Case& c : cases("trajectory")) {
    const Json d = description(c);
    const Tolerance tol = emulated_in(Precision::fp32, d);
    if (d.at("rules").at("slots") == "label_prefix") check_trajectory(c, tol, 3), ++n;
    else
      for (const std::string run : {"adamw", "muon"}) check_trajectory(c, tol, run, 3), ++n;
  }
  CHECK(n >= 3);
}
