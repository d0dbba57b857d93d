// What else is read as a store, and the tools: the DeepSpec cache, a folder of hs files; inspect, verify, merge.
#include "store_samples.h"

#include <nlohmann/json.hpp>

#include "core/json.h"
#include "core/log.h"
#include "formats/safetensors.h"
#include "job/store_tools.h"

using namespace store_samples;
using Catch::Matchers::Contains;

TEST_CASE("the DeepSpec target cache of the fixture is read exactly", "[store][golden]") {
  const fs::path folder = fs::path(DSPARK_SOURCE_DIR) / "tests/golden/train/deepspec_cache";
  const Json expected = read_json(folder / "expected.json");
  const auto source = open_store(folder);
  CHECK(source->kind() == "DeepSpec target cache");
  CHECK(source->identity().taps == std::vector<int>{2, 5, 8});
  CHECK(source->identity().last_state == LastState::post_norm);
  CHECK(source->identity().hidden_size == 12);
  CHECK(source->identity().target == "tiny-target");
  REQUIRE(source->size() == static_cast<int64_t>(expected["samples"].size()));
  for (int64_t i = 0; i < source->size(); ++i) {
    const Json& want = expected["samples"][std::to_string(source->info(i).id)];
    const SampleTokens t = source->tokens(i);
    CHECK(t.token_ids == want["input_ids"].get<std::vector<int32_t>>());
    CHECK(t.loss_mask == want["loss_mask"].get<std::vector<uint8_t>>());
    const std::vector<bf16> states = read_all(*source, i);
    const auto taps = want["target_hidden_states"].get<std::vector<std::vector<float>>>();
    const auto last = want["target_last_hidden_states"].get<std::vector<std::vector<float>>>();
    REQUIRE(taps.size() == t.token_ids.size());
    for (size_t r = 0; r < taps.size(); ++r)
      for (size_t c = 0; c < 48; ++c) REQUIRE(to_float(states[r * 48 + c]) == (c < 36 ? taps[r][c] : last[r][c - 36]));
  }
  // A short shard, and an index that points outside.
  TempFolder dir;
  fs::copy(folder, dir.path, fs::copy_options::recursive);
  fs::resize_file(dir.path / "shard-00001.bin", 305);
  CHECK_THROWS_WITH(open_store(dir.path), Contains("shard-00001.bin") && Contains("cut off or damaged"));
  fs::resize_file(dir.path / "samples.idx", 100);
  CHECK_THROWS_WITH(open_store(dir.path), Contains("expected 3 records of 56"));
}

TEST_CASE("the hs folder of the fixture is read exactly", "[store][golden]") {
  const fs::path folder = fs::path(DSPARK_SOURCE_DIR) / "tests/golden/train/hs_folder";
  const SafetensorsFile expected(folder / "expected.safetensors");
  CHECK_THROWS_WITH(open_store(folder), Contains("has no loss_mask") && Contains("Arrow"));
  CHECK_THROWS_WITH(open_store(folder, {.taps = {2}, .assume_full_mask = true}), Contains("1 taps asked"));
  const auto source = open_store(folder, {.taps = {2, 4, 6}, .assume_full_mask = true});
  CHECK(source->kind() == "hs folder");
  CHECK(source->identity().last_state == LastState::pre_norm);
  CHECK(source->identity().hidden_size == 12);
  REQUIRE(source->size() == 3);
  for (int64_t i = 0; i < 3; ++i) {
    const std::string name = fmt::format("sample{}.", i);
    const std::vector<int64_t> ids = read_i64(expected.get(name + "input_ids"));
    const SampleTokens t = source->tokens(i);
    CHECK(std::vector<int64_t>(t.token_ids.begin(), t.token_ids.end()) == ids);
    const auto taps = read_f32(expected.get(name + "hidden_states", {source->info(i).n_tokens, 36}));
    const auto last = read_f32(expected.get(name + "verifier_last_hidden_states", {source->info(i).n_tokens, 12}));
    const std::vector<bf16> states = read_all(*source, i);
    for (size_t k = 0; k < states.size(); ++k)
      REQUIRE(to_float(states[k]) == (k % 48 < 36 ? taps[k / 48 * 36 + k % 48] : last[k / 48 * 12 + k % 48 - 36]));
  }
}

TEST_CASE("an hs folder with masks, fp32 states and damage", "[store]") {
  TempFolder dir;
  const auto write = [&](int number, int64_t n, int64_t width) {
    const std::vector<TensorSpec> specs = {
        {"hidden_states", DType::f32, {n, 2, width}}, {"token_ids", DType::i64, {n}}, {"loss_mask", DType::u8, {n}}};
    SafetensorsWriter w(dir.path / fmt::format("hs_{}.safetensors", number), specs);
    for (const TensorSpec& spec : w.specs()) {
      if (spec.name == "token_ids")
        w.write(spec.name, std::vector<int64_t>(static_cast<size_t>(n), 7));
      else if (spec.name == "loss_mask") {
        std::vector<uint8_t> mask(static_cast<size_t>(n), 1);
        mask[0] = 0;
        w.write(spec.name, mask);
      } else
        w.write(spec.name, std::vector<float>(static_cast<size_t>(n * 2 * width), 1.0f + 0x1p-8f));
    }
    w.finish();
  };
  write(3, 4, 6);
  write(20, 5, 6);
  write(100, 5, 7);  // another width
  write_bytes(dir.path / "hs_5.safetensors", "garbage");
  write_bytes(dir.path / "hs_3.safetensors.lock", "");
  const auto source = open_store(dir.path);
  REQUIRE(source->size() == 2);
  CHECK(source->info(0).id == 3);
  CHECK(source->info(1).id == 20);
  CHECK(source->info(1).n_mask == 4);
  CHECK(source->identity().taps == std::vector<int>{kUnknownTap});
  CHECK(to_float(read_all(*source, 1)[3]) == 1.0f);  // 1 + 2^-8 is a tie: to even
  REQUIRE(source->problems().size() == 2);
  CHECK(source->problems()[0].file == "hs_5.safetensors");
  CHECK_THAT(source->problems()[1].what, Contains("[5, 2, 7]"));
}

TEST_CASE("inspect, verify and merge", "[store]") {
  TempFolder dir;
  const fs::path a = dir.path / "a", b = dir.path / "b", out = dir.path / "out";
  const auto samples = write_small(a, StoreCodec::raw);
  const StoreIdentity id = small_identity(StoreCodec::raw);
  {
    StoreWriter w(b, id);
    w.append(encode_record(w.format(), samples[1].view()));  // also in a
    for (uint64_t k = 50; k < 52; ++k) w.append(encode_record(w.format(), make_sample(k, 4, 15).view()));
    w.checkpoint();
  }
  const Json j = job::inspect_store(a);
  CHECK(j["samples"] == 3);
  CHECK(j["tokens"] == 1 + 3 + 5);
  CHECK(j["loss_tokens"] == 0 + 2 + 3);
  CHECK(j["finish"]["stop"] == 3);
  CHECK(j["raw_bytes"] == 9 * (15 * 2 + 5));
  CHECK(j["complete"] == true);
  CHECK_THAT(job::store_table(j), Contains("2 5 (after n layers), last state pre_norm") && Contains("raw, ratio"));
  CHECK(job::inspect_store(b)["complete"] == false);
  CHECK_THAT(job::store_table(job::inspect_store(b)), Contains("not finished"));

  CHECK_THROWS_WITH(job::merge_stores({a}, a), Contains("input and output at once"));
  auto merged = job::merge_stores({a, b}, out);
  CHECK(merged.samples == 5);
  CHECK(merged.added == 5);
  CHECK(merged.duplicates == 1);
  CHECK(merged.problems.empty());
  merged = job::merge_stores({a, b}, out);  // again: nothing new
  CHECK(merged.samples == 5);
  CHECK(merged.added == 0);
  {
    const StoreReader reader(out);
    CHECK(reader.complete());
    for (int64_t i = 0; i < 3; ++i) CHECK(equal(reader, i, samples[static_cast<size_t>(i)]));
    CHECK(equal(reader, 4, make_sample(51, 4, 15)));
  }
  job::StoreCheck check = job::verify_store(out);
  CHECK(check.samples == 5);
  CHECK(check.problems.empty());
  CHECK(check.not_finite.empty());

  // A flipped byte of one block: found with its place, left out of a merge.
  uint64_t offset = 0;
  {
    const StoreReader reader(a);
    offset = reader.offset_of(2);
  }
  std::string bytes = file_bytes(a / shard_name(0));
  bytes[bytes.size() - 20] ^= 1;
  write_bytes(a / shard_name(0), bytes);
  check = job::verify_store(a);
  CHECK(check.samples == 2);
  REQUIRE(check.problems.size() == 1);
  CHECK_THAT(check.problems[0].text(),
             Contains(fmt::format("{} at {}: sample 2", shard_name(0), offset)) && Contains("is damaged"));
  fs::remove_all(out);
  merged = job::merge_stores({a, b}, out);
  CHECK(merged.samples == 4);
  CHECK(merged.problems.size() == 1);

  // Another identity; another sample under the same id.
  write_small(dir.path / "z", StoreCodec::zstd);
  CHECK_THROWS_WITH(job::merge_stores({b, dir.path / "z"}, dir.path / "no"), Contains("hold different things (codec"));
  CHECK_FALSE(fs::exists(dir.path / "no"));
  {
    StoreWriter w(dir.path / "clash", id);
    w.append(encode_record(w.format(), make_sample(50, 9, 15).view()));
    w.finish();
  }
  CHECK_THROWS_WITH(job::merge_stores({b, dir.path / "clash"}, dir.path / "no"),
                    Contains("another sample under the id"));

  // A foreign kind becomes a store.
  const fs::path cache = fs::path(DSPARK_SOURCE_DIR) / "tests/golden/train/deepspec_cache";
  CHECK(job::verify_store(cache).samples == 3);
  merged = job::merge_stores({cache}, dir.path / "converted");
  CHECK(merged.samples == 3);
  const auto from = open_store(cache), to = open_store(dir.path / "converted");
  CHECK(to->identity().codec == StoreCodec::zstd);
  CHECK(identity_difference(from->identity(), to->identity(), IdentityCompare::data_only) == "");
  for (int64_t i = 0; i < 3; ++i) {
    CHECK(same_bits(read_all(*from, i), read_all(*to, i)));
    CHECK(from->tokens(i).loss_mask == to->tokens(i).loss_mask);
  }
}
