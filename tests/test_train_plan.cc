// `train --plan` and the benchmarks that share its shapes, through the built binary; who owns which tensor; and that parts add up.
#include <catch2/catch.hpp>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>

#include "cli_bench.h"
#include "core/error.h"
#include "job/machines.h"
#include "job/plan.h"
#include "job/shapes.h"
#include "train/plan_step.h"
#include "train/shards.h"

using namespace dspark;

namespace {

OrderedJson planned(const std::vector<std::string>& more) {
  std::vector<std::string> arguments{"train", "--plan", "--json", "-"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  const Ran ran = dspark_run(arguments);
  INFO(ran.describe());
  REQUIRE(ran.code == 0);
  const auto lines = json_lines(ran.out);
  REQUIRE(lines.size() == 1);
  return lines.front();
}

double flops_of(const OrderedJson& plan, const std::string& part, bool backward) {
  for (const auto& p : plan["row"]["parts"])
    if (p["part"] == part && p["backward"] == backward) return p["flops"].get<double>();
  return 0;
}

}  // namespace

TEST_CASE("the Kimi-K3 drafter is planned to the last parameter, in no memory", "[plan][cli]") {
  const OrderedJson plan = planned({"--shape", "kimi-k3", "--machine", "gb300", "--optimizer", "muon", "--ranks", "16", "--steps", "1000", "--price", "2"});
  CHECK(plan["peak_rss_bytes"].get<int64_t>() < int64_t{kSanitized ? 1024 : 256} << 20);  // its weights alone are 9 GiB
  CHECK(plan["parameters"]["total"] == 4744900481);
  CHECK(plan["parameters"]["trainable"] == 2396090241);
  // By hand (T = A B = 8192, products 2 m n k): fc 4.209, context k|v 1.203, layers 33.672, logits 19.241 each, W2 0.687 TFLOP.
  const double t = 8192, d = 7168, v = 163840, kv = 2 * 16 * 64;
  const double fc = 2 * t * d * 5 * d, context_kv = 5 * 2 * t * d * kv, trunk = 5 * 2 * t * d * (2 * 6144 + kv + 3 * 14336.0), logits = 2 * t * v * d, w2 = 2 * t * v * 256;
  CHECK(flops_of(plan, "context projections", false) == Approx(fc + context_kv).epsilon(2e-3));
  CHECK(flops_of(plan, "context projections", true) == Approx(fc + 2 * context_kv).epsilon(2e-3));  // fc's input is the store's: no gradient
  CHECK(flops_of(plan, "block trunk", false) == Approx(trunk).epsilon(2e-3));
  CHECK(flops_of(plan, "block trunk", true) == Approx(2 * trunk).epsilon(2e-3));
  CHECK(flops_of(plan, "vocabulary, target", false) == Approx(logits).epsilon(2e-3));
  CHECK(flops_of(plan, "vocabulary, draft", false) == Approx(logits).epsilon(2e-3));
  CHECK(flops_of(plan, "vocabulary, draft", true) == Approx(logits).epsilon(2e-3));  // the head is frozen
  CHECK(flops_of(plan, "markov", false) == Approx(w2).epsilon(2e-3));
  CHECK(flops_of(plan, "markov", true) == Approx(2 * w2).epsilon(2e-3));
  // Slots see 1792 context rows on average: all before them, at most the last 2048. Two products forward, five backward.
  CHECK(flops_of(plan, "attention", false) == Approx(5 * t * (1792 + 4.5) * 4 * 6144).epsilon(0.02));
  CHECK(flops_of(plan, "attention", true) == Approx(5 * t * (1792 + 4.5) * 10 * 6144).epsilon(0.02));
  CHECK(plan["row"]["flops"].get<double>() == Approx(183e12).epsilon(0.03));
  CHECK(plan["update"]["flops"].get<double>() == Approx(396e12).epsilon(0.002));
  // What DESIGN 10 gives for Muon.
  CHECK(plan["memory"]["imbalance"].get<double>() == Approx(1.64).margin(0.005));
  CHECK(plan["memory"]["group_ranks"] == 16);
  CHECK(plan["memory"]["fits"] == true);
  int64_t tensors = 0, masters = 0;
  for (const auto& r : plan["memory"]["ranks"]) tensors += r["tensors"].get<int64_t>(), masters += r["master_bytes"].get<int64_t>();
  CHECK(tensors == 5 * 11 + 3 + 2 + 2);  // layers; fc and two norms; Markov; confidence
  CHECK(masters == 4 * (2396090241 - 86656 - 7425));  // what products read in fp32 is its own master
  // 8192 tokens of six states a row, 16 rows a step.
  CHECK(plan["states"]["bytes_per_s"].get<double>() * plan["step"]["seconds"].get<double>() == Approx(16.0 * 8192 * 6 * 7168 * 2));
  CHECK(plan["run"]["cost"].get<double>() == Approx(plan["run"]["seconds"].get<double>() / 3600 * 2 * 16));
  CHECK(plan["pace"]["tokens_per_day"].get<double>() == Approx(16.0 * 8192 * 86400 / plan["step"]["seconds"].get<double>()));
  // Its parts add up; rows come in beside the work.
  double seconds = 0;
  for (const auto& p : plan["row"]["parts"])
    if (p["part"] != "upload") seconds += p["seconds"].get<double>();
  CHECK(seconds == Approx(plan["row"]["seconds"].get<double>()));
  const OrderedJson alone = planned({"--shape", "kimi-k3", "--machine", "h200", "--rows", "2"});
  CHECK(alone["step"]["rows_a_rank"] == 2);
  CHECK(alone["network"]["reduce_bytes"] == 0);
  CHECK(alone["step"]["seconds"].get<double>() > 2 * alone["row"]["seconds"].get<double>());
}

TEST_CASE("tensors are dealt to ranks by the optimizer's work", "[plan]") {
  // K3 with Muon: DESIGN 10's numbers, 26 for a group of 256 that shard groups do without.
  train::OptimizerOptions muon;
  muon.muon = true;
  std::vector<double> costs;
  for (const auto& t : train::plan_update(job::find_shape("kimi-k3").config, model::Precision::bf16, muon).tensors)
    if (t.trainable) costs.push_back(t.update_flops());
  for (const auto& [ranks, expected] : std::map<int64_t, double>{{1, 1.0}, {4, 1.02}, {8, 1.12}, {16, 1.64}, {256, 26.2}}) {
    const auto owners = train::assign_owners(costs, ranks);
    CHECK(train::imbalance(costs, owners, ranks) == Approx(expected).epsilon(0.005));
    CHECK(owners == train::assign_owners(costs, ranks));
    for (int owner : owners) CHECK((owner >= 0 && owner < ranks));
  }
  CHECK(train::shard_group_ranks(1) == 1);
  CHECK(train::shard_group_ranks(16) == 16);
  CHECK(train::shard_group_ranks(24) == 12);
  CHECK(train::shard_group_ranks(256) == 16);
  CHECK(train::shard_group_ranks(17) == 1);
  CHECK(train::assign_owners(std::vector<double>{}, 3).empty());
  CHECK(train::assign_owners(std::vector<double>{1, 5, 2, 4}, 2) == std::vector<int>{0, 0, 1, 1});
}

TEST_CASE("a plan's parts and kinds are all of its counts", "[plan]") {
  using namespace model;
  for (const Markov markov : {Markov::none, Markov::vanilla, Markov::gated, Markov::rnn}) {
    DrafterConfig c = job::find_shape("tiny").config;
    c.markov = markov;
    if (markov == Markov::none) c.rank = 0, c.confidence = false, c.confidence_with_markov = false;
    const auto plan = train::plan_step(c, train::deepspec_objective(c.confidence), true, Precision::bf16, train::largest_row(c, 64, 16, 24));
    PlanCounts sum;
    double products = 0, listed = 0;
    bool parts[kParts] = {};
    for (const PlanEntry& e : plan.entries) {
      sum.add(e.counts);
      parts[static_cast<size_t>(e.label.part)] = true;
      products += e.work == Work::product || e.work == Work::gradient_product ? e.counts.flops : 0;
    }
    CHECK(sum.flops == Approx(plan.counts.flops));
    CHECK(sum.bytes() == Approx(plan.counts.bytes()));
    CHECK(sum.calls == plan.counts.calls);
    for (const PlanProduct& p : plan.products) listed += 2.0 * static_cast<double>(p.m * p.n * p.k * p.calls);
    CHECK(listed == Approx(products));
    for (Part p : {Part::upload, Part::context, Part::trunk, Part::attention, Part::target_vocab, Part::draft_vocab}) CHECK(parts[static_cast<size_t>(p)]);
    if (markov != Markov::none) CHECK(parts[static_cast<size_t>(Part::markov)]);
    CHECK_FALSE(parts[static_cast<size_t>(Part::optimizer)]);
  }
}

TEST_CASE("a plan says what limits each part and what does not fit", "[plan]") {
  using namespace model;
  const auto shape = job::find_shape("small");
  job::PlanInput in;
  in.name = "small", in.config = shape.config, in.objective = train::deepspec_objective(true);
  in.largest = train::full_row(shape.config, shape.row_tokens, shape.anchors, 512);
  in.rows = {in.largest};
  job::Machine machine;
  machine.memory_bytes = 1e12;
  for (job::Rate& r : machine.rate) r = {1e12, 1e9};
  const job::Plan slow_memory = job::make_plan(in, {}, machine);
  for (const auto& p : slow_memory.micro_step)
    if (p.part == Part::trunk) CHECK(p.limit == "memory");
  double upload = 0;
  for (const auto& p : slow_memory.micro_step) upload += p.part == Part::upload ? p.seconds : 0;
  CHECK(upload > 0);
  CHECK(slow_memory.step == Approx(job::total_seconds(slow_memory.micro_step) - upload + job::total_seconds(slow_memory.update)));
  machine.of(Work::upload).bytes /= 1e6;  // a link so slow that the work waits for it
  const job::Plan slow_link = job::make_plan(in, {}, machine);
  CHECK(slow_link.limit == "host");
  CHECK(slow_link.forward_backward == Approx(1e6 * upload));
  for (job::Rate& r : machine.rate) r = {1e9, 1e12};
  const job::Plan slow_matrix = job::make_plan(in, {}, machine);
  CHECK(slow_matrix.limit == "matrix");
  CHECK(slow_matrix.fits(machine));
  machine.memory_bytes = static_cast<double>(slow_matrix.fullest().bytes) - 1;
  CHECK_FALSE(slow_matrix.fits(machine));
  CHECK(job::plan_text(slow_matrix, in, {}, machine).find("DOES NOT FIT") != std::string::npos);
  // A machine that keeps packed copies needs room for them and time to make them.
  machine.packs = true;
  const job::Plan packed = job::make_plan(in, {}, machine);
  CHECK(packed.packed_bytes > 2 * (shape.config.vocab * shape.config.hidden));
  CHECK(packed.optimizer > slow_matrix.optimizer);
  // More ranks: the same masters and states, each at one of them.
  job::PlanOptions eight;
  eight.ranks = 8;
  machine.link_ranks = 8, machine.link_bytes = 1e9;
  const job::Plan shared = job::make_plan(in, eight, machine);
  int64_t masters = 0, states = 0;
  for (const auto& r : shared.ranks) masters += r.master_bytes, states += r.state_bytes;
  CHECK(masters == packed.ranks.front().master_bytes);
  CHECK(states == packed.ranks.front().state_bytes);
  CHECK(shared.reduce_bytes > 0);
  CHECK(shared.gather == 0);  // it takes less than the update, beside which it goes
  machine.link_bytes = 1e3;
  const job::Plan slow_links = job::make_plan(in, eight, machine);
  CHECK(slow_links.gather == Approx(slow_links.gather_bytes / 1e3 - slow_links.optimizer));
  CHECK(slow_links.limit == "network");
  eight.grad_wire = "bf16";
  CHECK(job::make_plan(in, eight, machine).reduce_bytes == Approx(shared.reduce_bytes / 2));
}

TEST_CASE("machines come from files of peak rates too", "[plan]") {
  const Scratch scratch;
  const auto json = scratch.put("box.json", R"({"name": "box", "bf16_tflops": 100, "memory_gb": 10, "memory_gb_per_s": 500, "product_efficiency": 0.5})");
  const auto toml = scratch.put("box.toml", "# a box\nname = \"box\"\nbf16_tflops = 1e2\nmemory_gb = 10\n\nmemory_gb_per_s = 500 # HBM\nproduct_efficiency = 0.5\n");
  for (const auto& file : {json, toml}) {
    const job::Machine m = job::find_machine(file, model::Precision::bf16);
    CHECK(m.name == "box");
    CHECK(m.memory_bytes == 1e10);
    CHECK(m.of(model::Work::product).flops == Approx(50e12));
    CHECK(m.of(model::Work::product).bytes == Approx(0.85 * 500e9));
    CHECK(m.network_bytes == 0);
  }
  const auto refuse = [&](const std::string& text, const std::string& said) {
    CHECK_THROWS_WITH(job::find_machine(scratch.put("bad", text), model::Precision::bf16), Catch::Contains("bad") && Catch::Contains(said));
  };
  refuse("bf16_tflops = 5\nmemory_gb = 10", "memory_gb_per_s");
  refuse("bf16_tflops = 5\nmemory = 10", "'memory'");
  refuse("bf16_tflops = -5", "-5");
  refuse("bf16_tflops = fast", "'fast'");
  refuse("bf16_tflops", ":1");
  refuse("product_efficiency = 1.5", "at most 1");
  refuse("{\"bf16_tflops\": ", "bad");
  refuse("", "missing");
  CHECK_THROWS_WITH(job::find_machine("h300", model::Precision::bf16), Catch::Contains("h200"));
  for (const char* name : {"h200", "b200", "gb300"}) CHECK(job::find_machine(name, model::Precision::bf16).of(model::Work::product).flops > 5e14);
}

TEST_CASE("a run on a store is planned from its own first step", "[plan][cli]") {
  const Bench b;
  const auto store = b.make_store();
  const auto arguments = [&](std::vector<std::string> more) {
    auto a = b.train(store, b.at("out"), 5, more);
    a.insert(a.end(), {"--plan", "--machine", "h200"});
    return a;
  };
  const Ran text = dspark_run(arguments({}));
  INFO(text.describe());
  CHECK(text.code == 0);
  for (const char* said : {"parameters", "memory of a rank", "block trunk", "fits", "store or stream", "run: 5 steps"}) CHECK(text.out.find(said) != std::string::npos);
  CHECK_FALSE(std::filesystem::exists(b.at("out")));
  const Ran json = dspark_run(arguments({"--json", "-"}));
  REQUIRE(json.code == 0);
  const auto plan = json_lines(json.out).at(0);
  CHECK(plan["run"]["steps"] == 5);
  CHECK(plan["states"]["codec"] == "the store's");
  // The run itself says the same number of parameters.
  const Ran ran = dspark_run(b.train(store, b.at("out"), 1, {"--json", "-"}));
  REQUIRE(ran.code == 0);
  const auto done = json_lines(ran.out).back();
  CHECK(done["parameters"] == plan["parameters"]["total"]);
  CHECK(done["trainable"] == plan["parameters"]["trainable"]);
}

TEST_CASE("planning options that make no sense are wrong usage", "[plan][cli]") {
  check_fails(dspark_run({"train", "--shape", "small"}), 2, {"--shape", "--plan"});
  check_fails(dspark_run({"train", "--plan", "--shape", "smal"}), 2, {"smal", "kimi-k3"});
  check_fails(dspark_run({"train", "--plan", "--shape", "small", "--machine", "h900"}), 2, {"h900", "gb300"});
  check_fails(dspark_run({"train", "--plan", "--shape", "small", "--ranks", "0"}), 2, {"--ranks"});
  check_fails(dspark_run({"train", "--plan", "--shape", "small", "--machine", "h200", "--grad-wire", "int8"}), 2, {"--grad-wire"});
  check_fails(dspark_run({"train", "--plan", "--shape", "small", "--machine", "h200", "--epochs", "2"}), 2, {"--epochs"});
  check_fails(dspark_run({"train", "--plan", "--shape", "small", "--machine", "h200", "--anchors", "600"}), 2, {"--anchors 600"});
  check_fails(dspark_run({"train", "--plan", "--steps", "5"}), 2, {"--store"});
  const Scratch scratch;
  check_fails(dspark_run({"train", "--store", "s", "--target", "t", "--out", scratch.folder / "o", "--grad-wire", "int8"}), 2, {"--grad-wire int8", "fp32 or bf16"});
  check_fails(dspark_run({"train", "--plan", "--shape", scratch.put("config.json", "{}"), "--machine", "h200"}), 1, {"config.json"});
}

TEST_CASE("options change a shape, and a drafter's config is one", "[plan][cli]") {
  const OrderedJson small = planned({"--shape", "small", "--machine", "h200"});
  const OrderedJson pruned = planned({"--shape", "small", "--machine", "h200", "--draft-vocab", "8192", "--layers", "3", "--markov", "none"});
  const double layer = 3 * 1536 * 576 + 2 * 576 * 576 + 2 * 192 * 576 + 2 * 576 + 2 * 64;
  const double expected = small["parameters"]["total"].get<double>() - (49152 - 8192) * 576.0 - 2 * layer - 2 * 49152 * 256.0 - (576 + 256 + 1);
  CHECK(pruned["parameters"]["total"] == expected);
  const Bench b;
  const auto drafter = b.make_drafter(b.make_store());
  const Ran inspect = dspark_run({"pack", drafter, "--inspect", "--json", "-"});
  const OrderedJson own = planned({"--shape", drafter, "--machine", "h200", "--row-tokens", "128", "--anchors", "32"});
  CHECK(own["row"]["flops"].get<double>() > 0);
  CHECK(own["parameters"]["total"].get<int64_t>() > 0);
}

TEST_CASE("benchmarks say what was reached and what could be, one or all in turn", "[plan][cli]") {
  const auto bench = [](std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), "bench");
    arguments.insert(arguments.end(), {"--shape", "tiny", "--steps", "1", "--threads", "1", "--json", "-"});
    const Ran ran = dspark_run(arguments);
    INFO(ran.describe());
    REQUIRE(ran.code == 0);
    return json_lines(ran.out);
  };
  const auto check_result = [](const OrderedJson& r, const std::string& unit) {
    INFO(r.dump());
    for (const char* key : {"what", "value", "unit", "limit", "share_of_limit", "samples", "kernel", "device"}) CHECK(r.contains(key));
    CHECK(r["unit"] == unit);
    CHECK(r["value"].get<double>() > 0);
    CHECK(r["limit"].get<double>() > 0);
    CHECK(r["share_of_limit"].get<double>() == Approx(r["value"].get<double>() / r["limit"].get<double>()));
    CHECK_FALSE(r["samples"].empty());
  };
  const auto loss = bench({"loss", "--chunk-slots", "16,64"});
  REQUIRE(loss.size() == 2);
  for (const auto& r : loss) check_result(r, "GFLOP/s");
  CHECK(loss[1]["memory_bytes"].get<double>() > 3 * loss[0]["memory_bytes"].get<double>());  // logits of four times the slots
  const auto optimizer = bench({"optimizer"});
  check_result(optimizer.at(0), "GB/s");
  REQUIRE(optimizer.size() > 2);
  for (size_t i = 1; i < optimizer.size(); ++i) check_result(optimizer[i], "GFLOP/s");
  // Each part is there, in its turn.
  const auto all = bench({"all", "--chunk-slots", "16,64", "--seconds", "0.01", "--machine", "h200"});
  std::string order;
  for (const auto& r : all) {
    const std::string what = r["what"], word = what.substr(0, what.find(' '));
    if (!order.ends_with(word + " ")) order += word + " ";
    if (r.contains("unit")) check_result(r, r["unit"]);
  }
  CHECK(order == "gemm loss adamw muon step forward memory ");
  for (const char* what : {"gemm linear bf16", "gemm linear_dx bf16", "gemm linear_dw bf16", "gemm linear bf16 1x997x80", "loss tiny bf16"})
    CHECK(std::any_of(all.begin(), all.end(), [&](const auto& r) { return r["what"].template get<std::string>().starts_with(what); }));
  const auto step = bench({"step", "--parts"});
  const OrderedJson& last = step.back();
  for (const char* key : {"step_s", "forward_backward_s", "optimizer_s"}) CHECK(last["predicted"][key].get<double>() > 0);
  CHECK(last["parts"].size() > 8);
  for (const auto& p : last["parts"]) CHECK((p["share_of_limit"].get<double>() > 0) == (p["part"] != "upload"));
  check_fails(dspark_run({"bench", "step", "--shape", "tiny", "--chunk-slots", "16,64"}), 2, {"--chunk-slots"});
  check_fails(dspark_run({"bench", "loss", "--shape", "huge"}), 2, {"huge", "kimi-k3"});
}
