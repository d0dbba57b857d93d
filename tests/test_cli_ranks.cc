// `dspark train` as several processes on this machine, found by torchrun's and Slurm's variables.
#include <arpa/inet.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <nlohmann/json.hpp>
#include <thread>

#include "cli_bench.h"
#include "core/error.h"
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
    CHECK(contains(refusal([] { (void)net::place_from_environment(); }), "WORLD_SIZE is not set"));
    e.set("WORLD_SIZE", "2");
    CHECK(contains(refusal([] { (void)net::place_from_environment(); }), "MASTER_ADDR is not set"));
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
  const auto missing = meet_all(absent, 0.5, -1);
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
