// --device through the built binaries: what is said where there is no GPU to use.
#include <sys/wait.h>

#include <catch2/catch.hpp>
#include <cstdlib>

#include "cli_bench.h"
#include "core/files.h"

using namespace dspark;

TEST_CASE("a device that does not exist is wrong usage", "[cli][device]") {
  check_fails(dspark_run({"bench", "step", "--shape", "tiny", "--device", "vulkan"}), 2, {"--device vulkan: auto, cpu and cuda[:N] exist"});
  check_fails(dspark_run({"bench", "gemm", "--device", "cuda", "--save", "table.json"}), 2, {"--save table.json measures the CPU's kernels"});
}

TEST_CASE("a run goes on with the device it began with", "[cli][device]") {
  const Bench b;
  const auto store = b.make_store(), out = b.at("run");
  require_ok(dspark_run(b.train(store, out, 1)));
  check_fails(dspark_run(b.train(store, out, 2, {"--device", "cuda"})), 1, {"was begun with --device cpu", "go on with that, or choose another --out"});
}

#ifdef DSPARK_CUDA_BINARY

namespace {

// The binary with CUDA kernels, with a libcuda.so.1 in front of any other that is none: the same on machines with a driver.
Ran run(const std::vector<std::string>& arguments) {
  const Scratch scratch;
  write_bytes(scratch.folder / "libcuda.so.1", "not a library");
  std::string command = "LD_LIBRARY_PATH='" + scratch.folder.string() + "' '" DSPARK_CUDA_BINARY "'";
  for (const std::string& a : arguments) command += " '" + a + "'";
  const std::string out = scratch.folder / "out", err = scratch.folder / "err";
  const int status = std::system((command + " >'" + out + "' 2>'" + err + "' </dev/null").c_str());
  Ran ran;
  if (WIFEXITED(status)) ran.code = WEXITSTATUS(status);
  if (WIFSIGNALED(status)) ran.signal = WTERMSIG(status);
  ran.out = read_text(out), ran.err = read_text(err);
  return ran;
}

}  // namespace

TEST_CASE("without a driver --device cuda names the library and the version wanted", "[cli][device][cuda]") {
  const Bench b;
  const auto store = b.make_store(), drafter = b.make_drafter(store);
  const std::vector<std::string> said = {"libcuda.so.1: cannot be loaded", "wanted: an NVIDIA driver for CUDA 13 (580 or newer)"};
  for (const std::string device : {"cuda", "cuda:3"}) {
    check_fails(run(b.extract(b.at("out"), {"--device", device})), 1, said);
    check_fails(run(b.train(store, b.at("run"), 1, {"--device", device})), 1, said);
    check_fails(run({"eval", "--target", b.target, "--drafter", drafter, "--prompt", "x", "--device", device}), 1, said);
    for (const std::string what : {"gemm", "loss", "optimizer", "step", "all"}) check_fails(run({"bench", what, "--shape", "tiny", "--device", device}), 1, said);
  }
  CHECK_FALSE(fs::exists(b.at("run")));
}

TEST_CASE("without a driver --device auto is the CPU, and a line says why", "[cli][device][cuda]") {
  const Bench b;
  const Ran ran = run(b.extract(b.at("store")));
  INFO(ran.describe());
  CHECK(ran.code == 0);
  CHECK(ran.said("device cpu; there is no GPU to use: libcuda.so.1: cannot be loaded"));
  const Ran version = run({"--version"});
  INFO(version.describe());
  CHECK(version.code == 0);
  CHECK(version.out.find("GPU: none to use: libcuda.so.1: cannot be loaded") != std::string::npos);
}

#else

TEST_CASE("the binary with CUDA kernels", "[cli][device]") {
  WARN("skipped: the binary with CUDA kernels (" DSPARK_CUDA_ABSENT ")");
}

#endif

// The usual binary, where it was built without.
TEST_CASE("--device cuda of a build without CUDA says so", "[cli][device]") {
  if (dspark_run({"--version"}).out.find("no CUDA backend") == std::string::npos) return;
  check_fails(dspark_run({"bench", "step", "--shape", "tiny", "--device", "cuda"}), 1, {"--device cuda: this build has no CUDA backend; use --device cpu"});
}
