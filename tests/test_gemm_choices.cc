// Measured choices of matrix kernels: by weight, never by rows; recorded with a run and taken up again with it.
#include <catch2/catch.hpp>
#include <nlohmann/json.hpp>
#include <vector>

#include "cli_bench.h"
#include "core/files.h"
#include "core/rng.h"
#include "core/threads.h"
#include "job/gemm_choices.h"
#include "model/ops_cpu/gemm.h"

using namespace dspark;
using namespace dspark::model::cpu;

namespace {

std::vector<float> normal(int64_t n, uint64_t seed) {
  const Rng rng(seed, RngStream::test);
  std::vector<float> v(static_cast<size_t>(n));
  for (size_t i = 0; i < v.size(); ++i) v[i] = static_cast<float>(rng.normal(i));
  return v;
}

// C [m, n] = A [m, k] W [n, k]^T through a packed weight, and its gradient form dW [n, k] = dY [m, n]^T A [m, k].
struct Products {
  std::vector<float> packed, gradient, input;
};
Products products(GemmContext& ctx, int64_t m, int64_t n, int64_t k) {
  const std::vector<float> a = normal(m * k, 1), w = normal(n * k, 2), dy = normal(m * n, 3);
  Products p{std::vector<float>(static_cast<size_t>(m * n)), std::vector<float>(static_cast<size_t>(n * k)), std::vector<float>(static_cast<size_t>(m * k))};
  const MatRef weight{w.data(), DType::f32, k};
  const int64_t bytes = packed_b_bytes(ctx.kernel_of_weight(DType::f32, n, k), DType::f32, n, k);
  std::vector<float> memory(static_cast<size_t>(bytes / 4 + 16));
  auto* aligned = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64);
  const PackedB b = pack_b_nt(ctx, n, k, weight, aligned);
  gemm_packed(ctx, m, n, k, {a.data(), DType::f32, k}, b, {p.packed.data(), DType::f32, n});
  gemm_tn(ctx, n, k, m, {dy.data(), DType::f32, n}, {a.data(), DType::f32, k}, {p.gradient.data(), DType::f32, k});
  gemm_weight_nn(ctx, m, k, n, {dy.data(), DType::f32, n}, weight, {p.input.data(), DType::f32, k});
  return p;
}

}  // namespace

TEST_CASE("a choice changes the kernel of one weight, for any number of rows", "[gemm]") {
  const auto kernels = available_kernels();
  if (kernels.size() < 2) {
    WARN("skipped: this CPU has one kernel");
    return;
  }
  const Kernel &usual = *kernels.back(), &other = *kernels.front();
  ThreadPool pool(2);
  constexpr int64_t n = 70, k = 700;  // more than one block of k: kernels differ in bits there
  GemmContext plain(pool, usual), all_other(pool, other);
  GemmContext chosen(pool, usual, {{false, DType::f32, n, k, &other}, {true, DType::f32, k, 0, &other}});
  CHECK(&chosen.kernel_of_weight(DType::f32, n, k) == &other);
  CHECK(&chosen.kernel_of_weight(DType::bf16, n, k) == &usual);
  CHECK(&chosen.kernel_of_weight(DType::f32, n, k + 1) == &usual);
  CHECK(&chosen.kernel_of_gradient(DType::f32, k) == &other);
  CHECK(&chosen.kernel_of_gradient(DType::f32, n) == &usual);
  std::vector<float> first_rows;
  for (const int64_t m : {1, 5, 40}) {
    const Products a = products(plain, m, n, k), b = products(all_other, m, n, k), c = products(chosen, m, n, k);
    CHECK(c.packed == b.packed);
    CHECK(c.gradient == b.gradient);
    CHECK(c.input == a.input);  // W [n, k] as B [n, k] of dY W is the weight of another shape (k, n): not chosen
    const std::vector<float> row(c.packed.begin(), c.packed.begin() + n);
    if (first_rows.empty()) first_rows = row;
    CHECK(row == first_rows);  // whatever m is
    const Products untouched = products(chosen, m, n + 1, k);
    CHECK(untouched.packed == products(plain, m, n + 1, k).packed);
  }
}

TEST_CASE("tables of choices are read strictly", "[gemm]") {
  const Scratch scratch;
  const auto table = [&](const std::string& choices, const std::string& version = "1.0") {
    return scratch.put("table.json", R"({"what": "dspark gemm table", "format_version": ")" + version + R"(", "choices": )" + choices + "}");
  };
  const auto good = job::read_gemm_table(table(R"([{"form": "packed", "type": "bf16", "n": 8, "k": 4, "kernel": "base"}, {"form": "tn", "type": "f32", "n": 8, "kernel": "base"}])"));
  REQUIRE(good.size() == 2);
  CHECK((good[0].form == "packed" && good[0].type == DType::bf16 && good[0].n == 8 && good[0].k == 4 && good[0].kernel == "base"));
  CHECK((good[1].form == "tn" && good[1].k == 0));
  const auto refuse = [&](const fs::path& file, const std::string& said) { CHECK_THROWS_WITH(job::read_gemm_table(file), Catch::Contains("table.json") && Catch::Contains(said)); };
  refuse(table(R"([{"form": "packed", "type": "bf16", "n": 8, "k": 4, "kernel": "sve9"}])"), "'sve9'");
  refuse(table(R"([{"form": "nn", "type": "bf16", "n": 8, "k": 4, "kernel": "base"}])"), "'form'");
  refuse(table(R"([{"form": "packed", "type": "fp8", "n": 8, "k": 4, "kernel": "base"}])"), "'type'");
  refuse(table(R"([{"form": "packed", "type": "bf16", "n": 0, "k": 4, "kernel": "base"}])"), "'n'");
  refuse(table(R"([{"form": "packed", "type": "bf16", "n": 8, "kernel": "base"}])"), "'k'");
  refuse(table(R"([{"form": "packed", "type": "bf16", "n": 8, "k": 4}])"), "'kernel'");
  refuse(table(R"([7])"), "choice 0");
  refuse(table(R"([{"form": "tn", "type": "f32", "n": 8, "kernel": "base"}, {"form": "tn", "type": "f32", "n": 8, "kernel": "base"}])"), "choice 1");
  refuse(table("[]", "2.0"), "2.0");
  refuse(scratch.put("table.json", "{}"), "bench gemm --save");
  refuse(scratch.put("table.json", "[1, 2"), "table.json");
}

TEST_CASE("a run goes on with the kernels it began with", "[gemm][cli]") {
  const Bench b;
  const auto store = b.make_store();
  // What bench measures is a table that train reads.
  const auto measured = b.at("measured.json");
  const Ran bench = dspark_run({"bench", "gemm", "--save", measured, "--shape", "tiny", "--threads", "1", "--seconds", "0.01", "--json", "-"});
  INFO(bench.describe());
  REQUIRE(bench.code == 0);
  CHECK(json_lines(bench.out).size() == job::read_gemm_table(measured).size());
  // One that no measurement would choose, so that it shows: everything of the tiny drafter's layer by the portable kernel.
  OrderedJson choices = OrderedJson::array();
  for (const int n : {32, 64, 128, 256})
    for (const int k : {32, 64, 128, 256}) choices.push_back({{"form", "packed"}, {"type", "bf16"}, {"n", n}, {"k", k}, {"kernel", "base"}});
  const auto table = b.scratch.put("table.json", OrderedJson{{"what", "dspark gemm table"}, {"format_version", "1.0"}, {"choices", choices}}.dump());
  const auto command = [&](const std::string& out, std::vector<std::string> more) {
    more.insert(more.end(), {"--save-every", "2", "--keep", "5"});
    return b.train(store, b.at(out), 4, more);
  };
  const Ran whole = dspark_run(command("whole", {"--gemm-table", table}));
  INFO(whole.describe());
  REQUIRE(whole.code == 0);
  CHECK(whole.said("table of 16 choices"));
  const Json state = read_json(b.at("whole") / "checkpoints" / "step-00000002" / "state.json");
  CHECK(state["kernels"]["choices"].size() == 16);
  CHECK_FALSE(state["kernels"]["kernel"].get<std::string>().empty());
  // Stopped after two steps; the table is gone, the run's state has it.
  const auto stop_at_two = [&](const std::string& out) {
    fs::copy(b.at("whole"), b.at(out), fs::copy_options::recursive);
    fs::remove_all(b.at(out) / "checkpoints" / "step-00000004");
    for (const char* name : {"config.json", "model.safetensors"}) fs::remove(b.at(out) / name);
  };
  stop_at_two("resumed");
  const Ran resumed = dspark_run(command("resumed", {}));
  INFO(resumed.describe());
  REQUIRE(resumed.code == 0);
  CHECK(resumed.said("table of 16 choices"));
  CHECK(file_bytes(b.at("resumed") / "model.safetensors") == file_bytes(b.at("whole") / "model.safetensors"));
  // Other kernels are other bits: refused, with the way out.
  stop_at_two("other");
  check_fails(dspark_run(command("other", {"--gemm-table", measured})), 1, {"16 choices", "--gemm-table", "--out"});
  const std::string kernel = state["kernels"]["kernel"];
  if (kernel != "base") check_fails(dspark_run(command("other", {"--cpu-kernel", "base"})), 1, {"--cpu-kernel " + kernel, "--out"});
  const auto file = b.at("other") / "checkpoints" / "step-00000002" / "state.json";
  Json gone = state;
  gone["kernels"]["kernel"] = "sve9";
  gone.erase("crc32c");
  gone["crc32c"] = json_checksum(gone);
  write_bytes(file, gone.dump());
  check_fails(dspark_run(command("other", {})), 1, {"sve9", "does not have"});
  check_fails(dspark_run(command("fresh", {"--gemm-table", b.at("nowhere.json")})), 1, {"nowhere.json"});
  check_fails(dspark_run({"bench", "step", "--save", b.at("x")}), 2, {"--save"});
  // fp64 computes without these kernels: nothing is recorded, and nothing asked.
  const Ran exact = dspark_run(b.train(store, b.at("exact"), 1, {"--precision", "fp64"}));
  REQUIRE(exact.code == 0);
  CHECK(read_json(b.at("exact") / "checkpoints" / "step-00000001" / "state.json")["kernels"]["kernel"] == "");
}
