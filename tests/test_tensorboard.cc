// TensorBoard event files: bytes worked out by hand, files read back by a reader of the test's own. `make test-peers` has the real one.
#include <catch2/catch.hpp>

#include <cstring>
#include <limits>

#include "cli_bench.h"
#include "core/error.h"
#include "core/files.h"
#include "formats/tensorboard.h"

using namespace dspark;
using namespace dspark::formats;

namespace {

// CRC32C bit by bit, and TFRecord's mask.
uint32_t slow_masked_crc(std::string_view bytes) {
  uint32_t crc = 0xffffffff;
  for (const char byte : bytes) {
    crc ^= static_cast<unsigned char>(byte);
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) ? 0x82F63B78u : 0);
  }
  crc = ~crc;
  return ((crc >> 15) | (crc << 17)) + 0xa282ead8u;
}

uint64_t little(std::string_view bytes, size_t n) {
  uint64_t v = 0;
  for (size_t i = 0; i < n; ++i) v |= static_cast<uint64_t>(static_cast<unsigned char>(bytes[i])) << (8 * i);
  return v;
}

std::string hex(std::string_view bytes) {
  std::string out;
  for (const char b : bytes) out += fmt::format("{:02x}", static_cast<unsigned char>(b));
  return out;
}

// The whole records of a file; what is cut at the end is left out, anything else wrong fails the test.
std::vector<std::string> records(std::string_view file) {
  std::vector<std::string> out;
  while (file.size() >= 12) {
    const uint64_t n = little(file, 8);
    CHECK(little(file.substr(8), 4) == slow_masked_crc(file.substr(0, 8)));
    if (file.size() < 16 + n) break;
    out.emplace_back(file.substr(12, n));
    CHECK(little(file.substr(12 + n), 4) == slow_masked_crc(out.back()));
    file.remove_prefix(16 + n);
  }
  return out;
}

}  // namespace

TEST_CASE("an event file's bytes are those of the format", "[formats][tensorboard]") {
  CHECK(masked_crc32c("123456789") == 0xc78ab0e5);
  CHECK(masked_crc32c("") == 0xa282ead8);
  CHECK(hex(tf_record("")) == "000000000000000029039807d8ea82a2");
  // wall_time 1.5 (fixed64, field 1), step 300 (varint, field 2), summary (field 5) of one value (1): tag (1) "loss", simple_value (2) 2.5f.
  const std::vector<Scalar> scalars{{"loss", 2.5}};
  CHECK(hex(tf_record(scalar_event(1.5, 300, scalars))) ==
        "1b00000000000000" "1a0d9e13" "09" "000000000000f83f" "10" "ac02" "2a" "0d" "0a" "0b" "0a" "04" "6c6f7373" "15" "00002040" "68997c51");
  // Numbers that are none go through.
  const std::vector<Scalar> strange{{"x", std::numeric_limits<double>::quiet_NaN()}, {"y", std::numeric_limits<double>::infinity()}};
  CHECK(hex(scalar_event(0, 0, strange)).ends_with("0a0179" "150000807f"));
}

TEST_CASE("event files follow each other, and one cut anywhere holds its whole records", "[formats][tensorboard]") {
  const Scratch scratch;
  const fs::path folder = scratch.folder / "deep" / "events";
  std::vector<fs::path> paths;
  for (int64_t first : {1, 4, 4}) {
    EventWriter writer(folder, first);
    const std::vector<Scalar> scalars{{"loss/total", 0.5}, {"optimizer/lr", 1e-3}};
    for (int64_t step = first; step < first + 3; ++step) writer.write(step, scalars);
    // Nothing is held back.
    CHECK(records(read_text(writer.path())).size() == 5);
    paths.push_back(writer.path());
  }
  // Started within a second of each other, and still in order by name.
  CHECK(paths[0].filename() < paths[1].filename());
  CHECK(paths[1].filename() < paths[2].filename());
  CHECK(paths[0].filename().string().starts_with("events.out.tfevents."));
  const std::string file = read_text(paths[1]);
  const auto all = records(file);
  CHECK(all[0].ends_with("\x1a\x0d" "brain.Event:2"));
  CHECK(hex(all[1]).ends_with("1004" "3a02" "0801"));  // step 4, session_log: status START
  CHECK(all[4].find("loss/total") != std::string::npos);
  size_t before = 0;
  for (size_t cut = 0; cut <= file.size(); ++cut) {
    const auto some = records(std::string_view(file).substr(0, cut));
    CHECK(some.size() >= before);
    before = some.size();
    for (size_t i = 0; i < some.size(); ++i) CHECK(some[i] == all[i]);
  }
  CHECK(before == 5);
  scratch.put("file", "");
  CHECK_THROWS(EventWriter(scratch.folder / "file", 1));
}
