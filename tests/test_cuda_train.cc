// Training on the cuda backend, on the emulation: the public trainers' steps and the beginnings of their trajectories.
#include <catch2/catch.hpp>

#include <nlohmann/json.hpp>

#include "cuda/backend.h"
#include "cuda_cases.h"
#include "cuda_emulation/block.h"
#include "cuda_emulation/fakes.h"
#include "cuda_emulation/memory.h"

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

}  // namespace

TEST_CASE("drafter steps on the cuda backend agree with the public trainers", "[cuda][golden][train]") {
  emulation::set_seed(11);
  int n = 0;
  for (const Case& c : cases("drafter_step"))
    for (const Precision precision : {Precision::fp32, Precision::bf16}) check_step(c, test::cuda_tolerance("emulated", precision, description(c))), ++n;
  CHECK(n >= 6);
  CHECK(emulation::live_objects() == 0);
  CHECK(emulation::global_allocations() == 0);
}

TEST_CASE("trajectories on the cuda backend begin as the public trainers' do", "[cuda][golden][train]") {
  emulation::set_seed(12);
  int n = 0;
  for (const Case& c : cases("trajectory")) {
    const Json d = description(c);
    const Tolerance tol = test::cuda_tolerance("emulated", Precision::fp32, d);
    if (d.at("rules").at("slots") == "label_prefix") check_trajectory(c, tol, 3), ++n;
    else
      for (const std::string run : {"adamw", "muon"}) check_trajectory(c, tol, run, 3), ++n;
  }
  CHECK(n >= 3);
}
