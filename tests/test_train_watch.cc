// What shows a training run: console lines, the history file, events and the report page, alone and through the binary.
#include <catch2/catch.hpp>

#include <signal.h>

#include <limits>
#include <nlohmann/json.hpp>

#include "cli_bench.h"
#include "core/error.h"
#include "core/files.h"
#include "job/history.h"
#include "job/train_record.h"
#include "job/train_report.h"
#include "page.h"
#include "train/step_flops.h"

using namespace dspark;
using namespace dspark::job;

namespace {

train::StepRecord some_record(int64_t step, int64_t total) {
  train::StepRecord r;
  r.step = step, r.total = total;
  r.loss = 2.34567, r.lr = 6e-4, r.grad_norm = 1.234;
  r.tokens = 4096, r.flops = 2e9;
  r.data_ms = 1, r.compute_ms = 70, r.optimizer_ms = 29, r.step_ms = 100;
  auto& m = r.metrics;
  m.slots = 1000, m.blocks = 200, m.tau_sum = 300, m.weight_sum = 500;
  for (size_t t = 0; t < m.term_sum.size(); ++t) m.term_sum[t] = 100.0 * static_cast<double>(t + 1);
  m.accept_sum = {400, 200, 50}, m.top1_sum = {300, 100, 25}, m.slot_count = {500, 300, 200};
  m.conf_sum = 500, m.conf_bias_sum = 50, m.conf_abs_sum = 100;
  m.calibration[1] = {600, 90, 60}, m.calibration[7] = {400, 300, 280};
  return r;
}

ReportFacts some_facts(int64_t steps) {
  ReportFacts facts;
  facts.title = "dspark drafter for <tiny>";
  facts.out = "out & about";
  facts.objective = train::deepspec_objective(true);
  facts.total_steps = steps, facts.clip = 1, facts.limit = 4e11;
  facts.settings = {{"loss", "ce=0.1,tv=1.8,conf=1", "recipe deepspec"}, {"block", "3", "given"}};
  return facts;
}

// No word of the page leads out of it.
void check_self_contained(const std::string& html) {
  for (const char* word : {"http:", "https:", "//", "src=", "href=", "@import", "url(", "<script", "<link", "<iframe"}) {
    INFO(word);
    CHECK(html.find(word) == std::string::npos);
  }
}

}  // namespace

TEST_CASE("a console line fits 100 columns, whatever the numbers", "[train][watch]") {
  auto line = [](auto change, double left = 86400) {
    train::StepRecord r = some_record(123456, 200000);
    change(r);
    const std::string text = record_line(r, left);
    INFO(text);
    CHECK(text.size() <= 100);
    CHECK(text.find('\n') == std::string::npos);
    return text;
  };
  const std::string plain = line([](auto& r) { r.metrics.slots = 12345, r.step_ms = 1000; });
  CHECK(plain == "123456/200000 loss 2.3457 tau 1.500 acc1 0.800 norm 1.23 lr 6.0e-04 12345 slots/s, 24h00m left");
  CHECK(record_line(some_record(1, 20), -1) == "     1/20 loss 2.3457 tau 1.500 acc1 0.800 norm 1.23 lr 6.0e-04 10000 slots/s");
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN(), kInf = std::numeric_limits<double>::infinity();
  for (double v : {0.0, 99999.0, 1234567.0, 1e38, 1e300, -1e300, kNan, kInf, -kInf}) {
    line([&](auto& r) { r.grad_norm = v; });
    line([&](auto& r) { r.loss = v; });
    line([&](auto& r) { r.metrics.tau_sum = v; });
    line([&](auto& r) { r.step_ms = v; });
    line([&](auto& r) { r.grad_norm = r.loss = v, r.metrics.tau_sum = v; r.metrics.slots = 1e7; });
    line([&](auto& r) { r.phase = "validation", r.loss = v, r.metrics.blocks = 123456789; });
  }
  CHECK(line([](auto& r) { r.applied = false; }).find("SKIPPED") != std::string::npos);
  CHECK(line([](auto& r) { r.step = r.total = 9999999; }).find("left") == std::string::npos);
  line([](auto& r) { r.step = 9999998, r.total = 9999999; }, 1e9);
  // The bonus layout's first slot is never supervised: acc1 is that of the first proposal.
  CHECK(line([](auto& r) { r.metrics.slot_count[0] = 0, r.metrics.accept_sum[0] = 0; }).find("acc1 0.667") != std::string::npos);
}

TEST_CASE("a record's JSON holds every term of the loss, and the scalars are the same numbers", "[train][watch]") {
  const auto r = some_record(7, 20);
  train::Objective objective = train::deepspec_objective(true);
  objective.coef[model::kRkl] = 0.5;
  const OrderedJson j = record_json(r, objective, 1e11);
  CHECK(j.at("mfu").get<double>() == Approx(2e9 / 0.1 / 1e11));
  CHECK(j.at("rkl").get<double>() == Approx(400.0 / 500));
  CHECK_FALSE(j.contains("jsd"));
  CHECK(j.at("calibration").at("slots")[7] == 400);
  CHECK(j.at("calibration").at("confidence")[7].get<double>() == Approx(0.75));
  CHECK(j.at("calibration").at("acceptance")[1].get<double>() == Approx(0.1));
  CHECK_FALSE(record_json(r, objective, 0).contains("mfu"));

  std::map<std::string, double> scalars;
  for (const auto& s : record_scalars(j, objective, 0)) CHECK(scalars.emplace(s.tag, s.value).second);
  CHECK(scalars.at("loss/total") == r.loss);
  CHECK(scalars.at("loss/rkl") == j.at("rkl"));
  CHECK(scalars.count("loss/kl") == 0);  // measured without a coefficient: not part of the loss
  CHECK(scalars.at("acceptance/position_1") == j.at("accept_rate")[0]);
  CHECK(scalars.at("acceptance/position_3") == j.at("accept_rate")[2]);
  CHECK(scalars.at("top1/position_2") == j.at("top1")[1]);
  CHECK(scalars.at("time/forward_backward_ms") == 70);
  CHECK(scalars.at("speed/mfu") == j.at("mfu"));
  // With the bonus layout, position 1 is slot 1.
  for (const auto& s : record_scalars(j, objective, 1))
    if (s.tag == "acceptance/position_1") CHECK(s.value == j.at("accept_rate")[1]);
  auto v = r;
  v.phase = "validation";
  for (const auto& s : record_scalars(record_json(v, objective, 1e11), objective, 0)) CHECK(s.tag.starts_with("validation/"));
}

TEST_CASE("calibration bins add up and leave out what is no number", "[train][watch]") {
  train::StepMetrics a = some_record(1, 2).metrics, b = a;
  a.add(b);
  CHECK(a.calibration[1].slots == 1200);
  CHECK(a.calibration[7].confidence_sum == 600);
  CHECK(a.calibration[7].accept_sum == 560);

  model::BatchPlan plan;
  plan.block = 4;
  const double logits[] = {-30, 0, 30, std::numeric_limits<double>::quiet_NaN()};
  std::vector<double> out(4 * model::kSlotOutCols, 0);
  for (int s = 0; s < 4; ++s) {
    plan.slot_row.push_back(s), plan.slot_index.push_back(s), plan.weight.push_back(1);
    out[static_cast<size_t>(s * model::kSlotOutCols + model::kConfLogit)] = logits[s];
    out[static_cast<size_t>(s * model::kSlotOutCols + model::kAccept)] = 0.25;
  }
  const auto m = train::reduce_metrics(plan, out, train::deepspec_objective(true), true);
  CHECK(m.calibration[0].slots == 1);
  CHECK(m.calibration[5].slots == 1);
  CHECK(m.calibration[5].confidence_sum == 0.5);
  CHECK(m.calibration[5].accept_sum == 0.25);
  CHECK(m.calibration[9].slots == 1);  // a confidence of 1 lies in the last tenth
  double slots = 0;
  for (const auto& bin : m.calibration) slots += bin.slots;
  CHECK(slots == 3);
}

TEST_CASE("the history goes on after a kill at any byte", "[train][watch][fault]") {
  const Scratch scratch;
  const auto path = scratch.folder / "history.jsonl";
  auto line = [](const char* phase, int64_t step, double loss = 1) { return OrderedJson{{"phase", phase}, {"step", step}, {"loss", loss}}; };
  auto steps = [&](const History& h, int64_t unread = 0) {
    std::string text;
    CHECK(h.read([&](const OrderedJson& r) { text += fmt::format("{}{} ", r.at("phase") == "train" ? "" : "v", r.at("step").get<int64_t>()); }) == unread);
    return text;
  };
  {
    History h(path, 0, 6);
    CHECK_FALSE(fs::exists(path));  // nothing was recorded yet
    for (int64_t s = 1; s <= 6; ++s) {
      h.append(line("train", s));
      if (s % 2 == 0) h.append(line("validation", s));
    }
    CHECK(steps(h) == "1 2 v2 3 4 v4 5 6 v6 ");
  }
  const std::string whole = read_text(path);
  const size_t line_bytes = line("train", 1).dump().size() + 1;
  // Killed at any byte behind the checkpoint of step 3 (of step 2's validation too), then resumed there.
  size_t three = 0;
  for (int n = 0; n < 4; ++n) three = whole.find('\n', three) + 1;
  for (size_t cut = three; cut <= whole.size(); ++cut) {
    write_bytes(path, whole.substr(0, cut));
    History h(path, 3, 6);
    REQUIRE(steps(h) == "1 2 v2 3 ");
    h.append(line("train", 4));
    REQUIRE(steps(h) == "1 2 v2 3 4 ");
  }
  // Cut further than the checkpoint (a machine that lost power): what is there stays.
  write_bytes(path, whole.substr(0, line_bytes + 5));
  CHECK(steps(History(path, 3, 6)) == "1 ");
  // A run that begins again without a checkpoint begins its history again.
  write_bytes(path, whole);
  CHECK(steps(History(path, 0, 6)).empty());
  // A complete run: its last validation is done again.
  write_bytes(path, whole);
  CHECK(steps(History(path, 6, 6)) == "1 2 v2 3 4 v4 5 6 ");
  // Damage in the middle is left out and counted.
  std::string damaged = whole;
  damaged[line_bytes + 3] = '\0';
  write_bytes(path, damaged);
  CHECK(steps(History(path, 5, 6), 1) == "1 v2 3 4 v4 5 ");
  write_bytes(path, "[1]\n{}\n{\"phase\":1,\"step\":2}\nnull\n" + whole);
  CHECK(steps(History(path, 5, 6), 4) == "1 2 v2 3 4 v4 5 ");
}

TEST_CASE("a page of 100,000 steps is as large as one of a thousand", "[train][watch][report]") {
  const auto objective = train::deepspec_objective(true);
  auto page = [&](int64_t steps) {
    TrainReport report(some_facts(steps));
    for (int64_t s = 1; s <= steps; ++s) {
      auto r = some_record(s, steps);
      r.loss = 3 - static_cast<double>(s) / static_cast<double>(steps);
      const OrderedJson j = record_json(r, objective, 4e11);
      report.add(j);
      if (s % (steps / 10) == 0) r.phase = "validation", report.add(record_json(r, objective, 4e11));
    }
    return report.html("complete");
  };
  const std::string small = page(1000), large = page(100000);
  CHECK(large.size() < 1.3 * static_cast<double>(small.size()));
  CHECK(large.size() < 800000);
  check_page(large);
  check_self_contained(large);
  CHECK(large.find("of 100000, none skipped") != std::string::npos);
  CHECK(large.find("dspark drafter for &lt;tiny&gt;") != std::string::npos);
  const auto loss = figures(large, "Loss");
  REQUIRE(loss.size() == 1);
  CHECK(path_points(loss[0], "line") > 300);
  CHECK(path_points(loss[0], "line") <= 600);
  CHECK(all_between(loss[0], "<circle", "</circle>").size() == 10);
  CHECK(figures(large, "(ce), coefficient 0.1").size() == 1);
  CHECK(figures(large, "(tv), coefficient 1.8").size() == 1);
  CHECK(figures(large, "(conf), coefficient 1").size() == 1);
  CHECK(figures(large, "(kl)").empty());
  // Two bins of slots, in training and in validation; the error of both is 0.6 * |0.15 - 0.1| + 0.4 * |0.75 - 0.7|.
  const auto reliability = figures(large, "Reliability");
  REQUIRE(reliability.size() == 1);
  CHECK(all_between(reliability[0], "<circle", "</circle>").size() == 4);
  CHECK(all_between(reliability[0], "calibration error ", "<").front() == "0.050");
  CHECK(large.find("<td>ce=0.1,tv=1.8,conf=1</td><td>recipe deepspec</td>") != std::string::npos);
}

TEST_CASE("a page of nothing, of gaps and of numbers that are none is a page", "[train][watch][report]") {
  TrainReport nothing(some_facts(10));
  check_page(nothing.html("failed: <no> such \"file\""));
  TrainReport report(some_facts(10));
  const auto objective = train::deepspec_objective(true);
  for (int64_t s : {2, 3, 5, 4, 5}) {  // with gaps, and backwards
    auto r = some_record(s, 10);
    if (s == 3) r.loss = r.grad_norm = std::numeric_limits<double>::quiet_NaN(), r.applied = false;
    // As they come out of a file: null for NaN.
    report.add(OrderedJson::parse(record_json(r, objective, 0).dump()));
  }
  auto empty = some_record(6, 10);
  empty.metrics = {}, empty.applied = false, empty.loss = 0;
  report.add(record_json(empty, objective, 0));
  const std::string html = report.html("stopped");
  check_page(html);
  CHECK(html.find("Only 4 of 6 steps are in the run&#39;s history") != std::string::npos);
  CHECK(html.find("2 skipped") != std::string::npos);
  // Steps 2 and 5 have a loss, 3 is a gap, and the empty step's zero is no loss.
  CHECK(path_points(figures(html, "Loss").front(), "line") == 2);
  CHECK(path_points(figures(html, "Learning rate").front(), "line") == 4);
}

TEST_CASE("model FLOPs count attention by what anchors see", "[train][watch]") {
  model::DrafterConfig c;
  c.layers = {model::LayerType::full, model::LayerType::sliding};
  c.window = 8, c.block = 4, c.rank = 8;
  c.hidden = c.target_hidden = 32, c.heads = 4, c.kv_heads = 2, c.head_dim = 8, c.ffn = 64, c.vocab = c.draft_vocab = 100, c.mask_token = 99;
  c.max_position = 512;
  c.taps = {{1}, {2}};
  train::StepFlops flops(c, train::deepspec_objective(true), false, model::Precision::fp32);
  auto row = [&](std::vector<model::PackedDocument> documents, std::vector<int32_t> anchors) {
    const auto n = static_cast<size_t>(documents.back().end);
    const std::vector<int32_t> tokens(n, 1);
    const std::vector<uint8_t> mask(n, 1);
    model::PlanInput in;
    in.tokens = tokens, in.mask = mask, in.documents = documents, in.anchors = anchors;
    in.block = c.block, in.mask_token = c.mask_token;
    return flops.of(model::make_batch_plan(in));
  };
  // The same anchors, later in a document: what they see more costs 14 products' worth a query column and layer; a window ends it.
  const double early = row({{0, 100}}, {10, 20}), late = row({{0, 100}}, {50, 60});
  const double key = 2 * 7 * static_cast<double>(c.q_cols());
  CHECK(late - early == Approx(4 * key * (40 + 40)));
  // Behind a border they see less.
  const double whole = row({{0, 64}}, {48, 56}), parted = row({{0, 40}, {40, 64}}, {48, 56});
  CHECK(whole - parted == Approx(4 * key * (40 + 40)));
  // And the same row again is the same.
  CHECK(row({{0, 100}}, {10, 20}) == early);
}

TEST_CASE("train writes its page, its events and its history through the binary", "[cli][train][watch][report]") {
  const Bench b(24, 16);
  const auto store = b.make_store(), out = b.at("run");
  const auto page = b.at("page & <report>.html"), json = b.at("log.json");
  require_ok(dspark_run(b.train(store, out, 12, {"--validate-every", "4", "--val-fraction", "0.2", "--report", page, "--tensorboard", b.at("events"), "--json", json})));
  const std::string html = file_bytes(page);
  check_page(html);
  check_self_contained(html);
  CHECK(html.find("complete") != std::string::npos);
  // A curve for each term, a point a step, and the values that --json has.
  const auto lines = json_lines(file_bytes(json));
  for (const char* term : {"ce", "tv", "conf"}) {
    const auto found = figures(html, fmt::format("({}), coefficient", term));
    REQUIRE(found.size() == 1);
    CHECK(path_points(found[0], "line") == 12);
    for (const auto& line : lines)
      if (line.at("phase") == "train") {
        const std::string reading = fmt::format("<title>step {}\ntraining: {:.4g}</title>", line.at("step").get<int>(), line.at(term).get<double>());
        INFO(reading);
        CHECK(found[0].find(reading) != std::string::npos);
      }
    CHECK(all_between(found[0], "<circle", "</circle>").size() == 3);
  }
  for (const char* title : {"Loss", "Expected accepted length", "Acceptance by position", "Last validation, step 12", "Reliability", "Learning rate", "Gradient norm", "Time of a step", "slots a second"})
    CHECK(figures(html, title).size() == 1);
  CHECK(all_between(figures(html, "Acceptance by position").front(), "<path class=\"line\"", "/>").size() == 4);
  // All that --print-config prints.
  const Ran config = dspark_run({"train", "--print-config"});
  for (const auto& name : all_between("\n" + config.out, "\n", " ")) {
    INFO(name);
    CHECK((name.empty() || html.find("<td>" + name + "</td>") != std::string::npos));
  }
  CHECK(html.find("<td>given</td>") != std::string::npos);
  // The history is the JSON without its last line, byte for byte.
  const std::string log = file_bytes(json);
  CHECK(file_bytes(out / "history.jsonl") == log.substr(0, log.rfind("{\"phase\":\"done\"")));
  for (const auto& line : lines)
    if (line.at("phase") == "train") CHECK((line.at("mfu").get<double>() > 0 && line.at("mfu").get<double>() < 2));
  CHECK(files_below(b.at("events")).size() == 1);
  // Once more, without training: the same curves. Nothing is added to the events.
  fs::remove(page);
  require_ok(dspark_run(b.train(store, out, 12, {"--validate-every", "4", "--val-fraction", "0.2", "--report", page, "--tensorboard", b.at("events")})));
  CHECK(figures(file_bytes(page), "Loss") == figures(html, "Loss"));
  CHECK(files_below(b.at("events")).size() == 1);
  CHECK(file_bytes(out / "history.jsonl") == log.substr(0, log.rfind("{\"phase\":\"done\"")));
}

TEST_CASE("a stopped run has its page, and a killed and resumed one covers all steps", "[cli][train][watch][fault]") {
  const Bench b(24, 16);
  const auto store = b.make_store(), out = b.at("run"), page = b.at("page.html");
  constexpr int kSteps = 300;
  require_ok(dspark_run(b.train(store, b.at("whole"), kSteps)));
  Process first(b.train(store, out, kSteps, {"--report", page, "--json", b.at("first.json")}));
  wait_for_lines(first, b.at("first.json"), 10);
  first.kill(SIGTERM);
  CHECK(first.wait().code == 75);
  const std::string stopped = file_bytes(page);
  check_page(stopped);
  CHECK(stopped.find("stopped after step") != std::string::npos);
  const size_t done = step_lines(out / "history.jsonl").size();
  CHECK(path_points(figures(stopped, "Learning rate").front(), "line") == done);

  for (int round = 0; round < 3; ++round) {
    fs::remove(b.at("killed.json"));
    Process run(b.train(store, out, kSteps, {"--save-every", "5", "--json", b.at("killed.json")}));
    wait_for_lines(run, b.at("killed.json"), 1 + static_cast<int64_t>(20 * random_fraction()));
    run.kill(SIGKILL);
    run.wait();
  }
  require_ok(dspark_run(b.train(store, out, kSteps, {"--report", page})));
  CHECK(step_lines(out / "history.jsonl") == step_lines(b.at("whole") / "history.jsonl"));
  CHECK(step_lines(out / "history.jsonl").size() == kSteps);
  const std::string html = file_bytes(page);
  check_page(html);
  CHECK(html.find(fmt::format("of {}, none skipped", kSteps)) != std::string::npos);
  CHECK(path_points(figures(html, "Learning rate").front(), "line") == kSteps);
}

TEST_CASE("an output that cannot be written is said before the run", "[cli][train][watch]") {
  const Bench b;
  const auto store = b.make_store(), out = b.at("run");
  b.scratch.put("file", "text");
  make_folder(b.at("folder"));
  check_fails(dspark_run(b.train(store, out, 2, {"--report", b.at("no") / "page.html"})), 1, {"page.html", "No such file"});
  check_fails(dspark_run(b.train(store, out, 2, {"--report", b.at("folder")})), 1, {"--report", "folder"});
  check_fails(dspark_run(b.train(store, out, 2, {"--report", b.at("file") / "page.html"})), 1, {"page.html"});
  check_fails(dspark_run(b.train(store, out, 2, {"--tensorboard", b.at("file")})), 1, {"--tensorboard", "file"});
  CHECK_FALSE(fs::exists(out));
  CHECK(file_bytes(b.at("file")) == "text");
  check_fails(dspark_run(b.train(store, out, 2, {"--tensorboard", b.at("file") / "deep"})), 1, {"deep"});
  CHECK_FALSE(fs::exists(out / "history.jsonl"));
  CHECK_FALSE(fs::exists(out / "checkpoints"));
  // A report from an earlier run stays as it is until the new one is whole.
  const auto page = b.scratch.put("page.html", "old");
  check_fails(dspark_run(b.train(b.at("gone"), out, 2, {"--report", page})), 1, {"gone"});
  CHECK(file_bytes(page) == "old");
}
