// Stop and resume: a run that was stopped, killed or damaged anywhere ends with the very bits of one that was not.
#include <signal.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <nlohmann/json.hpp>

#include "cli_bench.h"
#include "core/files.h"
#include "core/log.h"
#include "train/checkpoint.h"

namespace fs = std::filesystem;
using namespace dspark;

namespace {

// Several rows a step (accumulation), some three epochs, two stores of which one comes one and a half times.
struct Run {
  static constexpr int kSteps = 36;
  int steps;
  Bench bench{40, 14};
  fs::path first, second;
  explicit Run(int steps = kSteps) : steps(steps) {
    second = bench.at("second");
    const auto more = bench.scratch.put("more.jsonl", tiny_rows(16, 10, 7));
    require_ok(dspark_run({"extract", "--target", bench.target, "--data", more, "--out", second, "--taps", "1,2,3", "--codec", "raw"}));
    first = bench.make_store();
  }
  Bench::Arguments arguments(const fs::path& out, const Bench::Arguments& more = {}) const {
    auto a = bench.train(first, out, steps, more);
    a.insert(a.end(), {"--store", second, "--store-weights", "1,1.5", "--val-fraction", "0.1"});
    return a;
  }
  fs::path whole() const {
    require_ok(dspark_run(arguments(bench.at("whole"), {"--batch-docs", "6", "--row-tokens", "96", "--json", bench.at("whole.json")})));
    return bench.at("whole");
  }
};

// A killed run may leave half a line.
std::map<int64_t, std::string> whole_lines(const Bench& b, const fs::path& json) {
  if (!fs::exists(json)) return {};
  std::string text = file_bytes(json);
  text.resize(text.find_last_of('\n') + 1);
  write_bytes(b.at("lines.json"), text);
  return step_lines(b.at("lines.json"));
}

std::vector<std::string> checkpoint_names(const fs::path& out) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(out / "checkpoints")) names.push_back(entry.path().filename());
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace

TEST_CASE("train killed in the middle of an epoch, of a step's rows and of a checkpoint repeats every loss to the last bit", "[cli][fault][checkpoint]") {
  const Run run;
  const Bench& b = run.bench;
  const auto whole = run.whole(), out = b.at("out");
  const auto expected = step_lines(b.at("whole.json"));
  REQUIRE(expected.size() == Run::kSteps);
  const Bench::Arguments options{"--batch-docs", "6", "--row-tokens", "96", "--save-every", "3", "--json", b.at("part.json")};
  std::map<int64_t, std::string> seen;
  auto compare = [&] {
    for (const auto& [step, line] : whole_lines(b, b.at("part.json"))) {
      INFO("step " << step);
      CHECK(line == expected.at(step));
      seen[step] = line;
    }
  };
  int killed = 0;
  for (int round = 0; round < 6; ++round) {
    fs::remove(b.at("part.json"));
    Process process(run.arguments(out, options));
    wait_for_lines(process, b.at("part.json"), 1 + static_cast<int64_t>(8 * random_fraction()));
    ::usleep(static_cast<useconds_t>(20000 * random_fraction()));
    process.kill(SIGKILL);
    killed += process.wait().signal == SIGKILL;
    compare();
  }
  INFO("killed " << killed << " times");
  CHECK(killed > 0);
  fs::remove(b.at("part.json"));
  require_ok(dspark_run(run.arguments(out, options)));
  compare();
  CHECK(seen.rbegin()->first == Run::kSteps);
  CHECK(file_bytes(out / "model.safetensors") == file_bytes(whole / "model.safetensors"));
}

TEST_CASE("SIGTERM, SIGINT, SIGUSR1 and SIGHUP write a checkpoint and exit 75", "[cli][fault][checkpoint]") {
  ::signal(SIGHUP, SIG_DFL);  // the tests may run under nohup
  const Run run(150);  // long enough for a signal to come before the end
  const Bench& b = run.bench;
  const auto expected = file_bytes(run.whole() / "model.safetensors");
  for (const int signal : {SIGTERM, SIGINT, SIGUSR1, SIGHUP}) {
    INFO("signal " << signal);
    const auto out = b.at("out" + std::to_string(signal));
    const Bench::Arguments options{"--batch-docs", "6", "--row-tokens", "96", "--json", b.at("part.json")};
    fs::remove(b.at("part.json"));
    Process process(run.arguments(out, options));
    wait_for_lines(process, b.at("part.json"), 3);
    process.kill(signal);
    check_fails(process.wait(), 75, {"checkpoint of step", "start the same command again"});
    const auto steps = whole_lines(b, b.at("part.json"));
    // What was trained is what was saved: nothing is done twice, nothing is left out.
    const auto checkpoint = train::newest_checkpoint(out);
    REQUIRE(checkpoint);
    CHECK(checkpoint->step == steps.rbegin()->first);
    CHECK(checkpoint->step < run.steps);
    require_ok(dspark_run(run.arguments(out, options)));
    CHECK(whole_lines(b, b.at("part.json")).begin()->first == checkpoint->step + 1);
    CHECK(file_bytes(out / "model.safetensors") == expected);
  }
}

TEST_CASE("a damaged checkpoint is set aside and the one before it is taken", "[fault][checkpoint]") {
  const Run run;
  const Bench& b = run.bench;
  const Bench::Arguments options{"--batch-docs", "6", "--row-tokens", "96", "--save-every", "12", "--keep", "9"};
  const auto out = b.at("out"), copy = b.at("copy");
  require_ok(dspark_run(run.arguments(out, options)));
  REQUIRE(checkpoint_names(out) == std::vector<std::string>{"step-00000012", "step-00000024", "step-00000036"});
  const fs::path newest = out / "checkpoints" / "step-00000036";
  auto with = [&](const std::string& file, const std::string& bytes) {
    fs::remove_all(copy);
    fs::create_directories(copy / "checkpoints");
    for (const char* name : {"step-00000024", "step-00000036"})
      fs::copy(out / "checkpoints" / name, copy / "checkpoints" / name, fs::copy_options::recursive);
    write_bytes(copy / "checkpoints" / "step-00000036" / file, bytes);
    return train::newest_checkpoint(copy);
  };
  for (const std::string file : {"masters.safetensors", "optimizer.safetensors", "model.safetensors", "config.json", "state.json"}) {
    const std::string bytes = file_bytes(newest / file);
    CHECK(with(file, bytes)->step == 36);
    for (int i = 0; i < 12; ++i) {
      const auto at = static_cast<size_t>(static_cast<double>(bytes.size()) * (i == 0 ? 0.0 : random_fraction()));
      INFO(file << " cut at " << at << " of " << bytes.size());
      CHECK(with(file, bytes.substr(0, at))->step == 24);
      CHECK(checkpoint_names(copy) == std::vector<std::string>{"damaged-00000036", "step-00000024"});
    }
    for (int i = 0; i < 12; ++i) {
      std::string flipped = bytes;
      const auto bit = static_cast<size_t>(8 * static_cast<double>(bytes.size()) * random_fraction());
      flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << bit % 8));
      INFO(file << " with bit " << bit << " flipped");
      if (file == "state.json" && Json::parse(flipped, nullptr, false) == Json::parse(bytes)) continue;  // 1e-05 as 1E-05
      CHECK(with(file, flipped)->step == 24);
    }
  }
  // Through the binary: said, and the end is the same.
  const std::string expected = file_bytes(out / "model.safetensors");
  fs::resize_file(newest / "masters.safetensors", fs::file_size(newest / "masters.safetensors") - 1);
  fs::remove(out / "model.safetensors");
  const Ran again = dspark_run(run.arguments(out, options));
  require_ok(again);
  CHECK(again.said("is set aside as damaged-00000036"));
  CHECK(again.said("resuming"));
  CHECK(file_bytes(out / "model.safetensors") == expected);
}

TEST_CASE("the newest checkpoints and the best by validation are kept", "[cli][checkpoint]") {
  const Run run;
  const Bench& b = run.bench;
  // A learning rate that spoils what was learnt: the best is not the last.
  require_ok(dspark_run(run.arguments(b.at("out"), {"--batch-docs", "6", "--save-every", "3", "--keep", "2", "--validate-every", "3", "--lr", "5", "--clip", "0", "--warmup", "0.9", "--cpu-kernel", "base",
                                                    "--json", b.at("run.json")})));
  int64_t best = 0;
  double tau = -1;
  for (const auto& line : json_lines(file_bytes(b.at("run.json")))) {
    if (line["phase"] == "validation" && line["tau"].get<double>() > tau) best = line["step"], tau = line["tau"];
    if (line["phase"] == "done") CHECK(line["best_step"] == best);
  }
  INFO("best at step " << best << " with tau " << tau);
  REQUIRE(best > 0);
  std::vector<std::string> wanted{fmt::format("step-{:08}", Run::kSteps - 3), fmt::format("step-{:08}", Run::kSteps)};
  if (best < Run::kSteps - 3) wanted.insert(wanted.begin(), fmt::format("step-{:08}", best));
  CHECK(checkpoint_names(b.at("out")) == wanted);
  CHECK(best < Run::kSteps - 3);
  // Each is a drafter that can be packed.
  require_ok(dspark_run({"pack", b.at("out") / "checkpoints" / wanted.front(), "--inspect"}));
}
