#include <catch2/catch.hpp>

#include "core/error.h"
#include "core/hash.h"
#include "core/json.h"
#include "core/rng.h"
#include "formats/safetensors.h"
#include "formats/store.h"
#include "job/store_tools.h"

#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstring>
#include <fstream>
#include <limits>
#include <thread>

using namespace dspark;
using namespace dspark::formats;
using Catch::Matchers::Contains;

namespace {

// A folder that is gone at the end of the test.
struct TempFolder {
  fs::path path;
  TempFolder() {
    // In memory where that is possible: these tests sync thousands of times.
    std::string name = "/dev/shm/dspark_store_XXXXXX";
    if (!::mkdtemp(name.data())) {
      name = (fs::temp_directory_path() / "dspark_store_XXXXXX").string();
      REQUIRE(::mkdtemp(name.data()));
    }
    path = name;
  }
  ~TempFolder() {
    std::error_code ignored;
    fs::remove_all(path, ignored);
  }
};

StoreIdentity small_identity(StoreCodec codec) {
  StoreIdentity id;
  id.target = "tiny";
  id.config_hash = "c0ffee";
  id.tokenizer_hash = "70ce";
  id.target_quantisation = "F32";
  id.taps = {2, 5};
  id.hidden_size = 5;
  id.vocab_size = 64;
  id.codec = codec;
  return id;
}

struct Sample {
  uint64_t id = 0;
  std::vector<int32_t> ids;
  std::vector<uint8_t> mask;
  std::vector<bf16> states;  // [T, width]
  int64_t width = 0;
  uint64_t conversation = 0;
  SampleView view() const { return {id, ids, mask, FinishReason::stop, states.data(), width, conversation}; }
};

Sample make_sample(uint64_t id, int64_t n_tokens, int64_t width) {
  const Rng rng(7, RngStream::test, id);
  Sample s;
  s.id = id;
  s.width = width;
  s.conversation = ~id;
  for (int64_t t = 0; t < n_tokens; ++t) {
    s.ids.push_back(static_cast<int32_t>(rng.below(static_cast<uint64_t>(t), 64)));
    s.mask.push_back(t % 3 != 0);
  }
  for (int64_t i = 0; i < n_tokens * width; ++i)
    s.states.push_back(to_bf16(static_cast<float>(rng.normal(1000 + static_cast<uint64_t>(i)) * 3)));
  return s;
}

bool same_bits(const std::vector<bf16>& a, const std::vector<bf16>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * 2) == 0);
}

std::vector<bf16> read_all(const SampleSource& source, int64_t i) {
  std::vector<bf16> out(static_cast<size_t>(source.info(i).n_tokens * source.row_width()));
  source.read_states(i, out.data(), source.row_width());
  return out;
}

bool equal(const SampleSource& source, int64_t i, const Sample& s) {
  const SampleTokens t = source.tokens(i);
  return source.info(i).id == s.id && source.info(i).conversation == s.conversation && t.token_ids == s.ids &&
         t.loss_mask == s.mask && source.info(i).n_mask == std::count(s.mask.begin(), s.mask.end(), 1) &&
         same_bits(read_all(source, i), s.states);
}

std::string file_bytes(const fs::path& path) { return read_text(path); }
void write_bytes(const fs::path& path, std::string_view bytes) {
  std::ofstream(path, std::ios::binary | std::ios::trunc)
      .write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

// A store of three small samples; returns them.
std::vector<Sample> write_small(const fs::path& folder, StoreCodec codec, bool finish = true) {
  const StoreIdentity id = small_identity(codec);
  std::vector<Sample> samples;
  StoreWriter w(folder, id);
  for (uint64_t k = 0; k < 3; ++k) {
    samples.push_back(make_sample(0xabc0 + k, 1 + static_cast<int64_t>(k) * 2, id.row_width()));
    REQUIRE(w.append(encode_record(w.format(), samples.back().view())));
  }
  if (finish) w.finish();
  return samples;
}

}  // namespace

TEST_CASE("raw and zstd stores give back the same bits", "[store]") {
  const StoreCodec codec = GENERATE(StoreCodec::raw, StoreCodec::zstd);
  TempFolder dir;
  StoreIdentity id = small_identity(codec);
  id.hidden_size = 257;
  const int64_t width = id.row_width();
  // 510 rows a block at this width: one row, one under, on and over a block, several blocks; NaN and infinities too.
  std::vector<Sample> samples;
  for (int64_t n : {1, 2, 3, 509, 510, 511, 1021}) samples.push_back(make_sample(samples.size() * 77, n, width));
  for (size_t i = 0; i < 300; ++i) samples[4].states[i].bits = static_cast<uint16_t>(i * 219);
  std::fill(samples[5].states.begin(), samples[5].states.end(), bf16{0});  // both planes compress
  {
    StoreWriter w(dir.path, id, {.shard_bytes = 3 << 20});
    for (const Sample& s : samples) CHECK(w.append(encode_record(w.format(), s.view())));
    CHECK_FALSE(w.append(encode_record(w.format(), samples[2].view())));
    w.finish();
  }
  const auto source = open_store(dir.path);
  CHECK(source->kind() == "dspark store");
  CHECK(source->identity() == id);
  CHECK(source->problems().empty());
  REQUIRE(source->size() == static_cast<int64_t>(samples.size()));
  if (codec == StoreCodec::raw) CHECK(dynamic_cast<StoreReader&>(*source).n_shards() > 1);
  for (size_t i = 0; i < samples.size(); ++i) {
    INFO("sample " << i);
    CHECK(equal(*source, static_cast<int64_t>(i), samples[i]));
    CHECK(source->info(static_cast<int64_t>(i)).finish == FinishReason::stop);
    CHECK(source->check(static_cast<int64_t>(i)) == "");
  }
  // Rows across a block's edge, parts out of order, a wide stride, sentinels around and between.
  const int parts[] = {2, 0};
  const int64_t E = 257, stride = 2 * E + 3;
  std::vector<bf16> out(static_cast<size_t>(6 * stride), bf16{0x1234});
  source->read_states(6, out.data() + stride, stride, {508, 512}, parts);
  bool good = true;
  for (int64_t r = 0; r < 6; ++r) {
    for (int64_t c = 0; c < stride; ++c) {
      uint16_t want = 0x1234;
      if (r >= 1 && r < 5 && c < 2 * E)
        want = samples[6].states[static_cast<size_t>((508 + r - 1) * width + (c < E ? 2 * E + c : c - E))].bits;
      good &= out[static_cast<size_t>(r * stride + c)].bits == want;
    }
  }
  CHECK(good);
  CHECK_THROWS_WITH(source->read_states(0, out.data(), stride, {0, 2}, parts), Contains("which has 1 tokens"));
  source->read_states(6, out.data(), stride, {1021, -1}, parts);  // no rows: nothing to do
}

TEST_CASE("e4m3 rounds to nearest even on every neighbouring pair", "[store]") {
  for (int v = 0; v < 0x7e; ++v) {
    const float a = from_e4m3(static_cast<uint8_t>(v)), b = from_e4m3(static_cast<uint8_t>(v + 1));
    CHECK(to_e4m3(a) == v);
    CHECK(to_e4m3(-a) == (v | 0x80));
    const float tie = (a + b) / 2;
    CHECK(to_e4m3(tie) == (v % 2 == 0 ? v : v + 1));
    CHECK(to_e4m3(std::nextafter(tie, 0.0f)) == v);
    CHECK(to_e4m3(std::nextafter(tie, 1e9f)) == v + 1);
  }
  CHECK(from_e4m3(0x7e) == 448.0f);
  CHECK(to_e4m3(1e6f) == 0x7e);
  CHECK(std::isnan(from_e4m3(0x7f)));
}

TEST_CASE("fp8 stores keep every value within e4m3's rounding", "[store]") {
  TempFolder dir;
  StoreIdentity id = small_identity(StoreCodec::fp8);
  id.hidden_size = 100;
  const int64_t E = id.hidden_size, width = id.row_width();
  Sample s = make_sample(1, 9, width);
  for (int64_t c = 0; c < E; ++c) {  // rows of part 0 at hostile scales
    const size_t u = static_cast<size_t>(c);
    s.states[u] = bf16{0};
    s.states[static_cast<size_t>(width) + u].bits = static_cast<uint16_t>(c);                    // subnormals
    s.states[static_cast<size_t>(2 * width) + u].bits = static_cast<uint16_t>(0x7f7f - c * 50);  // largest
    s.states[static_cast<size_t>(3 * width) + u] = to_bf16(c == 0 ? 448.0f : 1e-3f * static_cast<float>(c));
    s.states[static_cast<size_t>(4 * width) + u] = to_bf16(c == 0 ? -449.5f : static_cast<float>(c));
  }
  {
    StoreWriter w(dir.path, id);
    CHECK(w.append(encode_record(w.format(), s.view())));
    w.finish();
    Sample bad = s;
    bad.states[5].bits = 0x7f80;
    CHECK_THROWS_WITH(encode_record(w.format(), bad.view()), Contains("cannot hold inf"));
  }
  const StoreReader reader(dir.path);
  const std::vector<bf16> got = read_all(reader, 0);
  for (int64_t r = 0; r < 9; ++r) {
    for (int64_t p = 0; p < 3; ++p) {
      const bf16* row = s.states.data() + r * width + p * E;
      float largest = 0;
      for (int64_t c = 0; c < E; ++c) largest = std::max(largest, std::fabs(to_float(row[c])));
      // The scale is the smallest power of two >= largest / 448 and at least 2^-124, so less than twice that. Normal
      // e4m3 values have 4 significant bits (half a step: |x| 2^-4); subnormal ones steps of 2^-9 (half a step: scale
      // 2^-10).
      const double scale = std::max(2.0 * largest / 448, std::ldexp(1.0, -124));
      for (int64_t c = 0; c < E; ++c) {
        const double x = to_float(row[c]), y = to_float(got[static_cast<size_t>(r * width + p * E + c)]);
        INFO("row " << r << " part " << p << " column " << c << ": " << x << " became " << y);
        REQUIRE(std::isfinite(y));
        REQUIRE(std::fabs(x - y) <= std::max(std::fabs(x) / 16, scale / 1024));
        if (x != 0 && y != 0) REQUIRE(std::signbit(x) == std::signbit(y));
      }
    }
  }
}

TEST_CASE("a store cut at any byte is readable up to the last whole record and resumes", "[store][fault]") {
  const bool manifest = GENERATE(false, true);
  TempFolder dir;
  const fs::path whole = dir.path / "whole", cut = dir.path / "cut";
  const std::vector<Sample> samples = write_small(whole, StoreCodec::zstd);
  const std::string bytes = file_bytes(whole / shard_name(0)), summary = file_bytes(whole / "manifest.json");
  std::vector<uint64_t> ends;
  uint64_t header = 0;
  {
    const StoreReader reader(whole);
    for (int64_t i = 0; i < 3; ++i) ends.push_back(reader.offset_of(i) + reader.info(i).stored_bytes);
    header = reader.offset_of(0);
    REQUIRE(ends.back() == bytes.size());
  }
  for (size_t n = 0; n <= bytes.size(); ++n) {
    INFO("cut to " << n << " of " << bytes.size() << " bytes");
    fs::remove_all(cut);
    fs::create_directory(cut);
    write_bytes(cut / shard_name(0), std::string_view(bytes).substr(0, n));
    if (manifest) write_bytes(cut / "manifest.json", summary);
    const int64_t n_whole = std::upper_bound(ends.begin(), ends.end(), n) - ends.begin();
    if (n < header && !manifest) {
      REQUIRE_THROWS_WITH(StoreReader(cut), Contains("nothing says which target"));
    } else {
      const StoreReader reader(cut);
      REQUIRE(reader.size() == n_whole);
      for (int64_t i = 0; i < n_whole; ++i) REQUIRE(equal(reader, i, samples[static_cast<size_t>(i)]));
      const bool clean = n == bytes.size() ||
                         (!manifest && (n == header || (n_whole > 0 && n == ends[static_cast<size_t>(n_whole - 1)])));
      REQUIRE(reader.problems().empty() == clean);
    }
    {
      StoreWriter w(cut, small_identity(StoreCodec::zstd));
      REQUIRE(static_cast<int64_t>(w.done().size()) == n_whole);
      REQUIRE(w.totals().samples == static_cast<uint64_t>(n_whole));
      if (n < bytes.size()) REQUIRE_FALSE(fs::exists(cut / "manifest.json"));
      for (const Sample& s : samples)
        REQUIRE(w.append(encode_record(w.format(), s.view())) == (&s - samples.data() >= n_whole));
      w.finish();
    }
    REQUIRE(file_bytes(cut / shard_name(0)) == bytes);
    REQUIRE(file_bytes(cut / "manifest.json") == summary);
    REQUIRE_FALSE(fs::exists(cut / "progress.json"));
  }
}

TEST_CASE("no flipped bit of a store passes", "[store][fault]") {
  const StoreCodec codec = GENERATE(StoreCodec::raw, StoreCodec::zstd, StoreCodec::fp8);
  TempFolder dir;
  write_small(dir.path, codec);
  const fs::path shard = dir.path / shard_name(0), manifest = dir.path / "manifest.json";
  const std::string bytes = file_bytes(shard), summary = file_bytes(manifest);
  std::vector<Sample> samples;  // as stored: fp8 is lossy
  {
    const StoreReader reader(dir.path);
    for (int64_t i = 0; i < reader.size(); ++i) {
      SampleTokens t = reader.tokens(i);
      samples.push_back({reader.info(i).id, t.token_ids, t.loss_mask, read_all(reader, i), reader.row_width(),
                         reader.info(i).conversation});
    }
  }
  const auto check_flip = [&](const fs::path& file, const std::string& original, size_t bit, bool harmless_allowed) {
    std::string flipped = original;
    flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << bit % 8));
    write_bytes(file, flipped);
    INFO(codec_name(codec));
    INFO(file.filename() << " bit " << bit);
    int64_t n_found = 0, n_good = 0;
    bool noticed = false;
    try {
      const StoreReader reader(dir.path);
      REQUIRE(reader.identity() == small_identity(codec));
      noticed = !reader.problems().empty();
      n_found = reader.size();
      for (int64_t i = 0; i < n_found; ++i) {
        const auto s =
            std::find_if(samples.begin(), samples.end(), [&](const Sample& x) { return x.id == reader.info(i).id; });
        REQUIRE(s != samples.end());
        const bool whole = reader.check(i).empty();
        bool right = false, refused = false;
        try {
          right = equal(reader, i, *s);
        } catch (const Error&) {
          refused = true;
        }
        REQUIRE((right || (refused && !whole)));
        n_good += right;
        noticed |= !whole;
      }
    } catch (const Error&) {
      noticed = true;
    }
    REQUIRE((noticed || harmless_allowed));
    if (file == manifest)
      REQUIRE(n_good == 3);  // a damaged manifest costs no sample
    else
      REQUIRE((n_good >= 2 || n_found == 0));
  };
  for (size_t bit = 0; bit < bytes.size() * 8; ++bit) check_flip(shard, bytes, bit, false);
  write_bytes(shard, bytes);
  for (size_t bit = 0; bit < summary.size() * 8; ++bit) {
    const std::string text = summary;
    // White space may turn into other white space: the same JSON.
    check_flip(manifest, text, bit, std::isspace(static_cast<unsigned char>(text[bit / 8])) != 0);
  }
}

TEST_CASE("damage in the middle costs one sample, which resuming stores again", "[store][fault]") {
  TempFolder dir;
  const auto samples = write_small(dir.path, StoreCodec::raw);
  const fs::path shard = dir.path / shard_name(0);
  std::string bytes = file_bytes(shard);
  uint64_t second = 0;
  {
    const StoreReader reader(dir.path);
    second = reader.offset_of(1);
  }
  bytes[second + 20] ^= 4;  // its header
  write_bytes(shard, bytes);
  {
    const StoreReader reader(dir.path);
    CHECK(reader.size() == 2);
    REQUIRE(reader.problems().size() == 2);
    CHECK_THAT(reader.problems()[0].text(),
               Contains(fmt::format("{} at {}: a damaged record header", shard_name(0), second)));
    CHECK_THAT(reader.problems()[1].text(), Contains("3 samples were stored, 2 are readable"));
  }
  {
    StoreWriter w(dir.path, small_identity(StoreCodec::raw));
    CHECK(w.done().size() == 2);
    for (const Sample& s : samples) w.append(encode_record(w.format(), s.view()));
    w.finish();
  }
  const StoreReader reader(dir.path);
  REQUIRE(reader.size() == 3);
  CHECK(equal(reader, 0, samples[0]));
  CHECK(equal(reader, 1, samples[2]));
  CHECK(equal(reader, 2, samples[1]));
}

TEST_CASE("another identity is an error that names the difference", "[store]") {
  TempFolder dir;
  write_small(dir.path, StoreCodec::raw, GENERATE(false, true));
  const auto error = [&](auto change) {
    StoreIdentity id = small_identity(StoreCodec::raw);
    change(id);
    try {
      StoreWriter w(dir.path, id);
    } catch (const Error& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  CHECK(error([](StoreIdentity&) {}) == "");
  CHECK_THAT(error([](StoreIdentity& id) { id.taps = {2, 4}; }), Contains("taps: 2 4 asked, 2 5 in the store"));
  CHECK_THAT(error([](StoreIdentity& id) { id.codec = StoreCodec::zstd; }),
             Contains("codec: zstd asked, raw in the store"));
  CHECK_THAT(error([](StoreIdentity& id) { id.target = "other"; }),
             Contains("target: 'other' asked, 'tiny' in the store"));
  CHECK_THAT(error([](StoreIdentity& id) { id.config_hash = "1"; }), Contains("config hash: '1'"));
  CHECK_THAT(error([](StoreIdentity& id) { id.tokenizer_hash = "1"; }), Contains("tokenizer hash: '1'"));
  CHECK_THAT(error([](StoreIdentity& id) { id.last_state = LastState::post_norm; }),
             Contains("last state: post_norm asked"));
  CHECK_THAT(error([](StoreIdentity& id) { id.hidden_size = 6; }), Contains("hidden size: 6 asked, 5 in"));
  CHECK_THAT(error([](StoreIdentity& id) { id.vocab_size = 6; }), Contains("vocabulary: 6 asked, 64 in"));
  CHECK_THAT(error([](StoreIdentity& id) { id.target_quantisation = "Q4_1"; }),
             Contains("target quantisation: 'Q4_1'"));
  CHECK_THAT(error([](StoreIdentity& id) { id.extra["max_length"] = "9"; }),
             Contains("max_length: '9' asked, unknown in"));
  // Shards of two stores in one folder.
  TempFolder other;
  write_small(other.path, StoreCodec::zstd);
  fs::copy_file(other.path / shard_name(0), dir.path / shard_name(1));
  CHECK_THROWS_WITH(StoreReader(dir.path), Contains("are of different stores") && Contains("codec"));
}

TEST_CASE("two writers on one store, a file, a foreign folder: each an error", "[store]") {
  TempFolder dir;
  const StoreIdentity id = small_identity(StoreCodec::raw);
  {
    StoreWriter first(dir.path, id);
    CHECK_THROWS_WITH(StoreWriter(dir.path, id), Contains("in use by another dspark process"));
  }
  StoreWriter(dir.path, id).finish();
  CHECK(StoreReader(dir.path).complete());
  CHECK(StoreReader(dir.path).size() == 0);
  write_bytes(dir.path / "file", "x");
  CHECK_THROWS_WITH(StoreWriter(dir.path / "file", id), Contains("cannot make folder"));
  CHECK_THROWS_WITH(open_store(dir.path / "file"), Contains("a store is a folder"));
  CHECK_THROWS_WITH(open_store(dir.path / "none"), Contains("no such store"));
  fs::create_directory(dir.path / "foreign");
  CHECK_THROWS_WITH(open_store(dir.path / "foreign"), Contains("is not a store"));
  write_bytes(dir.path / "foreign" / "manifest.json", "{\"version\": 2}");
  CHECK_THROWS_WITH(StoreWriter(dir.path / "foreign", id), Contains("holds something that is not a dspark store"));
}

TEST_CASE("a newer major version is refused by name, a newer minor one is read", "[store]") {
  TempFolder dir;
  const auto samples = write_small(dir.path, StoreCodec::raw, false);
  const fs::path shard = dir.path / shard_name(0);
  const std::string bytes = file_bytes(shard);
  const auto with_version = [&](uint16_t major, uint16_t minor) {
    std::string changed = bytes;
    std::memcpy(changed.data() + 8, &major, 2);
    std::memcpy(changed.data() + 10, &minor, 2);
    const uint32_t crc = crc32c(std::as_bytes(std::span(changed.data(), 36)));
    std::memcpy(changed.data() + 36, &crc, 4);
    write_bytes(shard, changed);
  };
  with_version(2, 3);
  CHECK_THROWS_WITH(StoreReader(dir.path), Contains("of version 2.3; this dspark reads version 1"));
  CHECK_THROWS_WITH(StoreWriter(dir.path, small_identity(StoreCodec::raw)), Contains("of version 2.3"));
  with_version(1, 9);
  const StoreReader reader(dir.path);
  REQUIRE(reader.size() == 3);
  CHECK(equal(reader, 2, samples[2]));
  // We do not append to a shard whose rules we do not know; a new one is begun.
  {
    StoreWriter w(dir.path, small_identity(StoreCodec::raw));
    CHECK(w.append(encode_record(w.format(), make_sample(5, 3, 15).view())));
  }
  CHECK(StoreReader(dir.path).size() == 4);
  CHECK(fs::exists(dir.path / shard_name(1)));
}

TEST_CASE("a full disk is a clear error and the store resumes", "[store][fault]") {
  TempFolder dir;
  StoreIdentity id = small_identity(StoreCodec::raw);
  const fs::path folder = dir.path / "disk";
  fs::create_directory(folder);
  const bool mounted = ::mount("tmpfs", folder.c_str(), "tmpfs", 0, "size=128k") == 0;
  struct rlimit before {};
  ::getrlimit(RLIMIT_FSIZE, &before);
  const auto old_handler = std::signal(SIGXFSZ, SIG_IGN);
  if (!mounted) {
    struct rlimit small = before;
    small.rlim_cur = 100 << 10;
    REQUIRE(::setrlimit(RLIMIT_FSIZE, &small) == 0);
  }
  std::string message;
  uint64_t appended = 0;
  {
    StoreWriter w(folder, id, {.buffer_bytes = 10000});
    try {
      for (; appended < 1000; ++appended)
        w.append(encode_record(w.format(), make_sample(appended, 40, id.row_width()).view()));
    } catch (const Error& e) {
      message = e.what();
    }
    CHECK_THROWS_AS(w.append(encode_record(w.format(), make_sample(5000, 40, id.row_width()).view())), Error);
    CHECK_THROWS_AS(w.finish(), Error);
  }
  ::setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, old_handler);
  INFO((mounted ? "tmpfs: " : "RLIMIT_FSIZE: ") << message);
  CHECK_THAT(message, Contains("cannot write") && Contains("run the same command again"));
  CHECK_THAT(message, Contains(mounted ? "No space left" : "File too large"));
  int64_t stored = 0;
  {
    const StoreReader reader(folder);
    stored = reader.size();
    CHECK(stored > 20);
    CHECK(reader.problems().empty());  // cut back to whole records at once
    CHECK_FALSE(reader.complete());
    CHECK_THAT(message, Contains(fmt::format("{} samples are stored", stored)));
  }
  if (mounted) REQUIRE(::mount("tmpfs", folder.c_str(), "tmpfs", MS_REMOUNT, "size=8m") == 0);
  {
    StoreWriter w(folder, id);
    CHECK(static_cast<int64_t>(w.done().size()) == stored);
    for (uint64_t k = 0; k < 100; ++k) w.append(encode_record(w.format(), make_sample(k, 40, id.row_width()).view()));
    w.finish();
  }
  {
    const StoreReader reader(folder);
    CHECK(reader.complete());
    CHECK(reader.size() == 100);
    for (int64_t i = 0; i < 100; ++i) CHECK(equal(reader, i, make_sample(reader.info(i).id, 40, id.row_width())));
  }
  if (mounted) ::umount(folder.c_str());
}

TEST_CASE("kill -9 at random moments loses nothing that was whole", "[store][fault]") {
  TempFolder dir;
  const StoreIdentity id = small_identity(StoreCodec::zstd);
  const StoreOptions options{.shard_bytes = 60000, .buffer_bytes = 700};
  const Rng rng(3, RngStream::test);
  constexpr uint64_t kSamples = 2000;
  size_t done_before = 0;
  int kills = 0;
  for (uint64_t round = 0; round < 200; ++round) {
    const pid_t child = ::fork();
    REQUIRE(child >= 0);
    if (child == 0) {
      try {
        StoreWriter w(dir.path, id, options);
        for (uint64_t k = 0; k < kSamples; ++k) {
          if (!w.done().contains(k))
            w.append(encode_record(w.format(), make_sample(k, 1 + static_cast<int64_t>(k % 7), 15).view()));
          if (k % 300 == 299) w.checkpoint();
        }
        w.finish();
      } catch (...) {
        ::_exit(1);
      }
      ::_exit(0);
    }
    ::usleep(static_cast<useconds_t>(300 + rng.below(round, 3000)));
    ::kill(child, SIGKILL);
    int status = 0;
    REQUIRE(::waitpid(child, &status, 0) == child);
    kills += WIFSIGNALED(status);
    REQUIRE((WIFSIGNALED(status) || WEXITSTATUS(status) == 0));
    if (!is_store(dir.path)) continue;  // killed before there was anything
    try {
      const StoreReader reader(dir.path);
      REQUIRE(static_cast<size_t>(reader.size()) >= done_before);
      done_before = static_cast<size_t>(reader.size());
      REQUIRE(reader.complete() == (done_before == kSamples && fs::exists(dir.path / "manifest.json")));
    } catch (const Error& e) {
      REQUIRE(done_before == 0);  // killed inside the very first shard header
    }
    if (done_before == kSamples && WIFEXITED(status)) break;
  }
  {
    StoreWriter w(dir.path, id, options);  // slow machines may not have come through
    for (uint64_t k = 0; k < kSamples; ++k)
      w.append(encode_record(w.format(), make_sample(k, 1 + static_cast<int64_t>(k % 7), 15).view()));
    w.finish();
  }
  INFO(kills << " kills");
  CHECK(kills > 0);
  const StoreReader reader(dir.path);
  CHECK(reader.complete());
  CHECK(reader.problems().empty());
  REQUIRE(reader.size() == static_cast<int64_t>(kSamples));
  std::vector<bool> seen(kSamples);
  for (int64_t i = 0; i < reader.size(); ++i) {
    const uint64_t k = reader.info(i).id;
    REQUIRE(k < kSamples);
    REQUIRE_FALSE(seen[k]);
    seen[k] = true;
    REQUIRE(equal(reader, i, make_sample(k, 1 + static_cast<int64_t>(k % 7), 15)));
  }
}

TEST_CASE("shards of noise and with stretches overwritten give errors or right data", "[store][fault]") {
  TempFolder dir;
  const auto samples = write_small(dir.path, StoreCodec::zstd);
  const fs::path shard = dir.path / shard_name(0);
  const std::string bytes = file_bytes(shard);
  const Rng rng(11, RngStream::test);
  const bool manifest = GENERATE(true, false);
  if (!manifest) fs::remove(dir.path / "manifest.json");
  auto draw = [&, n = uint64_t{0}](uint64_t below) mutable { return rng.below(n++, below); };
  for (int round = 0; round < 3000; ++round) {
    std::string changed = bytes;
    switch (draw(4)) {
      case 0:  // overwrite a stretch
        for (uint64_t k = draw(64), at = draw(bytes.size()); k > 0 && at < bytes.size(); --k, ++at)
          changed[at] = static_cast<char>(draw(256));
        break;
      case 1:  // drop a stretch
        changed.erase(draw(bytes.size()), 1 + draw(80));
        break;
      case 2:  // repeat a stretch
        changed.insert(draw(bytes.size()), bytes.substr(draw(bytes.size()), 1 + draw(300)));
        break;
      default:  // a file of another length and content behind the header
        changed.resize(240 + draw(2000));
        for (size_t k = 240; k < changed.size(); ++k) changed[k] = static_cast<char>(draw(256));
    }
    write_bytes(shard, changed);
    bool right = true;
    try {
      const StoreReader reader(dir.path);
      for (int64_t i = 0; i < reader.size(); ++i) {
        const auto s =
            std::find_if(samples.begin(), samples.end(), [&](const Sample& x) { return x.id == reader.info(i).id; });
        right &= s != samples.end();
        try {
          right = right && equal(reader, i, *s);
        } catch (const Error&) {
        }
      }
    } catch (const Error&) {
    }
    INFO("round " << round);
    REQUIRE(right);
  }
}

TEST_CASE("many threads may append, checkpoints and shards in between", "[store]") {
  TempFolder dir;
  const StoreIdentity id = small_identity(StoreCodec::zstd);
  {
    StoreWriter w(dir.path, id, {.shard_bytes = 20000, .buffer_bytes = 3000});
    std::vector<std::thread> threads;
    for (uint64_t t = 0; t < 4; ++t)
      threads.emplace_back([&, t] {
        for (uint64_t k = 0; k < 50; ++k) {
          w.append(encode_record(w.format(), make_sample(t * 40 + k, 1 + static_cast<int64_t>(k), 15).view()));
          if (k % 20 == t) w.checkpoint();
        }
      });
    for (auto& t : threads) t.join();
    CHECK(w.done().size() == 170);
    CHECK(fs::exists(dir.path / "progress.json"));
  }
  const StoreReader reader(dir.path);
  CHECK(reader.n_shards() > 3);
  CHECK_FALSE(reader.complete());
  CHECK(reader.problems().empty());
  CHECK(reader.size() == 170);
  for (int64_t i = 0; i < reader.size(); ++i) CHECK(reader.check(i) == "");
}

TEST_CASE("the first value that is not finite is found", "[store]") {
  std::vector<bf16> v(7 * 20, to_bf16(1.5f));
  CHECK_FALSE(first_non_finite(v.data(), 7, 18, 20));
  v[19] = bf16{0x7fc0};  // between the rows
  CHECK_FALSE(first_non_finite(v.data(), 7, 18, 20));
  v[3 * 20 + 17] = bf16{0xff80};
  v[5 * 20] = bf16{0x7fc1};
  const auto at = first_non_finite(v.data(), 7, 18, 20);
  REQUIRE(at);
  CHECK(at->row == 3);
  CHECK(at->column == 17);
  CHECK(at->value == -std::numeric_limits<float>::infinity());
  CHECK_FALSE(first_non_finite(v.data(), 0, 18, 20));
}

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
  CHECK(check.not_finite == 0);

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

TEST_CASE("zstd on gaussian bf16: ratio and speed", "[store]") {
  StoreIdentity id = small_identity(StoreCodec::zstd);
  id.hidden_size = 2048;
  Sample s;
  s.width = id.row_width();
  const int64_t n = 2048;
  s.ids.resize(static_cast<size_t>(n));
  s.mask.resize(static_cast<size_t>(n));
  s.states.resize(static_cast<size_t>(n * s.width));
  const Rng rng(1, RngStream::test);
  for (size_t i = 0; i < s.states.size(); ++i)  // a repeating table of normals is long enough for an entropy coder
    s.states[i] = i < 65537 ? to_bf16(static_cast<float>(rng.normal(i))) : s.states[i % 65537];
  const double raw = static_cast<double>(s.states.size()) * 2;
  const RecordFormat format = record_format(id);
  double best = 1e9, best_read = 1e9;
  std::vector<std::byte> record;
  const auto cpu_s = [] {  // of this thread: other work on the machine does not count
    timespec t{};
    ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
  };
  for (int k = 0; k < 3; ++k) {
    const double t = cpu_s();
    record = encode_record(format, s.view());
    best = std::min(best, cpu_s() - t);
  }
  TempFolder dir;
  {
    StoreWriter w(dir.path, id);
    w.append(record);
    w.finish();
  }
  const StoreReader reader(dir.path);
  std::vector<bf16> out(s.states.size());
  for (int k = 0; k < 3; ++k) {
    const double t = cpu_s();
    reader.read_states(0, out.data(), s.width);
    best_read = std::min(best_read, cpu_s() - t);
  }
  CHECK(same_bits(out, s.states));
  const double ratio = raw / static_cast<double>(record.size());
  INFO(fmt::format("zstd: ratio {:.3f}, encode {:.2f} GB/s, decode {:.2f} GB/s of one thread's CPU time", ratio,
                   raw / best / 1e9, raw / best_read / 1e9));
  // High byte: sign (1 bit) and exponent without its last bit, about 1.75 bits for normals: 16 / (8 + 2.75) = 1.49 at
  // best. (A little more is had from the 65537-value table.)
  CHECK(ratio > 1.40);
}
