#include <catch2/catch.hpp>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/json.h"
#include "core/rng.h"
#include "formats/gguf.h"
#include "formats/hf_config.h"
#include "formats/safetensors.h"
#include "scratch.h"

using namespace dspark;
using namespace dspark::formats;
using Catch::Contains;

namespace {

const fs::path kGolden = DSPARK_SOURCE_DIR "/tests/golden/target";

// Builds GGUF bytes by hand, so that the writer is not its own witness.
struct Bytes {
  std::string s;
  template <typename T>
  Bytes& n(T v) {
    s.append(reinterpret_cast<const char*>(&v), sizeof(T));
    return *this;
  }
  Bytes& u32(uint32_t v) { return n(v); }
  Bytes& u64(uint64_t v) { return n(v); }
  Bytes& text(std::string_view t) {
    u64(t.size());
    s += t;
    return *this;
  }
  Bytes& head(uint64_t n_tensors, uint64_t n_keys, uint32_t version = 3) {
    s += "GGUF";
    return u32(version).u64(n_tensors).u64(n_keys);
  }
  Bytes& tensor(std::string_view name, std::vector<uint64_t> dims, uint32_t type, uint64_t offset) {
    text(name).u32(static_cast<uint32_t>(dims.size()));
    for (uint64_t d : dims) u64(d);
    return u32(type).u64(offset);
  }
  Bytes& align(size_t a = 32) {
    s.resize((s.size() + a - 1) / a * a);
    return *this;
  }
};

constexpr uint32_t kU8 = 0, kU32 = 4, kF32 = 6, kBool = 7, kString = 8, kArray = 9, kU64 = 10;

Bytes small() {
  Bytes b;
  b.head(2, 5).text("general.architecture").u32(kString).text("llama");
  b.text("n").u32(kU32).u32(7).text("eps").u32(kF32).n(1e-5f);
  b.text("flags").u32(kArray).u32(kBool).u64(3).n<uint8_t>(1).n<uint8_t>(0).n<uint8_t>(1);
  b.text("words").u32(kArray).u32(kString).u64(2).text("ab").text("");
  b.tensor("w", {32, 2}, 8, 0).tensor("b", {2}, 0, 96).align();
  for (int row = 0; row < 2; ++row) {
    b.n<uint16_t>(0x3c00);
    for (int j = 0; j < 32; ++j) b.n(static_cast<int8_t>(j - 16 * row));
  }
  b.align();
  return b.n(1.5f).n(-2.0f);
}

// What code may do with an accepted file.
size_t use_everything(const Gguf& g) {
  size_t total = 0;
  for (const std::string& key : g.keys()) {
    total += g.describe(key).size();
    if (!g.is_array(key)) continue;
    for (auto read : {0, 1, 2}) try {
        if (read == 0)
          for (auto s : g.strings(key)) total += std::string(s).size();
        if (read == 1) total += g.integers(key).size();
        if (read == 2) total += g.numbers(key).size();
      } catch (const Error&) {
      }
  }
  for (const GgufTensor& t : g.tensors()) {
    REQUIRE(t.count() == shape_count(t.shape, t.name));
    try {
      total += read_f32(t).size();
    } catch (const Error&) {  // integer types
    }
  }
  return total;
}

fs::path smollm2() {
  const char* cache = std::getenv("DSPARK_MODEL_CACHE");
  const fs::path folder = cache ? fs::path(cache) : fs::path(std::getenv("HOME")) / ".cache/dspark";
  const fs::path path = folder / "SmolLM2-135M-Instruct.Q4_1.gguf";
  if (!fs::exists(path)) FAIL(path.string() << " is missing; `make model` fetches it");
  return path;
}

}  // namespace

TEST_CASE("every block type dequantises to the reference bits", "[gguf][golden]") {
  const Json cases = read_json(kGolden / "gguf_dequant/case.json");
  const SafetensorsFile data(kGolden / "gguf_dequant/tensors.safetensors");
  int n = 0;
  for (const Json& c : cases.at("types")) {
    const auto name = c.at("type").get<std::string>();
    INFO(name);
    const GgmlTypeInfo* info = ggml_type_info(c.at("ggml_type").get<uint32_t>());
    REQUIRE(info);
    CHECK(info->name == name);
    CHECK(info->block_elements == c.at("block_elements").get<int64_t>());
    CHECK(info->block_bytes == c.at("block_bytes").get<int64_t>());
    const auto compare = [&](const std::string& bytes, const std::string& values) {
      const std::vector<float> expected = read_f32(data.get(values));
      std::vector<float> out(expected.size());
      dequantise(info->type, data.get(bytes).data, out);
      for (size_t i = 0; i < out.size(); ++i)
        if (std::bit_cast<uint32_t>(out[i]) != std::bit_cast<uint32_t>(expected[i]))
          FAIL(name << " element " << i << ": " << out[i] << ", expected " << expected[i]);
    };
    compare(name + ".bytes", name + ".values");
    if (data.find(name + ".from_values_bytes")) compare(name + ".from_values_bytes", name + ".from_values_back");
    ++n;
  }
  CHECK(n == 25);
}

TEST_CASE("a GGUF file reads as written by hand", "[gguf]") {
  Scratch scratch;
  for (uint32_t version : {2u, 3u}) {
    std::string bytes = small().s;
    bytes[4] = static_cast<char>(version);
    const Gguf g(scratch.put("x.gguf", bytes));
    CHECK(g.version() == version);
    CHECK(g.keys() == std::vector<std::string>{"general.architecture", "n", "eps", "flags", "words"});
    CHECK(g.string("general.architecture") == "llama");
    CHECK(g.integer("n") == 7);
    CHECK(g.number("n") == 7.0);
    CHECK(g.number("eps") == static_cast<double>(1e-5f));
    CHECK(g.integers("flags") == std::vector<int64_t>{1, 0, 1});
    CHECK(g.strings("words") == std::vector<std::string_view>{"ab", ""});
    CHECK(g.array_size("words") == 2);
    CHECK(g.integer("m", 3) == 3);
    CHECK(g.string("m", "x") == "x");
    CHECK(g.boolean("m", true));
    CHECK(g.describe("words") == "[2 x string]");
    CHECK_THROWS_WITH(g.integer("m"), Contains("x.gguf") && Contains("'m' is missing"));
    CHECK_THROWS_WITH(g.integer("eps", 3), Contains("'eps'") && Contains("is f32, expected an integer"));
    CHECK_THROWS_WITH(g.integer("flags"), Contains("an array of bool, expected an integer"));
    CHECK_THROWS_WITH(g.strings("n"), Contains("is u32, expected an array of strings"));
    CHECK_THROWS_WITH(g.numbers("flags"), Contains("expected an array of numbers"));
    const GgufTensor& w = g.get("w", {2, 32});
    CHECK(w.type == GgmlType::Q8_0);
    const auto values = read_f32(w);
    CHECK(values[5] == 5.0f);
    CHECK(values[32] == -16.0f);
    CHECK(read_f32(g.get("b")) == std::vector<float>{1.5f, -2.0f});
    CHECK_THROWS_WITH(g.get("c"), Contains("'c' is missing"));
    CHECK_THROWS_WITH(g.get("w", {32, 2}), Contains("[2, 32], expected [32, 2]"));
  }
}

TEST_CASE("broken GGUF files are refused by key, tensor and place", "[gguf]") {
  Scratch scratch;
  const auto refuse = [&](const Bytes& b, const std::string& message) {
    const auto path = scratch.put("bad.gguf", b.s);
    CHECK_THROWS_WITH(Gguf(path), Contains("bad.gguf") && Contains(message));
  };
  const auto plain = [](const auto& add) {  // one tensor, 64 bytes of data
    Bytes b;
    b.head(1, 0);
    add(b);
    b.align();
    b.s.resize(b.s.size() + 64);
    return b;
  };
  refuse(Bytes(), "the GGUF header");
  Bytes b;
  b.s = "GGML....";
  refuse(b, "not a GGUF file");
  refuse(Bytes().head(0, 0, 1), "version 1 is not supported");
  refuse(Bytes().head(0, 0, 3u << 24), "big-endian");
  refuse(Bytes().head(1ull << 60, 0), "tensors do not fit");
  refuse(Bytes().head(0, ~0ull), "metadata keys do not fit");
  refuse(Bytes().head(0, 1).text("").u32(kU32).u32(1), "its name has 0 bytes");
  refuse(Bytes().head(0, 1).u64(~0ull).u32(kU32).u32(1),
         "metadata key 0 (at byte 24): a string of 18446744073709551615 bytes");
  refuse(Bytes().head(0, 1).text("k").u32(13).u32(1), "metadata key 'k' (at byte 33): value type 13 is unknown");
  refuse(Bytes().head(0, 1).text("k").u32(kBool).n<uint8_t>(2), "metadata key 'k' (at byte 37): a bool holds 2");
  refuse(Bytes().head(0, 1).text("k").u32(kArray).u32(kArray).u64(0), "arrays inside arrays");
  refuse(Bytes().head(0, 1).text("k").u32(kArray).u32(kU64).u64(1ull << 61), "elements do not fit");
  refuse(Bytes().head(0, 1).text("k").u32(kArray).u32(kString).u64(1).u64(5), "a string of 5 bytes");
  refuse(Bytes().head(0, 2).text("k").u32(kU8).n<uint8_t>(2).text("k").u32(kU8).n<uint8_t>(2),
         "the key is there twice");
  refuse(Bytes().head(0, 1).text("general.alignment").u32(kU32).u32(24), "general.alignment is 24");
  refuse(Bytes().head(0, 1).text("general.alignment").u32(kU32).u32(0), "general.alignment is 0");
  refuse(Bytes().head(0, 1).text("general.alignment").u32(kString).text("x"), "is string, expected an integer");
  refuse(plain([](Bytes& x) { x.tensor("t", {1, 1, 1, 1, 1}, 0, 0); }), "tensor 't' (at byte 33): it has 5 dimensions");
  refuse(plain([](Bytes& x) { x.tensor("t", {0}, 0, 0); }), "dimension 0 is 0");
  refuse(plain([](Bytes& x) { x.tensor("t", {1ull << 32, 1ull << 32}, 0, 0); }), "no valid number of elements");
  refuse(plain([](Bytes& x) { x.tensor("t", {1ull << 62}, 0, 0); }), "do not fit into the file");
  refuse(plain([](Bytes& x) { x.tensor("t", {8}, 4, 0); }), "tensor type 4 is not supported");
  refuse(plain([](Bytes& x) { x.tensor("t", {16, 2}, 8, 0); }), "rows of 16 elements are not whole Q8_0 blocks of 32");
  refuse(plain([](Bytes& x) { x.tensor("t", {8}, 0, 8); }), "offset 8 is not a multiple of 32");
  refuse(plain([](Bytes& x) { x.tensor("t", {8}, 0, 64); }), "end beyond the file");
  refuse(plain([](Bytes& x) { x.tensor("t", {8}, 0, ~31ull); }), "end beyond the file");
  Bytes twice;
  twice.head(2, 0).tensor("t", {8}, 0, 0).tensor("t", {8}, 0, 32).align().s.resize(512);
  refuse(twice, "the tensor is there twice");
  Bytes overlap;
  overlap.head(2, 0).tensor("s", {16}, 0, 0).tensor("t", {8}, 0, 32).align().s.resize(512);
  refuse(overlap, "tensor 't' at data offset 32 overlaps tensor 's'");
}

TEST_CASE("a GGUF file of metadata alone needs no data", "[gguf]") {
  Scratch scratch;
  const Gguf g(scratch.put("x.gguf", Bytes().head(0, 1).text("k").u32(kU64).u64(~0ull).s));
  CHECK(g.tensors().empty());
  CHECK(g.describe("k") == "18446744073709551615");
  CHECK_THROWS_WITH(g.integer("k"), Contains("too large"));
}

TEST_CASE("a GGUF file cut anywhere is refused, and a flipped bit never breaks the reader", "[gguf]") {
  Scratch scratch;
  const std::string good = small().s;
  for (size_t n = 0; n < good.size(); ++n) {
    const auto path = scratch.put("x.gguf", std::string_view(good).substr(0, n));
    REQUIRE_THROWS_AS(Gguf(path), Error);
  }
  int accepted = 0, refused = 0;
  for (size_t i = 0; i < good.size(); ++i)
    for (int bit = 0; bit < 8; ++bit) {
      std::string bad = good;
      bad[i] = static_cast<char>(bad[i] ^ (1 << bit));
      const auto path = scratch.put("x.gguf", bad);
      try {
        const size_t total = use_everything(Gguf(path));
        REQUIRE(total < 10000);
        ++accepted;
      } catch (const Error&) {
        ++refused;
      }
    }
  CHECK(refused > 500);
  CHECK(accepted > 500);  // names, numbers, padding and data
}

TEST_CASE("flipped bits in a model's header never break the readers", "[gguf]") {
  Scratch scratch;
  const std::string good = read_text(kGolden / "tiny_gguf/qwen2_q5_0/model.gguf");
  const uint64_t header = good.rfind("ffn_down.weight");  // the list of tensors ends soon after it
  REQUIRE(header != std::string::npos);
  const Rng rng(1, RngStream::test);
  int refused = 0;
  for (uint64_t i = 0; i < 200; ++i) {
    std::string bad = good;
    // Half of the flips in the first kilobyte, where the architecture's numbers are.
    const uint64_t at = rng.below(2 * i, i % 2 ? header : 1024);
    bad[at] = static_cast<char>(bad[at] ^ (1 << rng.below(2 * i + 1, 8)));
    const auto path = scratch.put("x.gguf", bad);
    try {
      const Gguf g(path);
      use_everything(g);
      const TargetConfig c = target_config_from_gguf(g);
      REQUIRE(c.windows.size() == static_cast<size_t>(c.layers));
    } catch (const Error&) {
      ++refused;
    }
  }
  CHECK(refused > 10);
}

TEST_CASE("the GGUF writer's files read back, and copied entries are the same", "[gguf]") {
  Scratch scratch;
  const Gguf from(scratch.put("from.gguf", small().s));
  const auto path = scratch.folder / "to.gguf";
  {
    GgufWriter w(path);
    w.set_string("s", "text");
    w.set_u32("u", 7);
    w.set_i32("i", -7);
    w.set_u64("l", 1ull << 40);
    w.set_f32("f", 0.1f);
    w.set_bool("b", true);
    const std::vector<std::string> words = {"", "x"};
    const std::vector<uint32_t> unsigneds = {1, 2};
    const std::vector<int32_t> integers = {-1, 2};
    const std::vector<float> floats = {0.5f};
    w.set_strings("ss", words);
    w.set_u32s("us", unsigneds);
    w.set_i32s("is", integers);
    w.set_f32s("fs", floats);
    w.set_bools("bs", {true, false});
    for (const auto& key : from.keys()) w.copy(from, key);
    CHECK_THROWS_WITH(w.set_bool("u", true), Contains("'u' is set twice"));
    CHECK_THROWS_WITH(w.add_tensor("q", GgmlType::Q4_K, {256, 32}), Contains("whole blocks of 256"));
    w.add_tensor("odd", GgmlType::F32, {3, 1});
    w.add_tensor("w", GgmlType::Q8_0, {2, 32});
    w.begin();
    const std::vector<float> odd = {1, 2, 3};
    w.write("odd", std::as_bytes(std::span(odd).first(2)));
    w.write("odd", std::as_bytes(std::span(odd).last(1)));
    w.write("w", from.get("w").data);
    CHECK_FALSE(fs::exists(path));
    w.finish();
  }
  const Gguf g(path);
  CHECK(g.string("s") == "text");
  CHECK(g.integer("u") == 7);
  CHECK(g.integer("i") == -7);
  CHECK(g.integer("l") == 1ll << 40);
  CHECK(g.number("f") == static_cast<double>(0.1f));
  CHECK(g.boolean("b"));
  CHECK(g.strings("ss") == std::vector<std::string_view>{"", "x"});
  CHECK(g.integers("us") == std::vector<int64_t>{1, 2});
  CHECK(g.integers("is") == std::vector<int64_t>{-1, 2});
  CHECK(g.numbers("fs") == std::vector<double>{0.5});
  CHECK(g.integers("bs") == std::vector<int64_t>{1, 0});
  CHECK(g.strings("words") == from.strings("words"));
  CHECK(g.number("eps") == from.number("eps"));
  CHECK(read_f32(g.get("odd", {3, 1})) == std::vector<float>{1, 2, 3});
  CHECK(read_f32(g.get("w", {2, 32})) == read_f32(from.get("w")));
}

TEST_CASE("the tiny GGUF models have the tensor types of their cases", "[gguf][golden]") {
  for (const char* name : {"gemma3_q4_0", "llama_q4_1", "qwen2_q5_0", "qwen3_bf16"}) {
    INFO(name);
    const Gguf g(kGolden / "tiny_gguf" / name / "model.gguf");
    const Json c = read_json(kGolden / "tiny_gguf" / name / "case.json");
    CHECK(g.string("general.architecture") == c.at("architecture").get<std::string>());
    const Json& types = c.at("tensor_types");
    CHECK(g.tensors().size() == types.size());
    for (const GgufTensor& t : g.tensors()) CHECK(types.at(t.name) == ggml_type_info(t.type).name);
  }
}

TEST_CASE("every tensor of SmolLM2's GGUF file has the reference sums", "[gguf][model][golden]") {
  const Gguf g(smollm2());
  const Json sums = read_json(kGolden / "smollm2_gguf/tensor_sums.json");
  CHECK(g.tensors().size() == sums.at("tensors").size());
  size_t i = 0;
  for (const Json& row : sums.at("tensors")) {
    const GgufTensor& t = g.tensors().at(i++);
    INFO(t.name);
    CHECK(t.name == row.at(0).get<std::string>());
    CHECK(row.at(1) == ggml_type_info(t.type).name);
    auto dims = row.at(2).get<std::vector<int64_t>>();
    std::reverse(dims.begin(), dims.end());
    CHECK(t.shape == dims);
    double sum = 0, magnitude = 0, weighted = 0;
    const auto values = read_f32(t);
    for (size_t k = 0; k < values.size(); ++k) {
      const double v = values[k];
      sum += v;
      magnitude += std::abs(v);
      weighted += v * static_cast<double>(k % 251 + 1);
    }
    // The sums are written with 12 digits; the order of summation moves them by 1e-16 * n of the sum of magnitudes.
    const double bound = 1e-10 * magnitude;
    CHECK(std::abs(sum - row.at(3).get<double>()) <= bound);
    CHECK(std::abs(magnitude - row.at(4).get<double>()) <= bound);
    CHECK(std::abs(weighted - row.at(5).get<double>()) <= 251 * bound);
  }
}
