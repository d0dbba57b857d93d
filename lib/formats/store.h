// The hidden-state store: what `extract` writes and `train` reads.
//
// A store is a folder of append-only shards of self-contained records, one record a sample; the bytes are defined in
// formats/store_layout.h. One StoreWriter at a time owns a folder (a lock sees to that) and appends records that any
// number of threads have encoded. A StoreReader maps the shards and never changes anything; it may run beside the
// writer and sees what was on disk when it was opened.
//
//   StoreWriter w(folder, identity);                        // new, or resumes: w.done() are the ids it holds already
//   w.append(encode_record(w.format(), sample));            // encode_record: in any thread
//   w.checkpoint();                                         // now and then: what was appended survives a power cut
//   w.finish();                                             // writes manifest.json: the store is complete
//
// Crash safety: a record counts once it is whole on disk. Opening a store again scans it, cuts off what is not whole
// and goes on behind it, so killing the writer at any moment loses at most the records not yet written, which done()
// then lacks.
#pragma once

#include <memory>
#include <mutex>
#include <unordered_set>

#include "formats/sample_source.h"
#include "formats/store_layout.h"
#include "formats/store_manifest.h"

namespace dspark::formats {

// --- records ---------------------------------------------------------------------------------------------------------

struct SampleView {
  uint64_t id = 0;
  std::span<const int32_t> token_ids;  // [T], T >= 1
  std::span<const uint8_t> loss_mask;  // [T], 0 or 1
  FinishReason finish = FinishReason::given;
  const bf16* states = nullptr;  // [T, (L+1)*E]
  int64_t row_stride = 0;        // in elements
  uint64_t conversation = id;    // shared by the samples of one conversation
};

// The whole record. A pure function: for worker threads. Throws on a sample that contradicts the format; NaN and
// infinities are kept by raw and zstd, refused by fp8 (look with first_non_finite before).
std::vector<std::byte> encode_record(const RecordFormat& format, const SampleView& sample);
// The same into a buffer that a worker keeps: fresh memory for each record costs a third of zstd's speed.
void encode_record(const RecordFormat& format, const SampleView& sample, std::vector<std::byte>& out);

// An id that follows from the content: the first 8 bytes of SHA-256 over token ids and loss mask.
uint64_t content_id(std::span<const int32_t> token_ids, std::span<const uint8_t> loss_mask);

// --- writing ---------------------------------------------------------------------------------------------------------

struct StoreTotals {
  uint64_t samples = 0, tokens = 0, mask_tokens = 0;
  uint64_t record_bytes = 0;  // stored, all included
};

struct StoreOptions {
  uint64_t shard_bytes = uint64_t{4} << 30;   // a shard grows to about this size (a record is never split)
  uint64_t buffer_bytes = uint64_t{4} << 20;  // appended records are written out when this much has gathered
};

class StoreWriter {
 public:
  // Makes the folder, or resumes the store in it. An Error: another process writes there, a store of another identity
  // (the message names the difference), a newer major version, something else lies there.
  StoreWriter(const fs::path& folder, const StoreIdentity& identity, const StoreOptions& options = {});
  ~StoreWriter();  // writes out what is buffered if it can; does not finish()
  StoreWriter(const StoreWriter&) = delete;
  StoreWriter& operator=(const StoreWriter&) = delete;

  const RecordFormat& format() const { return format_; }
  bool resumed() const { return resumed_; }
  // Ids stored so far. Not to be read while another thread appends.
  const std::unordered_set<uint64_t>& done() const { return done_; }
  const StoreTotals& totals() const { return totals_; }
  // What a resumed store had that was not whole: said to the user, repaired or stepped over.
  const std::vector<StoreProblem>& problems() const { return problems_; }

  // Appends a record made by encode_record(format(), ...). False, and nothing stored, when the id is there already.
  // Thread-safe. After an Error (a full disk) the store is cut back to its last whole record and takes no more.
  bool append(std::span<const std::byte> record);
  // Writes out, syncs, and notes in progress.json how far the store is known to be whole.
  void checkpoint();
  // checkpoint(), then manifest.json in place of progress.json. Appending more later takes the manifest back first.
  void finish();

 private:
  struct Shard {
    uint32_t index = 0;
    uint64_t bytes = 0, records = 0;
  };
  void open_existing(const std::vector<uint32_t>& shards, const StoreFacts& facts);
  void open_shard(const Shard& shard);
  void start_shard();
  void flush();
  void flush_or_give_up();
  void sync();
  void write_summary(const fs::path& path, bool complete) const;

  fs::path folder_;
  StoreIdentity identity_;
  StoreOptions options_;
  std::string identity_text_;
  RecordFormat format_;
  std::unique_ptr<FolderLock> lock_;
  std::mutex mutex_;
  std::vector<Shard> shards_;  // the last one is appended to, if fd_ is open
  int fd_ = -1;
  bool failed_ = false, resumed_ = false, finished_ = false;
  std::vector<std::byte> buffer_;
  uint64_t buffered_records_ = 0;
  std::unordered_set<uint64_t> done_;
  StoreTotals totals_;
  std::vector<StoreProblem> problems_;
};

// --- reading ---------------------------------------------------------------------------------------------------------

// Whether this folder holds a dspark store (whole or not).
bool is_store(const fs::path& folder);

class StoreReader : public SampleSource {
 public:
  // Lists the samples. Records behind what manifest.json or progress.json vouches for are checked whole here; others
  // when they are read. Damage is reported by problems(), not thrown, as long as the identity can be read.
  explicit StoreReader(const fs::path& folder);

  std::string_view kind() const override { return "dspark store"; }
  const fs::path& path() const override { return folder_; }
  const StoreIdentity& identity() const override { return identity_; }
  int64_t size() const override { return static_cast<int64_t>(infos_.size()); }
  const SampleInfo& info(int64_t i) const override;
  const std::vector<StoreProblem>& problems() const override { return problems_; }
  SampleTokens tokens(int64_t i) const override;
  void read_states(int64_t i, bf16* dst, int64_t row_stride, RowRange rows = {},
                   std::span<const int> parts = {}) const override;
  std::string check(int64_t i) const override;

  // Whether the writer finished it.
  bool complete() const { return complete_; }
  const RecordFormat& format() const { return format_; }
  int n_shards() const { return static_cast<int>(shards_.size()); }
  uint64_t file_bytes() const;  // of all shards
  // Where a sample lies, and its bytes as stored (not checked).
  const std::string& shard_of(int64_t i) const;
  uint64_t offset_of(int64_t i) const;
  std::span<const std::byte> record(int64_t i) const;

 private:
  struct Place {
    uint32_t shard;
    uint64_t offset;
    RecordHeader header;
  };
  [[noreturn]] void damaged(int64_t i, const std::string& why) const;

  fs::path folder_;
  StoreIdentity identity_;
  RecordFormat format_;
  bool complete_ = false;
  std::vector<MappedFile> shards_;
  std::vector<std::string> names_;
  std::vector<SampleInfo> infos_;
  std::vector<Place> places_;
  std::vector<StoreProblem> problems_;
};

}  // namespace dspark::formats
