// The bytes of a hidden-state store, version 1.1. This comment is normative; the code follows it.
//
// A store is a folder of shards `shard-NNNNN.dss` (N = 00000, 00001, ...), plus `manifest.json` once it is finished and
// `progress.json` until then. Everything needed to read it is in the shards: they are append-only, and a shard that was
// cut off at any byte is readable up to its last whole record. All integers are little-endian, all checksums CRC32C.
//
// SHARD    header, then records back to back, each a multiple of 8 bytes long.
//
//   shard header
//     0   u8[8]   "DSPKSTOR"
//     8   u16     version, major     A reader refuses a newer major version by name and reads a newer minor one.
//    10   u16     version, minor
//    12   u32     shard index N
//    16   u32     header bytes: where the first record starts (40 + identity bytes, a multiple of 8)
//    20   u32     identity bytes (a multiple of 8)
//    24   u32     CRC of the identity text
//    28   u32     0
//    32   u32     0
//    36   u32     CRC of bytes [0, 36). These first 40 bytes keep their meaning in every later version.
//    40   text    identity: canonical JSON padded with spaces (formats/store_identity.h), the same in all shards of a
//    store
//
//   record
//     header
//     0   u8[4]   "DREC"
//     4   u32     CRC of header bytes [8, header bytes)
//     8   u32     header bytes: 64 in 1.0, 72 in 1.1; a newer minor version may append more. They say what a record
//                 has: one of 1.0 stays as it is when it is copied into a newer shard.
//    12   u32     CRC of the store's identity text: a record never passes for one of another store
//    16   u64     record bytes, all included
//    24   u64     sample id
//    32   u32     T, tokens (>= 1)
//    36   u32     tokens whose loss mask is set
//    40   u16     parts L+1: the L taps in ascending order, then the last state
//    42   u8      finish reason: 0 given with the data, 1 stop, 2 length
//    43   u8      0
//    44   u32     E, width of a part
//    48   u32     R, rows of a block; R * E <= 2^26
//    52   u32     number of blocks = ceil(T / R) * (L+1)
//    56   u32     CRC of the rows section, its padding included
//    60   u32     CRC of the block table, its padding included
//    64   u64     conversation id, from 1.1 on: records made of one conversation (an answer each, when its template
//                 rewrites earlier turns) share it. A record without it is a conversation of its own, with its sample
//                 id for an id.
//     rows section       i32 token ids [T], u8 loss mask [T] (0 or 1), zeros to a multiple of 8
//     block table        per block: u32 stored bytes, u32 CRC of them, u32 coding; zeros to a multiple of 8
//     blocks             back to back, in the order of the table: block c*(L+1) + p holds rows [c*R, min(c*R+R, T)) of
//     part
//                        p, coded as formats/state_codec.h says; at the end zeros to a multiple of 8
//
// Each record stands alone: after damage a reader searches on for the next header whose CRC and identity hold.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/files.h"
#include "formats/sample_source.h"
#include "formats/state_codec.h"

namespace dspark::formats {

inline constexpr uint16_t kStoreMajor = 1, kStoreMinor = 1;
inline constexpr size_t kShardHeaderBytes = 40, kRecordHeaderBytes = 72, kBlockEntryBytes = 12;
inline constexpr size_t kRecordHeaderBytes10 = 64;  // in version 1.0, and what every record has at least

// What every record of a store shares.
struct RecordFormat {
  uint32_t identity_crc = 0;
  int n_parts = 0;
  int64_t hidden_size = 0;
  StoreCodec codec = StoreCodec::raw;
};
// Of a new store with this identity.
RecordFormat record_format(const StoreIdentity& identity);
RecordFormat record_format(const StoreIdentity& identity, std::string_view text);

struct ShardHeader {
  uint16_t minor = kStoreMinor;
  uint32_t index = 0;
  uint64_t header_bytes = 0;
  std::string identity_text;
  uint32_t identity_crc = 0;
};
std::vector<std::byte> pack_shard_header(uint32_t index, std::string_view identity_text);
// Nothing when the bytes are not a whole shard header; `why` then says in what way. A newer major version throws.
std::optional<ShardHeader> parse_shard_header(std::span<const std::byte> file, const std::string& name,
                                              std::string& why);

struct RecordHeader {
  uint64_t header_bytes = kRecordHeaderBytes, record_bytes = 0, id = 0, conversation = 0;
  uint32_t n_tokens = 0, n_mask = 0;
  FinishReason finish = FinishReason::given;
  uint32_t rows_per_block = 0, n_blocks = 0, rows_crc = 0, table_crc = 0;

  uint64_t rows_bytes() const { return (uint64_t{n_tokens} * 5 + 7) / 8 * 8; }
  uint64_t table_offset() const { return header_bytes + rows_bytes(); }
  uint64_t table_bytes() const { return (uint64_t{n_blocks} * kBlockEntryBytes + 7) / 8 * 8; }
  uint64_t blocks_offset() const { return table_offset() + table_bytes(); }
};
// Writes kRecordHeaderBytes: new records are of today's version, whatever the shard around them.
void pack_record_header(const RecordHeader& header, const RecordFormat& format, std::byte* out);
// `bytes` starts at the record and may go on behind it. Nothing when no whole record of this store starts here.
std::optional<RecordHeader> parse_record_header(std::span<const std::byte> bytes, const RecordFormat& format,
                                                std::string& why);

struct BlockEntry {
  uint32_t stored_bytes, crc;
  BlockCoding coding;
};
// These take the record's bytes, exactly record_bytes of them; "" or what is wrong.
std::string check_rows(std::span<const std::byte> record, const RecordHeader& header);
std::string read_block_table(std::span<const std::byte> record, const RecordHeader& header,
                             std::vector<BlockEntry>& table);
std::string check_record(std::span<const std::byte> record, const RecordHeader& header);  // every CRC and count

// Walks the records of a shard. `begin` is where they start; records that end after `trusted_bytes` are checked whole,
// earlier ones by their header alone. Calls on_record for each whole one; reports what lies between them.
struct ShardScan {
  uint64_t end = 0;   // end of the last whole record, or `begin`
  bool tail = false;  // there is something behind it
};
ShardScan scan_records(std::span<const std::byte> file, const std::string& name, uint64_t begin, uint64_t trusted_bytes,
                       const RecordFormat& format,
                       const std::function<void(uint64_t offset, const RecordHeader& header)>& on_record,
                       std::vector<StoreProblem>& problems);

std::string shard_name(uint32_t index);
// Indices of the shards in a folder, ascending.
std::vector<uint32_t> list_shards(const fs::path& folder);

}  // namespace dspark::formats
