// Training on several ranks: the same trajectory whatever their number, the same bits each time, checkpoints that any number of ranks
// goes on from, and an end for all when one stops, fails, dies or hangs. Ranks are threads (or forked processes) over socket pairs.
#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <catch2/catch.hpp>

#include <cmath>
#include <future>
#include <nlohmann/json.hpp>
#include <thread>

#include "core/json.h"
#include "core/log.h"
#include "rank_run.h"
#include "train/host_collectives.h"
#include "train/shards.h"

using namespace dspark;
using namespace dspark::model;
using ranks::difference;
using ranks::Outcome;
using ranks::RunOptions;
using ranks::TinyRuns;

namespace {

// Calls f(rank, mesh) on a thread each and returns what each threw, or "".
template <typename F>
std::vector<std::string> on_ranks(int64_t n, double deadline_s, const F& f) {
  auto meshes = ranks::local_meshes(n, deadline_s);
  std::vector<std::string> errors(meshes.size());
  std::vector<std::thread> threads;
  for (size_t r = 0; r < meshes.size(); ++r)
    threads.emplace_back([&, r] {
      try {
        f(static_cast<int64_t>(r), *meshes[r]);
      } catch (const std::exception& e) {
        errors[r] = e.what();
        meshes[r]->abort(e.what());
      }
    });
  for (auto& t : threads) t.join();
  return errors;
}
bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

void check_no_errors(const std::vector<Outcome>& all) {
  for (size_t r = 0; r < all.size(); ++r) {
    INFO("rank " << r << ": " << all[r].error);
    CHECK(all[r].error.empty());
  }
}

// Of rounding in fp64 alone. A gradient that differs by 1e-16 moves a weight through AdamW by at most lr * 1e-16 / eps = 1e-2 * 1e-8 a
// step, and through later steps some ten times that.
constexpr double kRounding = 1e-8;

}  // namespace

TEST_CASE("ranks sum, gather and broadcast, with the same bits everywhere", "[ranks]") {
  for (const int64_t n : {1, 2, 3, 5}) {
    std::vector<std::vector<double>> sums(static_cast<size_t>(n));
    const auto errors = on_ranks(n, 30, [&](int64_t rank, net::Mesh& mesh) {
      std::vector<double> v{1e16 * (rank == 0 ? 1 : 0), 1.0 + static_cast<double>(rank), rank == n - 1 ? -1e16 : 0.0};
      mesh.sum("numbers", v);
      sums[static_cast<size_t>(rank)] = v;
      const auto texts = mesh.gather("texts", std::string(static_cast<size_t>(rank) * 100000, 'x') + std::to_string(rank));
      if ((rank == 0) != (texts.size() == static_cast<size_t>(n))) fail("{} texts on rank {}", texts.size(), rank);
      for (size_t r = 0; r < texts.size(); ++r)
        if (texts[r].size() != r * 100000 + 1 || texts[r].back() != static_cast<char>('0' + r)) fail("the text of rank {} has {} bytes", r, texts[r].size());
      if (mesh.broadcast("news", rank == 0 ? "from the first" : "from another") != "from the first") fail("another text on rank {}", rank);
      mesh.sum("nothing", {});
      mesh.check();
    });
    for (const auto& e : errors) CHECK(e == "");
    const auto count = static_cast<double>(n);
    for (const auto& s : sums) CHECK(s == std::vector<double>{1e16, count * (count + 1) / 2, -1e16});
  }
}

TEST_CASE("tensors are summed at their owners and come back, in parts and in groups", "[ranks]") {
  struct World {
    int64_t ranks, group;
  };
  for (const World w : {World{1, 1}, World{2, 2}, World{3, 3}, World{4, 2}, World{6, 3}})
    for (const Precision precision : {Precision::bf16, Precision::fp32, Precision::fp64}) {
      const std::vector<std::pair<int64_t, int64_t>> shapes{{1, 1}, {300, 1000}, {0, 7}, {513, 513}, {3, 5}, {1, 262145}};
      std::vector<std::vector<std::vector<double>>> owned(static_cast<size_t>(w.ranks)), gathered(owned.size());
      const auto value = [](int64_t rank, size_t piece, int64_t i) { return static_cast<double>((rank * 7 + static_cast<int64_t>(piece) * 3 + i) % 11) - 4; };
      const auto errors = on_ranks(w.ranks, 60, [&](int64_t rank, net::Mesh& mesh) {
        const auto backend = make_backend({.device = precision == Precision::fp64 ? "ref" : "cpu", .precision = precision, .threads = 1});
        Context& ctx = backend->context();
        const auto collectives = train::make_collectives(ctx, mesh, {w.group});
        std::vector<Collectives::Piece> pieces;
        for (size_t p = 0; p < shapes.size(); ++p) {
          const auto [rows, cols] = shapes[p];
          const Tensor t = ctx.allocate(ctx.act_dtype(), rows, cols);
          std::vector<double> v;
          for (int64_t i = 0; i < t.size(); ++i) v.push_back(value(rank, p, i));
          ctx.upload_now(t, {v.data(), DType::f64, rows, cols, cols});
          pieces.push_back({t, static_cast<int64_t>(p) % w.group});
        }
        const auto read = [&](const Tensor& t) {
          std::vector<double> v(static_cast<size_t>(t.size()));
          ctx.download_now({v.data(), DType::f64, t.rows, t.cols, t.cols}, t);
          return v;
        };
        collectives->reduce_to_owners(pieces);
        for (const auto& p : pieces) owned[static_cast<size_t>(rank)].push_back(p.owner == collectives->place() ? read(p.tensor) : std::vector<double>{});
        collectives->gather_from_owners(pieces);
        for (const auto& p : pieces) gathered[static_cast<size_t>(rank)].push_back(read(p.tensor));
        // One of a group's ranks has a number each; the groups have the same.
        const Tensor small = ctx.allocate(ctx.acc_dtype(), 1, w.group);
        fill(ctx, {small, 0});
        fill(ctx, {small.col_range(collectives->place(), 1), static_cast<double>(collectives->place()) + 0.1});
        collectives->sum_in_group(small);
        const auto numbers = read(small);
        for (size_t i = 0; i < numbers.size(); ++i)
          if (std::abs(numbers[i] - static_cast<double>(i) - 0.1) > 1e-6) fail("rank {}: {} at place {}", rank, numbers[i], i);
        ctx.free(small);
        for (const auto& p : pieces) ctx.free(p.tensor);
      });
      for (const auto& e : errors) CHECK(e == "");
      for (size_t p = 0; p < shapes.size(); ++p) {
        std::vector<double> expected;
        for (int64_t i = 0; i < shapes[p].first * shapes[p].second; ++i) {
          double sum = 0;
          for (int64_t r = 0; r < w.ranks; ++r) sum += value(r, p, i);
          expected.push_back(sum);
        }
        for (int64_t r = 0; r < w.ranks; ++r) {
          INFO(w.ranks << " ranks in groups of " << w.group << ", rank " << r << ", piece " << p);
          if (r % w.group == static_cast<int64_t>(p) % w.group) CHECK((owned[static_cast<size_t>(r)][p] == expected));
          CHECK((gathered[static_cast<size_t>(r)][p] == expected));
        }
      }
    }
}

TEST_CASE("ranks that do not make the same calls are told which and where", "[ranks][fault]") {
  const auto other_call = on_ranks(2, 10, [](int64_t rank, net::Mesh& mesh) {
    std::vector<double> v{1};
    mesh.sum("first", v);
    mesh.sum(rank == 0 ? "loss" : "weights", v);
  });
  CHECK(contains(other_call[0], "rank 1 is at call 3 ('weights', 8 bytes), rank 0 at call 3 ('loss', 8 bytes): the ranks do not run the same command"));
  CHECK(contains(other_call[1], "rank 0 ended the run: rank 1 is at call 3"));
  const auto other_size = on_ranks(3, 10, [](int64_t rank, net::Mesh& mesh) {
    std::vector<double> v(rank == 2 ? 2 : 1);
    mesh.sum("loss", v);
  });
  CHECK(contains(other_size[0], "rank 2 is at call 1 ('loss', 16 bytes), rank 0 at call 1 ('loss', 8 bytes)"));
  CHECK(contains(other_size[1], "rank 0 ended the run: rank 2 is at call 1"));
  const auto late = on_ranks(2, 0.2, [](int64_t rank, net::Mesh& mesh) {
    std::vector<double> v(1);
    if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(600));
    mesh.sum("loss", v);
  });
  CHECK(contains(late[0], "rank 0 waited 0.2 s in 'loss' (call 1) for rank 1"));
  CHECK(contains(late[1], "rank 0 ended the run: rank 0 waited 0.2 s"));
  // An error that was said once is said again, and a reason of any length arrives.
  const auto again = on_ranks(2, 10, [](int64_t rank, net::Mesh& mesh) {
    if (rank == 1) fail("{}", std::string(3000, 'y'));
    std::vector<double> v(1);
    std::string first;
    try {
      mesh.sum("loss", v);
    } catch (const Error& e) {
      first = e.what();
    }
    mesh.sum("loss", v);
  });
  CHECK(again[0] == "rank 1 ended the run: " + std::string(3000, 'y'));
}

TEST_CASE("rows are dealt evenly, every one once", "[ranks]") {
  std::vector<train::RowDocuments> rows;
  for (const int64_t tokens : {5, 900, 40, 1000, 7, 7, 300, 650, 12, 90, 1}) {
    rows.emplace_back(1);
    rows.back()[0].document.n_tokens = tokens;
  }
  for (const int64_t n : {1, 2, 3, 4, 11, 16}) {
    const auto dealt = train::deal_rows(rows, n);
    REQUIRE(dealt.size() == static_cast<size_t>(n));
    std::vector<size_t> seen;
    for (const auto& own : dealt) {
      CHECK(std::is_sorted(own.begin(), own.end()));
      const auto least = rows.size() / static_cast<size_t>(n);
      CHECK((own.size() == least || own.size() == least + 1));
      seen.insert(seen.end(), own.begin(), own.end());
    }
    std::sort(seen.begin(), seen.end());
    for (size_t i = 0; i < rows.size(); ++i) CHECK(seen.at(i) == i);
    CHECK(seen.size() == rows.size());
  }
  const auto two = train::deal_rows(rows, 2);
  int64_t first = 0;
  for (const size_t i : two[0]) first += rows[i][0].document.n_tokens;
  CHECK(std::abs(2 * first - 3012) < 300);
}

TEST_CASE("one, two and three ranks train alike, to the bit when repeated", "[ranks][train]") {
  const TinyRuns runs;
  for (const bool muon : {false, true})
    for (const bool own_width : {false, true}) {
      INFO((muon ? "muon" : "adamw") << (own_width ? ", a width of its own" : ""));
      RunOptions o;
      o.muon = muon, o.own_width = own_width, o.val_fraction = 0.3, o.validate_every = 2;
      o.out = fmt::format("one{}{}", muon, own_width);
      const Outcome one = runs.run(o, 1).front();
      REQUIRE(one.error == "");
      REQUIRE(one.steps.size() == 5);
      REQUIRE(one.validation.size() == 6);
      for (const int64_t n : {2, 3}) {
        o.out = fmt::format("ranks{}{}{}", n, muon, own_width);
        const auto all = runs.run(o, n);
        check_no_errors(all);
        CHECK(difference(all[0], one) < kRounding);
        for (size_t i = 0; i < one.validation.size(); ++i) CHECK(all[0].validation.at(i) == Approx(one.validation[i]).epsilon(kRounding));
        int64_t owned = 0;
        for (const Outcome& outcome : all) {
          CHECK((outcome.weights == all[0].weights));
          CHECK(outcome.owned > 0);
          owned += outcome.owned;
        }
        CHECK(owned == one.owned);
        o.out += "again";
        CHECK((runs.run(o, n)[0] == all[0]));
      }
    }
}

TEST_CASE("gradients leave while the backward goes on, when they are final, and nothing else changes", "[ranks][train]") {
  const TinyRuns runs;
  for (const bool bf16_wire : {false, true})
    for (const bool muon : {false, true}) {
      RunOptions o;
      o.muon = muon, o.bf16_wire = bf16_wire, o.own_width = muon, o.row_tokens = 8;  // rows of a document: several micro-steps a rank
      if (bf16_wire) o.backend = {.device = "cpu", .precision = Precision::bf16, .threads = 2};
      o.out = fmt::format("beside{}{}", bf16_wire, muon);
      const auto beside = runs.run(o, 2);
      check_no_errors(beside);
      o.out += "end";
      o.collectives = [](Context& ctx, net::Mesh& mesh, const CollectiveOptions& group) { return ranks::all_at_the_end(ctx, train::make_collectives(ctx, mesh, group), true); };
      const auto end = runs.run(o, 2);
      check_no_errors(end);
      for (const size_t r : {0, 1}) CHECK((beside[r] == end[r]));
    }
}

TEST_CASE("collectives go on beside the rank, and end with it", "[ranks][fault]") {
  std::promise<void> started, filled;
  const auto errors = on_ranks(2, 20, [&](int64_t rank, net::Mesh& mesh) {
    const auto backend = make_backend({.device = "cpu", .precision = Precision::fp32, .threads = 2});
    Context& ctx = backend->context();
    const auto collectives = train::make_collectives(ctx, mesh, {2});
    const Tensor a = ctx.allocate(DType::f32, 300, 1000), b = ctx.allocate(DType::f32, 5, 7), other = ctx.allocate(DType::f32, 300, 1000);
    for (const Tensor& t : {a, b, other}) fill(ctx, {t, 1.0 + static_cast<double>(rank)});
    const Collectives::Piece first{a, 0}, second{b, 1};
    if (rank == 1) started.get_future().wait();  // the other rank does not wait for this one's part
    collectives->start_reduce({&first, 1});
    collectives->start_gather({&second, 1});
    for (int i = 0; i < 50; ++i) fill(ctx, {other, static_cast<double>(i)});
    if (rank == 0) started.set_value();
    collectives->finish();
    const auto value = [&](const Tensor& t) {
      double v = 0;
      ctx.download_now({&v, DType::f64, 1, 1, 1}, t.row_range(t.rows - 1, 1).col_range(t.cols - 1, 1));
      return v;
    };
    if (rank == 0 && value(a) != 3) fail("the sum is {}", value(a));
    if (value(b) != 2 || value(other) != 49) fail("{} and {}", value(b), value(other));
    // One that leaves while its thread waits for the other says why, all the same.
    if (rank == 0) {
      collectives->start_reduce({&first, 1});
      const double start = now_s();
      collectives->abort("the disk is full");
      if (now_s() - start > 10) fail("leaving took {:g} s", now_s() - start);
      filled.set_value();
    } else {
      filled.get_future().wait();
      std::string said;
      try {
        collectives->reduce_to_owners({&first, 1});
      } catch (const Error& e) {
        said = e.what();
      }
      if (said != "rank 0 ended the run: the disk is full") fail("said '{}'", said);
    }
    for (const Tensor& t : {a, b, other}) ctx.free(t);
  });
  for (const auto& e : errors) CHECK(e == "");
}

TEST_CASE("shard groups train as one group does", "[ranks][train]") {
  const TinyRuns runs;
  RunOptions o;
  o.muon = true;
  const Outcome one = runs.run(o, 1).front();
  o.group = 2, o.out = "groups";
  const auto all = runs.run(o, 4);
  check_no_errors(all);
  CHECK(difference(all[0], one) < kRounding);
  for (const Outcome& outcome : all) CHECK((outcome.weights == all[0].weights));
  CHECK(all[0].owned == all[2].owned);
  CHECK(all[0].owned + all[1].owned == one.owned);
}

TEST_CASE("ranks without rows bring zeros", "[ranks][train]") {
  const TinyRuns runs;
  RunOptions o;
  o.batch_docs = 1, o.val_fraction = 0.1, o.validate_every = 1;
  const Outcome one = runs.run(o, 1).front();
  REQUIRE(one.error == "");
  o.out = "ranks";
  const auto all = runs.run(o, 3);
  check_no_errors(all);
  CHECK(difference(all[0], one) < kRounding);
}

TEST_CASE("denominators of a micro-step and of slots are taken over ranks", "[ranks][train]") {
  const TinyRuns runs;
  // A row each on two ranks is one micro-step: its weights' sum is the batch's, but for 1e-6.
  RunOptions o;
  o.batch_docs = 2, o.row_tokens = 1, o.steps = 4, o.out = "pooled";
  const Outcome pooled = runs.run(o, 1).front();
  o.denominator = train::Denominator::micro, o.out = "micro";
  const auto micro = runs.run(o, 2);
  check_no_errors(micro);
  o.out = "micro1";
  const Outcome apart = runs.run(o, 1).front();
  double least = 1e300;
  for (const auto& step : pooled.steps) least = std::min(least, step[3] * std::exp(-0.5));  // a slot weighs at least exp(-2/4)
  CHECK(difference(micro[0], pooled) < 100 * 1e-6 / least);  // relative; weights and steps amplify it
  CHECK(difference(micro[0], apart) > 1e-4);                 // two micro-steps are something else
  // Slots are counted a rank: two ranks of a row are what two micro-steps of one rank are, and a rank without a row counts.
  o.denominator = train::Denominator::count, o.out = "count1";
  const Outcome count = runs.run(o, 1).front();
  o.out = "count2";
  const auto two = runs.run(o, 2);
  check_no_errors(two);
  CHECK(difference(two[0], count) < kRounding);
  o.out = "count4";
  const auto four = runs.run(o, 4);
  check_no_errors(four);
  REQUIRE(four[0].steps.size() == 4);
  CHECK(four[0].steps[0][1] == Approx(two[0].steps[0][1] / 2).epsilon(1e-12));
}

TEST_CASE("any number of ranks goes on from a checkpoint", "[ranks][train][checkpoint]") {
  const TinyRuns runs;
  for (const bool muon : {false, true}) {
    RunOptions o;
    o.steps = 6, o.save_every = 3, o.muon = muon, o.out = muon ? "muon" : "adamw";
    const auto whole = runs.run(o, 2);
    check_no_errors(whole);
    const fs::path checkpoint = runs.at(o.out) / "checkpoints" / "step-00000003";
    for (const char* file : {"masters-00001-of-00002.safetensors", "masters-00002-of-00002.safetensors", "optimizer-00001-of-00002.safetensors", "optimizer-00002-of-00002.safetensors", "state.json"}) {
      INFO(file);
      CHECK(fs::exists(checkpoint / file));
    }
    const Json state = read_json(checkpoint / "state.json");
    CHECK(state.at("owners") == 2);
    CHECK(state.at("files").size() == 4);
    for (const int64_t n : {1, 2, 3}) {
      INFO(n << " ranks");
      RunOptions rest = o;
      rest.out = fmt::format("{}-{}", o.out, n);
      fs::create_directories(runs.at(rest.out) / "checkpoints");
      fs::copy(checkpoint, runs.at(rest.out) / "checkpoints" / "step-00000003", fs::copy_options::recursive);
      const auto all = runs.run(rest, n);
      check_no_errors(all);
      REQUIRE(all[0].steps.size() == 3);
      Outcome end = whole[0];
      end.steps.erase(end.steps.begin(), end.steps.begin() + 3);
      CHECK(difference(all[0], end) < kRounding);
      if (n == 2) CHECK((all[0] == end));
      // And from what three wrote, one.
      if (n != 3) continue;
      RunOptions last = rest;
      last.steps = 8;
      const auto one = runs.run(last, 1);
      check_no_errors(one);
      REQUIRE(one[0].steps.size() == 2);
    }
    // A file of one owner that is cut is a damaged checkpoint.
    fs::resize_file(checkpoint.parent_path() / "step-00000006" / "optimizer-00002-of-00002.safetensors", 100);
    CHECK(train::newest_checkpoint(runs.at(o.out))->step == 3);
  }
}

TEST_CASE("masters are their owners' alone, and bf16 may carry gradients", "[ranks][train]") {
  const TinyRuns runs;
  RunOptions o;
  o.backend = {.device = "cpu", .precision = Precision::bf16, .threads = 1}, o.muon = true;
  const Outcome one = runs.run(o, 1).front();
  REQUIRE(one.error == "");
  for (const bool bf16_wire : {false, true}) {
    o.bf16_wire = bf16_wire, o.out = bf16_wire ? "bf16" : "fp32";
    const auto all = runs.run(o, 3);
    check_no_errors(all);
    int64_t masters = 0;
    for (const Outcome& outcome : all) {
      CHECK((outcome.weights == all[0].weights));
      CHECK(outcome.state_elements < one.state_elements);
      masters += outcome.state_elements;
    }
    CHECK(masters == one.state_elements);
    CHECK(all[0].steps[0][0] == Approx(one.steps[0][0]).epsilon(1e-6));  // the same forward
    CHECK(all[0].steps[0][1] == Approx(one.steps[0][1]).epsilon(bf16_wire ? 1e-2 : 1e-5));
    CHECK((all[0].steps[0][1] == Approx(one.steps[0][1]).epsilon(1e-6)) == !bf16_wire);
    o.out += "again";
    CHECK((runs.run(o, 3)[0] == all[0]));
  }
}

TEST_CASE("a stop on one rank stops all at the same step, and the rest follows", "[ranks][train][checkpoint]") {
  const TinyRuns runs;
  RunOptions o;
  o.steps = 1000000, o.out = "stopped";
  const auto all = runs.run(o, 3, 60, [](int64_t rank, RunOptions& own) { own.time_limit_s = rank == 1 ? 0.2 : 0; });
  check_no_errors(all);
  for (const Outcome& outcome : all) {
    CHECK(outcome.result.stopped);
    CHECK(outcome.result.steps == all[0].result.steps);
  }
  REQUIRE(all[0].result.steps < 1000000);
  const auto found = train::newest_checkpoint(runs.at("stopped"));
  REQUIRE(found);
  CHECK(found->step == all[0].result.steps);
}

TEST_CASE("a rank that fails ends the others with its reason", "[ranks][fault]") {
  const TinyRuns runs;
  RunOptions o;
  o.steps = 1000;
  o.on_step = [](const train::StepRecord& r) {
    if (r.step == 3) fail("the disk is full");
  };
  const auto all = runs.run(o, 3);
  CHECK(all[0].error == "the disk is full");
  for (const size_t r : {1, 2}) CHECK(contains(all[r].error, "rank 0 ended the run: the disk is full"));
}

TEST_CASE("a rank that is killed or hangs ends the others in time", "[ranks][fault]") {
  const TinyRuns runs;
  for (const bool killed : {true, false}) {
    INFO((killed ? "killed" : "stopped"));
    RunOptions o;
    o.steps = 1000000, o.out = killed ? "killed" : "hangs";
    auto meshes = ranks::local_meshes(3, killed ? 60 : 4);
    int under_way[2];
    REQUIRE(::pipe2(under_way, O_CLOEXEC) == 0);
    const pid_t child = ::fork();
    REQUIRE(child >= 0);
    if (child == 0) {
      // The others' ends are theirs alone.
      meshes[0].reset(), meshes[2].reset();
      std::thread([&] {
        char step;
        while (::read(under_way[0], &step, 1) != 1) {
        }
        ::raise(killed ? SIGKILL : SIGSTOP);
      }).detach();
      (void)runs.run(o, meshes[1].get());
      ::_exit(0);
    }
    meshes[1].reset();
    o.on_step = [&](const train::StepRecord& r) {
      if (r.step == 3) CHECK(::write(under_way[1], "3", 1) == 1);
    };
    const double start = now_s();
    std::array<Outcome, 3> outcomes;
    std::vector<std::thread> threads;
    for (const size_t r : {0, 2}) threads.emplace_back([&, r] { outcomes[r] = runs.run(o, meshes[r].get()); });
    for (auto& t : threads) t.join();
    CHECK(now_s() - start < 20);
    CHECK(outcomes[0].steps.size() >= 3);
    for (const int fd : under_way) ::close(fd);
    if (killed)
      for (const size_t r : {0, 2}) CHECK(contains(outcomes[r].error, "rank 1 is gone: its connection ended in '"));
    else
      for (const size_t r : {0, 2}) {  // on its own, or by the other's word
        INFO(outcomes[r].error);
        CHECK(contains(outcomes[r].error, "waited 4"));
        CHECK(contains(outcomes[r].error, "for rank 1: stopped, stuck or cut off"));
      }
    ::kill(child, SIGKILL);
    int status = 0;
    CHECK(::waitpid(child, &status, 0) == child);
    CHECK(WIFSIGNALED(status));
  }
}
