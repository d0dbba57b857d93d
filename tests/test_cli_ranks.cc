// `dspark train` as several processes on this machine, found by torchrun's and Slurm's variables.
#include <arpa/inet.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "cli_bench.h"
#include "core/error.h"
#include "core/log.h"
#include "formats/safetensors.h"
#include "net/rendezvous.h"

namespace fs = std::filesystem;
using namespace dspark;

namespace {

int free_port() {
  const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in a{};
  a.sin_family = AF_INET, a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  REQUIRE(::bind(fd, reinterpret_cast<sockaddr*>(&a), sizeof a) == 0);
  socklen_t n = sizeof a;
  ::getsockname(fd, reinterpret_cast<sockaddr*>(&a), &n);
  ::close(fd);
  return ntohs(a.sin_port);
}

// Variables of this process, as started ones inherit them; all are gone at the end.
class Environment {
 public:
  void set(const std::string& name, const std::string& value) {
    ::setenv(name.c_str(), value.c_str(), 1);
    names_.push_back(name);
  }
  ~Environment() {
    for (const auto& name : names_) ::unsetenv(name.c_str());
  }

 private:
  std::vector<std::string> names_;
};

std::vector<std::unique_ptr<Process>> start_ranks(const std::vector<std::string>& arguments, int n) {
  Environment e;
  e.set("WORLD_SIZE", std::to_string(n)), e.set("MASTER_ADDR", "localhost"), e.set("MASTER_PORT", std::to_string(free_port()));
  std::vector<std::unique_ptr<Process>> all;
  for (int r = 0; r < n; ++r) {
    e.set("RANK", std::to_string(r)), e.set("LOCAL_RANK", std::to_string(r));
    all.push_back(std::make_unique<Process>(arguments));
  }
  return all;
}
std::vector<Ran> wait_all(std::vector<std::unique_ptr<Process>>& all) {
  std::vector<Ran> ran;
  for (auto& p : all) ran.push_back(p->wait());
  return ran;
}

std::string refusal(const std::function<void()>& f) {
  try {
    f();
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}
bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace

TEST_CASE("a rank's place comes from torchrun's or Slurm's variables", "[ranks][net]") {
  CHECK(net::place_from_environment().size == 1);
  {
    Environment e;
    e.set("RANK", "2"), e.set("WORLD_SIZE", "4"), e.set("LOCAL_RANK", "1"), e.set("MASTER_ADDR", "node7"), e.set("MASTER_PORT", "1234");
    const net::Place p = net::place_from_environment();
    CHECK((p.rank == 2 && p.size == 4 && p.local_rank == 1 && p.address == "node7" && p.port == 1234));
    e.set("TORCHELASTIC_USE_AGENT_STORE", "True");
    CHECK(net::place_from_environment().port == 1235);
    e.set("RANK", "4");
    CHECK(contains(refusal([] { (void)net::place_from_environment(); }), "RANK is '4', expected a number from 0 to 3"));
    e.set("RANK", "x");
    CHECK(contains(refusal([] { (void)net::place_from_environment(); }), "RANK is 'x'"));
  }
  {
    Environment e;
    e.set("RANK", "0");
    CHECK(net::place_from_environment().size == 1);  // set for whatever reason, it says no more than that
    e.set("LOCAL_RANK", "0");
    CHECK(contains(refusal([] { (void)net::place_from_environment(); }), "RANK is '0', but WORLD_SIZE is not set"));
    CHECK(net::place_from_environment(true).size == 1);
    e.set("WORLD_SIZE", "2");
    CHECK(contains(refusal([] { (void)net::place_from_environment(); }), "MASTER_ADDR is not set"));
  }
  {
    Environment e;
    e.set("RANK", "1");
    CHECK(contains(refusal([] { (void)net::place_from_environment(); }), "RANK is '1', but WORLD_SIZE is not set"));
  }
  {
    Environment e;
    e.set("WORLD_SIZE", "1");
    CHECK(net::place_from_environment().size == 1);
    e.set("WORLD_SIZE", "4");
    CHECK(contains(refusal([] { (void)net::place_from_environment(); }), "WORLD_SIZE is '4', but RANK is not set"));
    CHECK(net::place_from_environment(true).size == 1);
  }
  {
    Environment e;
    e.set("SLURM_PROCID", "3"), e.set("SLURM_LOCALID", "1"), e.set("SLURM_NTASKS", "8"), e.set("SLURM_JOB_ID", "77"), e.set("SLURM_STEP_NODELIST", "gpu[007-010,12],x1");
    CHECK(net::place_from_environment().size == 1);  // in the batch script itself, outside srun
    e.set("SLURM_STEP_NUM_TASKS", "8"), e.set("SLURM_STEP_ID", "2");
    const net::Place p = net::place_from_environment();
    CHECK((p.rank == 3 && p.size == 8 && p.local_rank == 1 && p.address == "gpu007" && p.port == 15000 + 77 * 17 + 2));
  }
  CHECK(net::first_node("a1") == "a1");
  CHECK(net::first_node("a1,b[2-3]") == "a1");
  CHECK(net::first_node("n[3]") == "n3");
}

TEST_CASE("ranks meet, whoever comes first, and say who is missing or wrong", "[ranks][net]") {
  const auto meet_all = [](const std::vector<net::Place>& places, double deadline, int64_t late) {
    std::vector<std::string> errors(places.size());
    std::vector<std::thread> threads;
    for (size_t r = 0; r < places.size(); ++r)
      threads.emplace_back([&, r] {
        if (static_cast<int64_t>(r) == late) std::this_thread::sleep_for(std::chrono::milliseconds(300));
        try {
          const auto mesh = net::meet(places[r], deadline);
          std::vector<double> v{1, static_cast<double>(places[r].rank)};
          mesh->sum("hello", v);
          const auto n = static_cast<double>(mesh->size());
          if (v != std::vector<double>{n, n * (n - 1) / 2}) errors[r] = "a wrong sum";
        } catch (const Error& e) {
          errors[r] = e.what();
        }
      });
    for (auto& t : threads) t.join();
    return errors;
  };
  const auto places = [](int64_t n) {
    std::vector<net::Place> all;
    const int port = free_port();
    for (int64_t r = 0; r < n; ++r) all.push_back({r, n, r, "localhost", port, "test"});
    return all;
  };
  for (const int64_t n : {1, 2, 5})
    for (const int64_t late : {int64_t{0}, n - 1})
      for (const auto& e : meet_all(places(n), 20, late)) CHECK(e == "");
  auto absent = places(3);
  absent.pop_back();
  const auto missing = meet_all(absent, 2, -1);
  CHECK(contains(missing[0], "rank 0 of 3 waited in vain for rank 2"));
  CHECK(contains(missing[1], "did not let rank 1 of 3 in"));
  auto twice = places(3);
  twice[2].rank = 1;
  CHECK(contains(meet_all(twice, 2, 2)[0], "two processes say that they are rank 1 of 3"));
  auto other = places(2);
  other[1].size = 3;
  CHECK(contains(meet_all(other, 2, -1)[0], "a process says that it is rank 1 of 3, but rank 0 is one of 2"));
  CHECK(contains(meet_all({places(2)[1]}, 0.5, -1)[0], "rank 1 of 2 cannot reach rank 0 at localhost port"));
}

TEST_CASE("two processes train what one does, and one goes on", "[ranks][cli]") {
  const Bench b{24, 12};
  const auto store = b.make_store();
  const Bench::Arguments options{"--batch-docs", "4", "--row-tokens", "64", "--precision", "fp32", "--threads", "1", "--val-fraction", "0.2", "--save-every", "4"};
  const auto with = [&](Bench::Arguments more) {
    more.insert(more.end(), options.begin(), options.end());
    return more;
  };
  require_ok(dspark_run(b.train(store, b.at("one"), 8, with({"--json", b.at("one.json")}))));
  auto two = start_ranks(b.train(store, b.at("two"), 8, with({"--json", b.at("two.json")})), 2);
  const auto ran = wait_all(two);
  for (const Ran& r : ran) require_ok(r);
  CHECK(ran[0].said("rank 0 of 2 (RANK and WORLD_SIZE), rank 0 at localhost port "));
  CHECK(ran[1].said("rank 1 of 2 "));
  CHECK(ran[0].said("drafter in "));
  CHECK_FALSE(ran[1].said("drafter in "));
  const auto one_lines = json_lines(file_bytes(b.at("one.json"))), two_lines = json_lines(file_bytes(b.at("two.json")));
  REQUIRE(one_lines.size() == two_lines.size());
  for (size_t i = 0; i < one_lines.size(); ++i) {
    if (one_lines[i]["phase"] == "done") continue;
    INFO(two_lines[i].dump());
    for (const char* key : {"loss", "tau"}) CHECK(two_lines[i][key].get<double>() == Approx(one_lines[i][key].get<double>()).epsilon(1e-3));
  }
  // Bits, again; and one process alone goes on from what two wrote.
  auto again = start_ranks(b.train(store, b.at("again"), 8, options), 2);
  for (const Ran& r : wait_all(again)) require_ok(r);
  CHECK(file_bytes(b.at("again") / "model.safetensors") == file_bytes(b.at("two") / "model.safetensors"));
  fs::remove_all(b.at("two") / "checkpoints" / "step-00000008");
  const Ran rest = dspark_run(b.train(store, b.at("two"), 8, options));
  require_ok(rest);
  CHECK(rest.said("at step 4"));
  const formats::SafetensorsFile alone(b.at("two") / "model.safetensors"), whole(b.at("again") / "model.safetensors");
  REQUIRE(alone.tensors().size() == whole.tensors().size());
}

TEST_CASE("a process that is told to stop stops both with 75, one that is killed ends both", "[ranks][cli][fault]") {
  const Bench b{24, 12};
  const auto store = b.make_store();
  for (const int signal : {SIGTERM, SIGKILL}) {
    const auto out = b.at("out" + std::to_string(signal)), json = b.at("json" + std::to_string(signal));
    auto all = start_ranks(b.train(store, out, 100000, {"--batch-docs", "4", "--threads", "1", "--json", json}), 2);
    wait_for_lines(*all[0], json, 3);
    all[1]->kill(signal);
    const auto ran = wait_all(all);
    if (signal == SIGTERM) {
      for (const Ran& r : ran) check_fails(r, 75, {"checkpoint of step", "start the same command again"});
    } else {
      CHECK(ran[1].signal == SIGKILL);
      check_fails(ran[0], 1, {"rank 1 is gone: its connection ended in '"});
    }
  }
}

namespace {

// In the order in which they were started.
std::vector<pid_t> children_of(pid_t parent) {
  std::ifstream text(fmt::format("/proc/{0}/task/{0}/children", parent));
  std::vector<pid_t> all;
  for (pid_t p = 0; text >> p;) all.push_back(p);
  return all;
}
// Whether the command handles this signal by now. (Until it is itself, it has the tests' handlers.)
bool catches(pid_t pid, int signal) {
  std::error_code none;
  if (fs::read_symlink(fmt::format("/proc/{}/exe", pid), none).filename() != "dspark") return false;
  std::ifstream text(fmt::format("/proc/{}/status", pid));
  for (std::string line; std::getline(text, line);)
    if (line.starts_with("SigCgt:")) return (std::stoull(line.substr(7), nullptr, 16) >> (signal - 1) & 1) != 0;
  return false;
}
// What has ended may wait for whoever takes in its exit status.
bool is_there(pid_t pid) {
  std::ifstream text(fmt::format("/proc/{}/stat", pid));
  std::string number, name, state;
  return static_cast<bool>(text >> number >> name >> state) && state != "Z";
}

}  // namespace

TEST_CASE("--ranks starts them, and they train what two started processes do", "[ranks][cli]") {
  const Bench b{24, 12};
  const auto store = b.make_store();
  const Bench::Arguments options{"--batch-docs", "4", "--row-tokens", "64", "--precision", "fp32", "--threads", "1", "--val-fraction", "0.2"};
  const auto with = [&](Bench::Arguments more) {
    more.insert(more.end(), options.begin(), options.end());
    return more;
  };
  auto two = start_ranks(b.train(store, b.at("two"), 6, with({"--ranks", "2"})), 2);  // saying so again is no contradiction
  for (const Ran& r : wait_all(two)) require_ok(r);
  {
    Environment e;
    e.set("WORLD_SIZE", "7");  // alone: nobody's
    const Ran ran = dspark_run(b.train(store, b.at("launched"), 6, with({"--ranks", "2", "--json", b.at("json")})));
    require_ok(ran);
    CHECK(ran.said("rank 0 of 2 "));
    for (const char* other : {"rank 1:", "rank 1 of"}) CHECK_FALSE(ran.said(other));
    CHECK(json_lines(file_bytes(b.at("json"))).back()["phase"] == "done");
  }
  CHECK(file_bytes(b.at("launched") / "model.safetensors") == file_bytes(b.at("two") / "model.safetensors"));
  // What all ranks find wrong is said by one.
  const Ran wrong = dspark_run(b.train(b.at("nothing"), b.at("wrong"), 6, with({"--ranks", "2"})));
  check_fails(wrong, 1, {"nothing"});
  check_fails(dspark_run(b.train(store, b.at("wrong"), 6, with({"--ranks", "2", "--device", "cuda:1"}))), 2, {"--device cuda:1", "--ranks"});
  check_fails(dspark_run(b.train(store, b.at("wrong"), 6, with({"--ranks", "2", "--lr", "-1"}))), 2, {"--lr"});
  auto others = start_ranks(b.train(store, b.at("wrong"), 6, with({"--ranks", "3"})), 2);
  for (const Ran& r : wait_all(others)) check_fails(r, 2, {"--ranks 3: RANK and WORLD_SIZE say that there are 2"});
  const Ran help = dspark_run({"train", "--help"});
  for (const char* name : {"--ranks", "--rank-timeout", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID"}) CHECK(help.out.find(name) != std::string::npos);
}

TEST_CASE("a rank that waits for the others stops when it is told to", "[ranks][cli][fault]") {
  const Bench b{24, 12};
  const auto store = b.make_store();
  Environment e;
  e.set("RANK", "0"), e.set("WORLD_SIZE", "2"), e.set("LOCAL_RANK", "0"), e.set("MASTER_ADDR", "localhost"), e.set("MASTER_PORT", std::to_string(free_port()));
  Process run(b.train(store, b.at("out"), 8));
  while (run.running() && !catches(children_of(::getpid()).at(0), SIGTERM)) ::usleep(1000);
  const double start = now_s();
  run.kill(SIGTERM);
  check_fails(run.wait(), 75, {"the ranks had not met yet"});
  CHECK(now_s() - start < 20);  // it would wait for ten minutes
  CHECK_FALSE(fs::exists(b.at("out")));
}

TEST_CASE("ranks that --ranks started stop together, end with one that dies or hangs, and with the one that started them", "[ranks][cli][fault]") {
  const Bench b{24, 12};
  const auto store = b.make_store();
  enum Fault { stop, killed, hangs, first_hangs, alone };
  for (const Fault fault : {stop, killed, hangs, first_hangs, alone}) {
    INFO("fault " << fault);
    const auto out = b.at("out" + std::to_string(fault)), json = b.at("json" + std::to_string(fault));
    Process run(b.train(store, out, 1000000, {"--batch-docs", "4", "--threads", "1", "--json", json, "--ranks", "2", "--rank-timeout", fault == hangs || fault == first_hangs ? "5" : "600"}));
    wait_for_lines(run, json, 3);
    REQUIRE(run.running());
    const auto ranks = children_of(children_of(::getpid()).at(0));
    REQUIRE(ranks.size() == 2);
    const double start = now_s();
    if (fault == stop) run.kill(SIGTERM);
    else if (fault == alone) run.kill(SIGKILL);
    else ::kill(ranks[fault == first_hangs ? 0 : 1], fault == killed ? SIGKILL : SIGSTOP);
    const Ran ran = run.wait();
    INFO(ran.describe());
    CHECK(now_s() - start < 40);
    switch (fault) {
      case stop: check_fails(ran, 75, {"checkpoint of step", "start the same command again"}); break;
      case killed:
        check_fails(ran, 1, {"rank 1 was ended by signal 9"});
        CHECK(ran.said("rank 1 is gone: its connection ended in '"));
        break;
      case hangs: check_fails(ran, 1, {"rank 0 waited 5 s in '", "for rank 1: stopped, stuck or cut off"}); break;
      case first_hangs: check_fails(ran, 1, {"rank 1 waited 5.5 s in '", "for rank 0: stopped, stuck or cut off"}); break;
      case alone: CHECK(ran.signal == SIGKILL); break;
    }
    // Nobody is left; without the one that started them they stop with a checkpoint.
    for (const double until = now_s() + 20; (is_there(ranks[0]) || is_there(ranks[1])) && now_s() < until;) ::usleep(10000);
    for (const pid_t p : ranks) CHECK_FALSE(is_there(p));
    if (fault == stop || fault == alone) CHECK(fs::exists(out / "checkpoints"));
  }
}
