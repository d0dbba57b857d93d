#include <catch2/catch.hpp>

#include <limits>

#include "core/error.h"
#include "formats/safetensors.h"
#include "scratch.h"

using namespace dspark;
using namespace dspark::formats;
using Catch::Contains;

namespace {

const fs::path kGolden = DSPARK_SOURCE_DIR "/tests/golden/target";

std::string file_of(std::string header, std::string_view data) {
  std::string bytes(8, '\0');
  for (int i = 0; i < 8; ++i) bytes[static_cast<size_t>(i)] = static_cast<char>(header.size() >> (8 * i));
  return bytes + header + std::string(data);
}

void write_small(const fs::path& path) {
  SafetensorsWriter w(
      path, {{"b", DType::u8, {3}}, {"empty", DType::f32, {0, 5}}, {"a", DType::f32, {2, 2}}, {"s", DType::f64, {}}},
      {{"format", "pt"}});
  const std::vector<float> a = {1, -2, 0.5f, 4};
  for (const TensorSpec& s : w.specs()) {
    if (s.name == "a") {  // in two pieces
      w.write("a", std::as_bytes(std::span(a).first(1)));
      w.write("a", std::as_bytes(std::span(a).subspan(1)));
    }
    if (s.name == "b") w.write("b", std::vector<uint8_t>{7, 8, 9});
    if (s.name == "s") w.write("s", std::vector<double>{0.25});
  }
  w.finish();
}

// What a reader may do with an accepted file.
void touch_everything(const SafetensorsFile& file) {
  size_t total = 0;
  for (const TensorView& t : file.tensors()) {
    total += t.data.size();
    REQUIRE(t.count() == shape_count(t.shape, "test"));
    for (std::byte b : t.data) total += std::to_integer<size_t>(b) & 1;
  }
  REQUIRE(total < 10000);
}

}  // namespace

TEST_CASE("a written safetensors file reads back, aligned and in a fixed order", "[safetensors]") {
  Scratch scratch;
  write_small(scratch.folder / "x.safetensors");
  SafetensorsFile file(scratch.folder / "x.safetensors");
  std::vector<std::string> names;
  for (const auto& t : file.tensors()) names.push_back(t.name);
  CHECK(names == std::vector<std::string>{"s", "a", "empty", "b"});
  CHECK(read_f32(file.get("a", {2, 2})) == std::vector<float>{1, -2, 0.5f, 4});
  CHECK(read_f64(file.get("s", {})) == std::vector<double>{0.25});
  CHECK(read_i64(file.get("b")) == std::vector<int64_t>{7, 8, 9});
  CHECK(file.get("empty").count() == 0);
  CHECK(file.metadata().at("format") == "pt");
  CHECK(reinterpret_cast<uintptr_t>(file.get("s").data.data()) % 8 == 0);
  CHECK(file.find("c") == nullptr);
  CHECK_THROWS_WITH(file.get("c"), Contains("x.safetensors") && Contains("'c' is missing"));
  CHECK_THROWS_WITH(file.get("a", {4}), Contains("[2, 2]") && Contains("[4]"));
  CHECK_THROWS_WITH(read_f32(file.get("b")), Contains("U8"));

  std::vector<TensorView> reversed(file.tensors().rbegin(), file.tensors().rend());
  write_safetensors(scratch.folder / "y.safetensors", reversed, file.metadata());
  CHECK(read_text(scratch.folder / "y.safetensors") == read_text(scratch.folder / "x.safetensors"));
}

TEST_CASE("an unfinished safetensors file leaves nothing behind", "[safetensors]") {
  Scratch scratch;
  { SafetensorsWriter w(scratch.folder / "x.safetensors", {{"a", DType::f32, {2}}}); }
  CHECK(fs::is_empty(scratch.folder));
  CHECK_THROWS_WITH(SafetensorsWriter(scratch.folder / "x", {{"a", DType::f32, {}}, {"a", DType::f32, {}}}),
                    Contains("twice"));
}

TEST_CASE("every float type converts to every other", "[safetensors]") {
  Scratch scratch;
  const double x = 1.0 / 3;
  const std::vector<uint16_t> half = {0x3c00, 0x0001, 0xfc00};
  SafetensorsWriter w(
      scratch.folder / "x.safetensors",
      {{"d", DType::f64, {1}}, {"f", DType::f32, {1}}, {"h", DType::f16, {3}}, {"m", DType::bf16, {1}}});
  w.write("d", std::vector<double>{x});
  w.write("f", std::vector<float>{static_cast<float>(x)});
  w.write("h", half);
  w.write("m", std::vector<bf16>{to_bf16(static_cast<float>(x))});
  w.finish();
  SafetensorsFile file(scratch.folder / "x.safetensors");
  CHECK(read_f64(file.get("d"))[0] == x);
  CHECK(read_f32(file.get("d"))[0] == static_cast<float>(x));
  CHECK(read_bf16(file.get("f"))[0].bits == 0x3eab);
  CHECK(read_f64(file.get("m"))[0] == 0.333984375);
  CHECK(read_bf16(file.get("m"))[0].bits == 0x3eab);
  CHECK(read_f32(file.get("h")) == std::vector<float>{1.0f, 0x1p-24f, -std::numeric_limits<float>::infinity()});
}

TEST_CASE("damaged safetensors headers are refused by name", "[safetensors]") {
  Scratch scratch;
  const fs::path path = scratch.folder / "bad.safetensors";
  const auto refuse = [&](std::string header, std::string_view data, const std::string& message) {
    scratch.put("bad.safetensors", file_of(std::move(header), data));
    CHECK_THROWS_WITH(SafetensorsFile(path), Contains("bad.safetensors") && Contains(message));
  };
  refuse("[]", "", "not a JSON object");
  refuse("{", "", "not valid JSON");
  refuse(R"({"a":{"dtype":"F32","shape":[1e999],"data_offsets":[0,4]}})", "1234", "not valid JSON");
  refuse(R"({"a":{"dtype":"F33","shape":[1],"data_offsets":[0,4]}})", "1234", "tensor 'a': element type 'F33'");
  refuse(R"({"a":{"shape":[1],"data_offsets":[0,4]}})", "1234", "'dtype' is missing");
  refuse(R"({"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}})", "1234", "non-negative integer");
  refuse(R"({"a":{"dtype":"F32","shape":[1.0],"data_offsets":[0,4]}})", "1234", "non-negative integer");
  refuse(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}})", "1234", "does not fill");
  refuse(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}})", "1234", "backwards");
  refuse(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4,4]}})", "1234", "3 numbers");
  refuse(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", "1234", "cut off");
  refuse(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", "12345", "follow the last tensor");
  refuse(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})", "12341234", "after a hole");
  refuse(
      R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[1],"data_offsets":[2,6]}})",
      "123412", "inside another tensor");
  refuse(
      R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})",
      "12341234", "'a' twice");
  refuse(R"({"a":{"dtype":"F32","shape":[4294967296,4294967296,4],"data_offsets":[0,0]}})", "",
         "no valid number of elements");
  refuse(R"({"a":{"dtype":"F32","shape":[4611686018427387904],"data_offsets":[0,0]}})", "", "does not fill");
  refuse(R"({"__metadata__":{"x":1}})", "", "'x' is not a string");
  scratch.put("bad.safetensors", std::string("\xff\xff\xff\xff\xff\xff\xff\xff{}"));
  CHECK_THROWS_WITH(SafetensorsFile(path), Contains("not a safetensors file"));
  scratch.put("bad.safetensors", std::string(100, '[').insert(0, std::string("\x00\x00\x00\x00\x00\x00\x00\x00", 8)));
  CHECK_THROWS_WITH(SafetensorsFile(path), Contains("not valid JSON"));
}

TEST_CASE("a safetensors file cut anywhere is refused, and a flipped bit never breaks the reader", "[safetensors]") {
  Scratch scratch;
  const fs::path path = scratch.folder / "x.safetensors";
  write_small(path);
  const std::string good = read_text(path);
  for (size_t n = 0; n < good.size(); ++n) {
    scratch.put("x.safetensors", std::string_view(good).substr(0, n));
    REQUIRE_THROWS_AS(SafetensorsFile(path), Error);
  }
  int accepted = 0, refused = 0;
  for (size_t i = 0; i < good.size(); ++i)
    for (int bit = 0; bit < 8; ++bit) {
      std::string bad = good;
      bad[i] = static_cast<char>(bad[i] ^ (1 << bit));
      scratch.put("x.safetensors", bad);
      try {
        touch_everything(SafetensorsFile(path));
        ++accepted;
      } catch (const Error&) {
        ++refused;
      }
    }
  CHECK(refused > accepted);  // the accepted flips are in names, metadata and data
}

TEST_CASE("a sharded model opens through its index", "[safetensors]") {
  const fs::path folder = kGolden / "tiny/llama_gqa_llama3_untied_sharded";
  const SafetensorsSet set = SafetensorsSet::open(folder);
  CHECK(set.files().size() == 6);
  CHECK(set.names().size() == 3 * 9 + 3);
  CHECK(set.get("model.layers.2.self_attn.k_proj.weight", {32, 48}).dtype == DType::f32);
  CHECK(set.has("lm_head.weight"));
  CHECK_FALSE(set.has("lm_head.bias"));
  const SafetensorsSet by_index = SafetensorsSet::open(folder / "model.safetensors.index.json");
  CHECK(by_index.names() == set.names());
  const SafetensorsSet single = SafetensorsSet::open(folder / "model-00001-of-00006.safetensors");
  CHECK(single.files().size() == 1);
}

TEST_CASE("a broken index or folder is refused by name", "[safetensors]") {
  Scratch scratch;
  CHECK_THROWS_WITH(SafetensorsSet::open(scratch.folder), Contains("holds neither"));
  CHECK_THROWS_WITH(SafetensorsSet::open(scratch.folder / "none.safetensors"), Contains("none.safetensors"));
  write_small(scratch.folder / "one.safetensors");
  write_small(scratch.folder / "two.safetensors");
  const auto refuse = [&](std::string_view json, const std::string& message) {
    scratch.put("model.safetensors.index.json", json);
    CHECK_THROWS_WITH(SafetensorsSet::open(scratch.folder), Contains(message));
  };
  refuse("[]", "weight_map");
  refuse(R"({"weight_map":{}})", "weight_map");
  refuse(R"({"weight_map":{"a":1}})", "not a string");
  refuse(R"({"weight_map":{"a":"../one.safetensors"}})", "not a plain file name");
  refuse(R"({"weight_map":{"a":"three.safetensors"}})", "three.safetensors");
  refuse(R"({"weight_map":{"z":"one.safetensors"}})", "'z' is missing");
  refuse(R"({"weight_map":{"a":"one.safetensors","b":"two.safetensors"}})", "two shards");
  scratch.put("model.safetensors.index.json", R"({"weight_map":{"a":"one.safetensors"}})");
  const SafetensorsSet set = SafetensorsSet::open(scratch.folder);
  CHECK(set.has("b"));
}
