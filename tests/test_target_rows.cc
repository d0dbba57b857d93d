// What a row gives does not depend on what else is in the call, in any bit: prefill, batched decoding and verification
// of a drafted block must agree exactly, or speculative decoding would not be lossless.
#include <catch2/catch.hpp>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/rng.h"
#include "scratch.h"
#include "target/generate.h"
#include "target/prefill.h"
#include "target_run.h"

using namespace dspark;
using namespace dspark::test;
using Catch::Contains;
using model::Precision;

namespace {

const fs::path kTargets = fs::path(DSPARK_SOURCE_DIR) / "tests/golden/target";

std::vector<int32_t> random_ids(int64_t n, int64_t vocab, uint64_t seed) {
  const Rng rng(seed, RngStream::sampling, 0);
  std::vector<int32_t> ids;
  for (int64_t i = 0; i < n; ++i)
    ids.push_back(static_cast<int32_t>(rng.uniform(static_cast<uint64_t>(i)) * static_cast<double>(vocab)));
  return ids;
}

void check_splits(LoadedTarget& target, const std::vector<int32_t>& a, const std::vector<int32_t>& b) {
  const std::vector<int> taps{0, 1, static_cast<int>(target.config().layers)};
  const auto n = static_cast<int64_t>(a.size()), m = static_cast<int64_t>(b.size());
  REQUIRE(n > 8);
  REQUIRE(m > n);
  const SequenceStates whole = run_target(target, a, taps), other = run_target(target, b, taps);
  CHECK_FALSE(whole.logits == std::vector<float>(whole.logits.size(), whole.logits.front()));

  CHECK(run_target(target, {a}, taps, std::vector<Call>(a.size(), Call{{0, 1}})).front() == whole);
  CHECK(run_target(target, {a}, taps, {{{0, 3}}, {{0, 1}}, {{0, n - 6}}, {{0, 2}}}).front() == whole);

  const auto together = run_target(target, {a, b}, taps, {{{0, n}, {1, m}}});
  CHECK(together[0] == whole);
  CHECK(together[1] == other);

  // Different lengths, then side by side, then the rest of the longer one.
  std::vector<Call> steps{{{1, 5}}, {{1, 2}, {0, 7}}};
  for (int64_t i = 7; i < n; ++i) steps.push_back({{0, 1}, {1, 1}});
  steps.push_back({{1, m - 7 - (n - 7)}});
  const auto mixed = run_target(target, {a, b}, taps, steps);
  CHECK(mixed[0] == whole);
  CHECK(mixed[1] == other);
}

// Rows that a cache holds beyond its length are as if they had never been.
void check_truncation(LoadedTarget& target, const std::vector<int32_t>& ids) {
  target::TargetModel& m = *target.decoder;
  model::Context& ctx = m.context();
  const auto n = static_cast<int64_t>(ids.size()), keep = n / 2;
  const int64_t e = target.config().hidden;
  const std::vector<float> whole = run_target(target, ids, {}).normed;
  target::KvCache cache = m.make_cache(n);
  model::Arena arena(ctx.device(), target::TargetModel::arena_bytes(target.config(), target.fp32, n, 0) + (1 << 16));
  std::vector<float> got(static_cast<size_t>(n * e));
  auto feed = [&](std::vector<int32_t> tokens, float* out) {
    arena.release(0);
    const auto rows = static_cast<int64_t>(tokens.size());
    const model::Tensor device_ids = arena.vector(DType::i32, rows);
    ctx.upload_now(device_ids, {tokens.data(), DType::i32, 1, rows, rows});
    const target::Segment segment{&cache, rows};
    ctx.download_now({out, DType::f32, rows, e, e}, m.forward(arena, device_ids, {&segment, 1}));
  };
  feed({ids.begin(), ids.begin() + keep}, got.data());
  feed({ids.rbegin(), ids.rbegin() + (n - keep)}, got.data() + keep * e);  // a draft that is refused
  cache.length = keep;
  feed({ids.begin() + keep, ids.end()}, got.data() + keep * e);
  CHECK(cache.length == n);
  m.free_cache(cache);
  CHECK(got == whole);
}

std::map<uint64_t, std::vector<int32_t>> generate(LoadedTarget& target, int64_t batch, double temperature) {
  target::GenerateOptions options;
  options.sampling.temperature = temperature;
  options.max_new_tokens = 12;
  options.max_length = 40;
  options.batch = batch;
  options.seed = 5;
  target::Generator generator(*target.decoder, options);
  std::map<uint64_t, std::vector<int32_t>> out;
  uint64_t id = 0;
  generator.run(
      [&](target::Prompt& p) {
        if (id == 5) return false;
        p = {id, random_ids(static_cast<int64_t>(3 + 8 * id), target.config().vocab, id)};
        ++id;
        return true;
      },
      [&](target::Generated&& g) {
        CHECK(g.ids.size() == std::min<size_t>(12, 40 - g.prompt.size()));  // by one limit or the other
        CHECK_FALSE(g.ended);
        return out.emplace(g.id, std::move(g.ids)).second;
      });
  return out;
}

}  // namespace

TEST_CASE("a row's bits do not depend on how rows are split into calls", "[target]") {
  for (const std::string name : {"tiny_gguf/llama_q4_1/model.gguf", "tiny_gguf/qwen3_bf16/model.gguf",
                                 "tiny/qwen2_sliding_bf16", "tiny/llama_bias_linear_rope"})
    for (const Precision precision : {Precision::bf16, Precision::fp32}) {
      INFO(name << (precision == Precision::fp32 ? " fp32" : " bf16"));
      LoadedTarget target(kTargets / name, precision);
      const int64_t v = target.config().vocab;
      const std::vector<int32_t> a = random_ids(41, v, 1), b = random_ids(77, v, 2);
      check_splits(target, a, b);
      check_truncation(target, a);
      LoadedTarget one_thread(kTargets / name, precision, 1);
      CHECK(run_target(one_thread, b, {1}) == run_target(target, b, {1}));
    }
}

TEST_CASE("a real model's bits do not depend on how rows are split into calls", "[target][model]") {
  const fs::path file = smollm2_path();
  for (const Precision precision : {Precision::bf16, Precision::fp32}) {
    INFO((precision == Precision::fp32 ? "fp32" : "bf16"));
    LoadedTarget target(file, precision);
    check_splits(target, random_ids(13, target.config().vocab, 3), random_ids(33, target.config().vocab, 4));
  }
}

TEST_CASE("prefill gives the forward's states in bf16, whatever it ran before and across its pieces", "[target]") {
  LoadedTarget target(kTargets / "tiny/llama_tied_bf16", Precision::bf16);
  const std::vector<int> taps{1, 2};
  const std::vector<int32_t> ids = random_ids(700, target.config().vocab, 7);  // more than one piece
  target::Prefill prefill(*target.decoder, taps, 700);
  const auto states = [&](const std::vector<int32_t>& x) {
    std::vector<float> out;
    for (const bf16 s : prefill.run(x)) out.push_back(to_float(s));
    return out;
  };
  for (const size_t n : {size_t{700}, size_t{1}, size_t{512}, size_t{513}}) {
    const std::vector<int32_t> some(ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(n));
    std::vector<float> want = run_target(target, some, taps).states;
    for (float& s : want) s = to_float(to_bf16(s));
    CHECK(states(some) == want);
  }
}

TEST_CASE("what a sequence says does not depend on the batch", "[target]") {
  LoadedTarget target(kTargets / "tiny_gguf/qwen2_q5_0/model.gguf", Precision::bf16);
  for (const double temperature : {0.0, 1.0}) {
    const auto alone = generate(target, 1, temperature);
    REQUIRE(alone.size() == 5);
    CHECK(generate(target, 2, temperature) == alone);
    CHECK(generate(target, 8, temperature) == alone);
  }
  CHECK(generate(target, 2, 0.0) != generate(target, 2, 1.0));
}

TEST_CASE("targets that are not there or not complete say so", "[target]") {
  Scratch scratch;
  CHECK_THROWS_WITH(target::TargetFiles(scratch.folder / "none"), Contains("no such target") && Contains("none"));
  CHECK_THROWS_WITH(target::TargetFiles(scratch.folder), Contains("holds no config.json"));
  const fs::path tiny = kTargets / "tiny/qwen3_tied";
  fs::copy(tiny / "config.json", scratch.folder / "config.json");
  CHECK_THROWS_WITH(target::TargetFiles(scratch.folder), Contains("safetensors"));

  const target::TargetFiles files(tiny);
  CHECK(files.name() == "qwen3_tied");
  CHECK(target::TargetFiles(tiny / "").name() == "qwen3_tied");
  CHECK_THROWS_WITH(files.tokenizer(), Contains("holds no tokenizer.json"));
  CHECK_THROWS_WITH(files.tensor("model.layers.99.mlp.up_proj.weight"), Contains("model.layers.99.mlp.up_proj.weight"));

  // transformers and servers disagree about a partial factor of such a model: a drafter of it trains on a server's states.
  Json part = read_json(tiny / "config.json");
  part["partial_rotary_factor"] = 0.5;
  const fs::path partial = scratch.folder / "partial";
  fs::copy(tiny, partial);
  write_text_atomic(partial / "config.json", part.dump());
  CHECK(target::TargetFiles(partial).config().rope.partial_rotary_factor == 0.5);
  CHECK(target::TargetFiles(partial).config_hash() != files.config_hash());
  CHECK_THROWS_WITH(LoadedTarget(partial, Precision::fp32), Contains("rotating a part of the head") && Contains("0.5") && Contains("server"));

  // Weights of another model than the config's: an Error with the tensor's name, before anything is computed.
  fs::copy(kTargets / "tiny/qwen2_bias/model.safetensors", scratch.folder / "model.safetensors");
  CHECK_THROWS_AS(LoadedTarget(scratch.folder, Precision::fp32), Error);
}
