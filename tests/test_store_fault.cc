// Cut, flipped, overwritten, full and killed: what a store survives.
#include "store_samples.h"

#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <nlohmann/json.hpp>

#include "core/error.h"

using namespace store_samples;
using Catch::Matchers::Contains;

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
