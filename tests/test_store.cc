// The store: codecs, identities, versions, threads.
#include "store_samples.h"

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <thread>

#include "core/error.h"
#include "core/hash.h"

using namespace store_samples;
using Catch::Matchers::Contains;

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
