#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "formats/store.h"
#include "formats/store_manifest.h"

namespace dspark::formats {

StoreWriter::StoreWriter(const fs::path& folder, const StoreIdentity& identity, const StoreOptions& options)
    : folder_(folder), identity_(identity), options_(options) {
  check_identity(identity, folder.string());
  for (int tap : identity.taps)
    DS_REQUIRE(tap != kUnknownTap, "{}: which layers the states are of is not known: name the taps", folder.string());
  make_folder(folder);
  lock_ = std::make_unique<FolderLock>(folder);
  const std::vector<uint32_t> shards = list_shards(folder);
  DS_REQUIRE(!shards.empty() || is_store(folder) || !fs::exists(folder / kManifestName),
             "{} holds something that is not a dspark store ({}); choose another output", folder.string(),
             kManifestName);
  const StoreFacts facts = read_facts(folder, shards, problems_);
  resumed_ = !shards.empty() || facts.summary;
  if (!facts.identity_text.empty()) {
    const std::string difference = identity_difference(identity, parse_identity(facts.identity_text, folder.string()));
    DS_REQUIRE(difference.empty(), "{} holds a store of something else ({}); choose another output or remove it",
               folder.string(), difference);
  }
  // A store written by a newer minor version may say more about itself than we would: its own text is kept.
  identity_text_ = facts.identity_text.empty() ? identity_text(identity) : facts.identity_text;
  format_ = record_format(identity_, identity_text_);
  try {
    open_existing(shards, facts);
  } catch (...) {
    if (fd_ >= 0) ::close(fd_);
    throw;
  }
  finished_ = fs::exists(folder / kManifestName);
}

void StoreWriter::open_existing(const std::vector<uint32_t>& shards, const StoreFacts& facts) {
  for (uint32_t index : shards) {
    const bool last = index == shards.back();
    const std::string name = shard_name(index);
    Shard shard{index, 0, 0};
    bool whole_header = false, appendable = false;
    ShardScan scan;
    {
      const MappedFile file(folder_ / name);
      std::string why;
      const auto header = parse_shard_header(file.bytes(), name, why);
      whole_header = header.has_value();
      appendable = header && header->minor == kStoreMinor;
      const uint64_t begin = header ? header->header_bytes : 0;
      scan = scan_records(
          file.bytes(), name, begin, facts.vouched(index), format_,
          [&](uint64_t, const RecordHeader& h) {
            if (!done_.insert(h.id).second) return;
            ++shard.records;
            ++totals_.samples;
            totals_.tokens += h.n_tokens;
            totals_.mask_tokens += h.n_mask;
            totals_.record_bytes += h.record_bytes;
          },
          problems_);
      shard.bytes = file.size();
      // A damaged header may hide a store of something else: never taken for an unfinished file of ours.
      DS_REQUIRE(whole_header || !facts.identity_text.empty() || scan.end > begin ||
                     file.size() < kShardHeaderBytes + identity_text_.size(),
                 "{}: {} and nothing in it belongs to this store; move it away or choose another output",
                 (folder_ / name).string(), why);
    }
    shards_.push_back(shard);
    if (!last) continue;
    if (!whole_header) {
      // Cut off while it was being created: made anew. A longer file has a damaged header: left alone.
      if (shard.bytes >= kShardHeaderBytes + identity_text_.size()) continue;
      SYS_CHECK(::unlink((folder_ / name).c_str()), "remove {}", (folder_ / name).string());
      shards_.pop_back();
      continue;
    }
    if (scan.tail) {
      SYS_CHECK(::truncate((folder_ / name).c_str(), static_cast<off_t>(scan.end)), "cut {} to its last whole record",
                (folder_ / name).string());
      shards_.back().bytes = scan.end;
    }
    if (appendable && shards_.back().bytes < options_.shard_bytes) open_shard(shards_.back());
  }
  // Bytes that a summary vouches for must never be ones written later: after a loss it is made anew.
  bool lost = false;
  if (facts.summary)
    for (const auto& [index, bytes] : facts.summary->shard_bytes)
      lost |= std::none_of(shards_.begin(), shards_.end(),
                           [&, i = index, b = bytes](const Shard& s) { return s.index == i && s.bytes >= b; });
  if (!lost) return;
  write_summary(folder_ / kProgressName, false);
  std::error_code ignored;
  fs::remove(folder_ / kManifestName, ignored);
}

StoreWriter::~StoreWriter() {
  try {
    flush();
  } catch (const Error&) {
    // What is not on disk is not in the store: the next run does it again.
  }
  if (fd_ >= 0) ::close(fd_);
}

void StoreWriter::open_shard(const Shard& shard) {
  const fs::path path = folder_ / shard_name(shard.index);
  fd_ = ::open(path.c_str(), O_WRONLY | O_APPEND | O_CLOEXEC);
  DS_REQUIRE(fd_ >= 0, "cannot open {}: {}", path.string(), errno_text());
}

void StoreWriter::start_shard() {
  if (fd_ >= 0) {
    SYS_CHECK(::fsync(fd_), "sync {}", (folder_ / shard_name(shards_.back().index)).string());
    SYS_CHECK(::close(std::exchange(fd_, -1)), "close {}", (folder_ / shard_name(shards_.back().index)).string());
  }
  const Shard shard{shards_.empty() ? 0 : shards_.back().index + 1, 0, 0};
  const fs::path path = folder_ / shard_name(shard.index);
  fd_ = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_APPEND | O_CLOEXEC, 0644);
  DS_REQUIRE(fd_ >= 0, "cannot create {}: {}", path.string(), errno_text());
  shards_.push_back(shard);
  const auto header = pack_shard_header(shard.index, identity_text_);
  write_all(fd_, header.data(), header.size(), path);
  SYS_CHECK(::fsync(fd_), "sync {}", path.string());
  shards_.back().bytes = header.size();
}

void StoreWriter::flush() {
  if (buffer_.empty() || failed_) return;
  const fs::path path = folder_ / shard_name(shards_.back().index);
  write_all(fd_, buffer_.data(), buffer_.size(), path);
  shards_.back().bytes += buffer_.size();
  shards_.back().records += buffered_records_;
  buffer_.clear();
  buffered_records_ = 0;
}

// Leaves the shard as it was before the write that failed, so that nothing half-written stays behind.
void StoreWriter::flush_or_give_up() {
  try {
    flush();
  } catch (const Error& e) {
    failed_ = true;
    uint64_t safe = 0;
    for (const Shard& s : shards_) safe += s.records;
    const bool cut = fd_ < 0 || ::ftruncate(fd_, static_cast<off_t>(shards_.back().bytes)) == 0;
    fail("{}; {} samples are stored{}; run the same command again to go on from there", e.what(), safe,
         cut ? "" : " before it (the rest of the file will be cut off)");
  }
}

bool StoreWriter::append(std::span<const std::byte> record) {
  std::string why;
  const auto h = parse_record_header(record, format_, why);
  DS_ASSERT(h && h->record_bytes == record.size(), "append of bytes that are no record of this store: {}", why);
  const std::lock_guard guard(mutex_);
  DS_REQUIRE(!failed_, "{}: an earlier write failed", folder_.string());
  if (done_.contains(h->id)) return false;
  if (finished_) {  // from here on the store is not complete any more
    std::error_code ec;
    fs::rename(folder_ / kManifestName, folder_ / kProgressName, ec);
    DS_REQUIRE(!ec, "cannot rename {}: {}", (folder_ / kManifestName).string(), ec.message());
    finished_ = false;
  }
  const bool full = fd_ >= 0 && shards_.back().bytes + buffer_.size() + record.size() > options_.shard_bytes &&
                    shards_.back().records + buffered_records_ > 0;
  if (fd_ < 0 || full) {
    flush_or_give_up();
    try {
      start_shard();
    } catch (...) {
      failed_ = true;
      throw;
    }
  }
  buffer_.insert(buffer_.end(), record.begin(), record.end());
  ++buffered_records_;
  if (buffer_.size() >= options_.buffer_bytes) flush_or_give_up();
  done_.insert(h->id);
  ++totals_.samples;
  totals_.tokens += h->n_tokens;
  totals_.mask_tokens += h->n_mask;
  totals_.record_bytes += record.size();
  return true;
}

void StoreWriter::sync() {
  DS_REQUIRE(!failed_, "{}: an earlier write failed", folder_.string());
  flush_or_give_up();
  if (fd_ >= 0) SYS_CHECK(::fsync(fd_), "sync {}", (folder_ / shard_name(shards_.back().index)).string());
  fsync_path(folder_);
}

void StoreWriter::write_summary(const fs::path& path, bool complete) const {
  StoreSummary s{complete, identity_text_, totals_.samples, totals_.tokens, totals_.mask_tokens, totals_.record_bytes,
                 {}};
  for (const Shard& shard : shards_) s.shard_bytes[shard.index] = shard.bytes;
  formats::write_summary(path, s);
}

void StoreWriter::checkpoint() {
  const std::lock_guard guard(mutex_);
  if (finished_) return;
  sync();
  write_summary(folder_ / kProgressName, false);
}

void StoreWriter::finish() {
  const std::lock_guard guard(mutex_);
  sync();
  if (fd_ < 0 && shards_.empty()) {  // an empty store still says what it is
    start_shard();
    sync();
  }
  write_summary(folder_ / kManifestName, true);
  std::error_code ignored;
  fs::remove(folder_ / kProgressName, ignored);
  finished_ = true;
}

}  // namespace dspark::formats
