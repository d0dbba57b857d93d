// Recipes: what each decides, what an option that was given keeps, through the functions and through the binary.
#include <catch2/catch.hpp>
#include <nlohmann/json.hpp>
#include <set>

#include "cli_bench.h"
#include "core/error.h"
#include "job/recipe.h"

using namespace dspark;
using namespace dspark::job;

TEST_CASE("a recipe sets what nobody gave", "[train]") {
  TrainOptions o;
  apply_recipe(o);
  CHECK(o.loss == "ce=0.1,tv=1.8,conf=1");
  CHECK(o.block == 7);
  CHECK(o.denominator == "pooled");
  CHECK(o.optimizer == "adamw");

  TrainOptions s;
  s.recipe = "speculators";
  s.lr = 3e-4;
  s.given = {"recipe", "lr"};
  const auto settings = apply_recipe(s);
  CHECK(s.lr == 3e-4);
  CHECK(s.loss == "kl=1,conf=1");
  CHECK(s.block == 8);
  CHECK(s.window == 2048);
  CHECK(s.layer_types == "sliding");
  CHECK(s.slots == "row-mask");
  CHECK(s.label == "target");
  CHECK(s.denominator == "count");
  CHECK(s.optimizer == "muon");
  CHECK(s.muon_weight_decay == 0.1);
  CHECK(s.schedule == "linear");
  for (const Setting& x : settings) {
    if (x.name == "lr") CHECK(x.source == "given");
    if (x.name == "loss") CHECK(x.source == "recipe speculators");
    if (x.name == "rank") CHECK(x.source == "default");
  }

  TrainOptions dflash;
  dflash.recipe = "speculators";
  dflash.algorithm = "dflash";
  apply_recipe(dflash);
  CHECK(dflash.layout == "bonus");
  CHECK(dflash.block == 16);
  CHECK(dflash.dpace == 0.5);
  CHECK(dflash.loss == "ce=1");

  TrainOptions wrong;
  wrong.recipe = "eagle";
  CHECK_THROWS_AS(apply_recipe(wrong), Error);
}

TEST_CASE("--print-config says every value and where it came from", "[cli][train]") {
  const Ran r = dspark_run({"train", "--print-config", "--recipe", "speculators", "--lr", "3e-4"});
  INFO(r.describe());
  CHECK(r.code == 0);
  CHECK(r.out.find("lr                   0.0003                   given") != std::string::npos);
  CHECK(r.out.find("loss                 kl=1,conf=1              recipe speculators") != std::string::npos);
  CHECK(r.out.find("rank                 256                      default") != std::string::npos);
  CHECK(dspark_run({"train", "--print-config", "--recipe", "eagle"}).code == 2);

  // Every option is there but those that say where things are, what to do instead of training, and the plan's.
  const std::set<std::string> others = {"help", "config", "json", "log-level", "store", "target", "out", "report", "tensorboard", "recipe", "resume", "plan", "print-config", "dry-run",
                                        "machine", "shape", "rows", "codec-ratio", "price"};
  const Ran help = dspark_run({"train", "--help"});
  for (size_t at = 0; (at = help.out.find("\n  --", at)) != std::string::npos;) {
    at += 5;
    const std::string name = help.out.substr(at, help.out.find_first_of(" \n", at) - at);
    INFO(name);
    CHECK((others.contains(name) || r.out.find("\n" + name + " ") != std::string::npos || r.out.starts_with(name + " ")));
  }
}

// Every head and recipe trains, stops and goes on, and decodes: greedy output does not depend on the drafter.
TEST_CASE("heads and recipes train and decode through the binary", "[cli][train]") {
  const Bench b;
  const auto store = b.make_store();
  const std::vector<std::pair<std::string, Bench::Arguments>> runs = {
      {"gated", {"--markov", "gated"}},
      {"rnn", {"--markov", "rnn"}},
      {"rnn_bonus", {"--markov", "rnn", "--layout", "bonus"}},
      {"muon", {"--optimizer", "muon", "--muon-weight-decay", "0.1"}},
      {"speculators", {"--recipe", "speculators", "--window", "16", "--block", "4"}},
      {"speculators_dflash", {"--recipe", "speculators", "--algorithm", "dflash", "--window", "16", "--block", "4"}},
      {"mixed", {"--layers", "2", "--layer-types", "full,sliding", "--window", "8", "--non-causal"}},
      {"noise", {"--tap-noise", "0.05", "--detach-confidence"}}};
  for (const auto& [name, more] : runs) {
    Bench::Arguments arguments = more;
    arguments.insert(arguments.end(), {"--json", b.at(name + ".json")});
    const Ran train = dspark_run(b.train(store, b.at(name), 3, arguments));
    INFO(name << " " << train.describe());
    REQUIRE(train.code == 0);
    const auto lines = json_lines(file_bytes(b.at(name + ".json")));
    REQUIRE(lines.size() >= 4);
    CHECK(lines.front().at("loss").get<double>() > 0);
    CHECK(lines.back().at("skipped") == 0);
    const Ran eval = dspark_run({"eval", "--target", b.target, "--drafter", b.at(name), "--data", b.rows, "--limit", "2", "--max-new-tokens", "12", "--temperature", "0"});
    INFO(eval.describe());
    CHECK(eval.code == 0);
    CHECK(eval.out.find("greedy output equals plain decoding on 2 of 2 prompts") != std::string::npos);
  }
  check_fails(dspark_run(b.train(store, b.at("types"), 1, {"--layer-types", "full,sliding"})), 2, {"--layer-types", "2 types for --layers 1"});
  check_fails(dspark_run(b.train(store, b.at("types"), 1, {"--layer-types", "sliding"})), 2, {"--window"});
  // D-PACE's weights come out of the forward: not with a denominator that must be known before.
  check_fails(dspark_run(b.train(store, b.at("dpace"), 1, {"--dpace", "0.5", "--loss", "ce=1"})), 2, {"--dpace", "--denominator count"});
  check_fails(dspark_run(b.train(store, b.at("dpace"), 1, {"--dpace", "0.5", "--denominator", "count"})), 2, {"--dpace", "cross-entropy"});
}

TEST_CASE("wrong numbers and unknown commands are named", "[cli]") {
  check_fails(dspark_run({"frobnicate"}), 2, {"unknown command 'frobnicate'", "extract, train"});
  check_fails(dspark_run({"train", "--tap-noise", "-1"}), 2, {"--tap-noise", "-1: expected a number from 0"});
  check_fails(dspark_run({"train", "--keep", "0"}), 2, {"--keep", "0: expected a whole number from 1"});
}

TEST_CASE("bench step measures a whole training step", "[cli][bench]") {
  const Ran r = dspark_run({"bench", "step", "--shape", "tiny", "--steps", "2", "--json", "-"});
  INFO(r.describe());
  REQUIRE(r.code == 0);
  const auto lines = json_lines(r.out);
  REQUIRE(lines.size() == 3);
  CHECK(lines[0].at("unit") == "slots/s");
  CHECK(lines[0].at("value").get<double>() > 0);
  CHECK(lines[0].at("samples").size() == 2);
  CHECK(lines[2].at("peak_rss_bytes").get<double>() > 0);
  CHECK(dspark_run({"bench", "step", "--shape", "huge"}).code == 2);
}
