#include "formats/store_layout.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "core/error.h"
#include "core/hash.h"

namespace dspark::formats {

static_assert(std::endian::native == std::endian::little, "the store's readers and writers copy integers as they are");

namespace {

constexpr char kShardMagic[9] = "DSPKSTOR";
constexpr char kRecordMagic[5] = "DREC";

template <typename T>
T get(std::span<const std::byte> bytes, uint64_t offset) {
  T v;
  std::memcpy(&v, bytes.data() + offset, sizeof(T));
  return v;
}

template <typename T>
void put(std::byte* out, uint64_t offset, T v) {
  std::memcpy(out + offset, &v, sizeof(T));
}

}  // namespace

RecordFormat record_format(const StoreIdentity& identity) { return record_format(identity, identity_text(identity)); }

RecordFormat record_format(const StoreIdentity& identity, std::string_view text) {
  return {crc32c(std::as_bytes(std::span(text.data(), text.size()))), identity.n_parts(), identity.hidden_size,
          identity.codec};
}

std::vector<std::byte> pack_shard_header(uint32_t index, std::string_view identity_text) {
  std::vector<std::byte> out(kShardHeaderBytes + identity_text.size());
  std::byte* p = out.data();
  std::memcpy(p, kShardMagic, 8);
  put<uint16_t>(p, 8, kStoreMajor);
  put<uint16_t>(p, 10, kStoreMinor);
  put<uint32_t>(p, 12, index);
  put<uint32_t>(p, 16, static_cast<uint32_t>(out.size()));
  put<uint32_t>(p, 20, static_cast<uint32_t>(identity_text.size()));
  std::memcpy(p + kShardHeaderBytes, identity_text.data(), identity_text.size());
  put<uint32_t>(p, 24, crc32c(std::span(out).subspan(kShardHeaderBytes)));
  put<uint32_t>(p, 36, crc32c(std::span(out).first(36)));
  return out;
}

std::optional<ShardHeader> parse_shard_header(std::span<const std::byte> file, const std::string& name,
                                              std::string& why) {
  if (file.size() < kShardHeaderBytes) {
    why = fmt::format("the shard header is cut off after {} bytes", file.size());
    return std::nullopt;
  }
  if (std::memcmp(file.data(), kShardMagic, 8) != 0 || get<uint32_t>(file, 36) != crc32c(file.first(36))) {
    why = "the shard header is damaged";
    return std::nullopt;
  }
  const uint16_t major = get<uint16_t>(file, 8);
  DS_REQUIRE(major == kStoreMajor,
             "{} is a hidden-state store of version {}.{}; this dspark reads version {}: use the dspark that wrote it",
             name, major, get<uint16_t>(file, 10), kStoreMajor);
  ShardHeader h;
  h.minor = get<uint16_t>(file, 10);
  h.index = get<uint32_t>(file, 12);
  h.header_bytes = get<uint32_t>(file, 16);
  h.identity_crc = get<uint32_t>(file, 24);
  const uint64_t identity_bytes = get<uint32_t>(file, 20);
  if (h.header_bytes % 8 != 0 || h.header_bytes < kShardHeaderBytes + identity_bytes) {
    why = "the shard header's sizes contradict each other";
    return std::nullopt;
  }
  if (h.header_bytes > file.size()) {
    why = fmt::format("the shard header is cut off after {} of {} bytes", file.size(), h.header_bytes);
    return std::nullopt;
  }
  const auto text = file.subspan(kShardHeaderBytes, identity_bytes);
  if (crc32c(text) != h.identity_crc) {
    why = "the identity in the shard header is damaged";
    return std::nullopt;
  }
  h.identity_text.assign(reinterpret_cast<const char*>(text.data()), text.size());
  return h;
}

void pack_record_header(const RecordHeader& h, const RecordFormat& format, std::byte* out) {
  DS_ASSERT(h.header_bytes == kRecordHeaderBytes, "a record header of {} bytes to write", h.header_bytes);
  std::memset(out, 0, kRecordHeaderBytes);
  std::memcpy(out, kRecordMagic, 4);
  put<uint32_t>(out, 8, kRecordHeaderBytes);
  put<uint32_t>(out, 12, format.identity_crc);
  put<uint64_t>(out, 16, h.record_bytes);
  put<uint64_t>(out, 24, h.id);
  put<uint32_t>(out, 32, h.n_tokens);
  put<uint32_t>(out, 36, h.n_mask);
  put<uint16_t>(out, 40, static_cast<uint16_t>(format.n_parts));
  put<uint8_t>(out, 42, static_cast<uint8_t>(h.finish));
  put<uint32_t>(out, 44, static_cast<uint32_t>(format.hidden_size));
  put<uint32_t>(out, 48, h.rows_per_block);
  put<uint32_t>(out, 52, h.n_blocks);
  put<uint32_t>(out, 56, h.rows_crc);
  put<uint32_t>(out, 60, h.table_crc);
  put<uint64_t>(out, 64, h.conversation);
  put<uint32_t>(out, 4, crc32c({out + 8, kRecordHeaderBytes - 8}));
}

std::optional<RecordHeader> parse_record_header(std::span<const std::byte> bytes, const RecordFormat& format,
                                                std::string& why) {
  const uint64_t header_bytes = bytes.size() < kRecordHeaderBytes10 ? 0 : get<uint32_t>(bytes, 8);
  if (bytes.size() < kRecordHeaderBytes10 ||
      (bytes.size() < kRecordHeaderBytes && header_bytes == kRecordHeaderBytes)) {
    why = "a record header is cut off";
    return std::nullopt;
  }
  if (std::memcmp(bytes.data(), kRecordMagic, 4) != 0 || header_bytes < kRecordHeaderBytes10 || header_bytes % 8 != 0 ||
      header_bytes > bytes.size() || get<uint32_t>(bytes, 4) != crc32c(bytes.subspan(8, header_bytes - 8))) {
    why = "a damaged record header";
    return std::nullopt;
  }
  if (get<uint32_t>(bytes, 12) != format.identity_crc) {
    why = "a record of another store";
    return std::nullopt;
  }
  RecordHeader h;
  h.header_bytes = header_bytes;
  h.record_bytes = get<uint64_t>(bytes, 16);
  h.id = get<uint64_t>(bytes, 24);
  h.conversation = header_bytes >= kRecordHeaderBytes ? get<uint64_t>(bytes, 64) : h.id;
  h.n_tokens = get<uint32_t>(bytes, 32);
  h.n_mask = get<uint32_t>(bytes, 36);
  h.finish = static_cast<FinishReason>(get<uint8_t>(bytes, 42));
  h.rows_per_block = get<uint32_t>(bytes, 48);
  h.n_blocks = get<uint32_t>(bytes, 52);
  h.rows_crc = get<uint32_t>(bytes, 56);
  h.table_crc = get<uint32_t>(bytes, 60);
  const uint64_t n_parts = get<uint16_t>(bytes, 40);
  // The CRC held, so a contradiction here is a writer's bug and not damage; it must not become a wild read all the
  // same.
  const uint64_t chunks = h.rows_per_block == 0 ? 0 : (uint64_t{h.n_tokens} + h.rows_per_block - 1) / h.rows_per_block;
  if (h.n_tokens == 0 || h.rows_per_block == 0 || uint64_t{h.rows_per_block} * format.hidden_size > (1u << 26) ||
      h.n_mask > h.n_tokens || n_parts != static_cast<uint64_t>(format.n_parts) ||
      get<uint32_t>(bytes, 44) != format.hidden_size || h.n_blocks != chunks * n_parts || h.record_bytes % 8 != 0 ||
      h.record_bytes < h.blocks_offset()) {
    why = "a record header whose counts contradict each other";
    return std::nullopt;
  }
  if (h.record_bytes > bytes.size()) {
    why = fmt::format("a record is cut off after {} of {} bytes", bytes.size(), h.record_bytes);
    return std::nullopt;
  }
  return h;
}

std::string check_rows(std::span<const std::byte> record, const RecordHeader& h) {
  if (crc32c(record.subspan(h.header_bytes, h.rows_bytes())) != h.rows_crc) return "token ids or loss mask are damaged";
  const auto* mask = reinterpret_cast<const uint8_t*>(record.data() + h.header_bytes + uint64_t{h.n_tokens} * 4);
  uint64_t n_mask = 0;
  for (uint32_t t = 0; t < h.n_tokens; ++t) n_mask += mask[t] == 1;
  return n_mask == h.n_mask ? "" : fmt::format("{} tokens in the loss mask, the header says {}", n_mask, h.n_mask);
}

std::string read_block_table(std::span<const std::byte> record, const RecordHeader& h, std::vector<BlockEntry>& table) {
  const auto bytes = record.subspan(h.table_offset(), h.table_bytes());
  if (crc32c(bytes) != h.table_crc) return "the block table is damaged";
  table.resize(h.n_blocks);
  uint64_t total = 0;
  for (uint32_t b = 0; b < h.n_blocks; ++b) {
    const uint64_t at = uint64_t{b} * kBlockEntryBytes;
    table[b] = {get<uint32_t>(bytes, at), get<uint32_t>(bytes, at + 4),
                static_cast<BlockCoding>(get<uint32_t>(bytes, at + 8))};
    total += table[b].stored_bytes;
  }
  if ((h.blocks_offset() + total + 7) / 8 * 8 != h.record_bytes) return "the block sizes contradict the record's";
  return "";
}

std::string check_record(std::span<const std::byte> record, const RecordHeader& h) {
  if (std::string why = check_rows(record, h); !why.empty()) return why;
  std::vector<BlockEntry> table;
  if (std::string why = read_block_table(record, h, table); !why.empty()) return why;
  uint64_t offset = h.blocks_offset();
  for (size_t b = 0; b < table.size(); ++b) {
    if (crc32c(record.subspan(offset, table[b].stored_bytes)) != table[b].crc)
      return fmt::format("block {} of {} is damaged", b, table.size());
    offset += table[b].stored_bytes;
  }
  for (; offset < h.record_bytes; ++offset)
    if (record[offset] != std::byte{0}) return "the padding is damaged";
  return "";
}

ShardScan scan_records(std::span<const std::byte> file, const std::string& name, uint64_t begin, uint64_t trusted_bytes,
                       const RecordFormat& format, const std::function<void(uint64_t, const RecordHeader&)>& on_record,
                       std::vector<StoreProblem>& problems) {
  ShardScan scan{begin, false};
  uint64_t offset = begin;  // where the next record should start
  bool searching = false;   // inside a gap: the problem that opened it has been noted
  while (offset < file.size()) {
    std::string why;
    const auto header = parse_record_header(file.subspan(offset), format, why);
    if (header) {
      if (offset + header->record_bytes > trusted_bytes)
        why = check_record(file.subspan(offset, header->record_bytes), *header);
      if (why.empty()) {
        on_record(offset, *header);
        scan.end = offset + header->record_bytes;
      } else {
        problems.push_back({name, offset, fmt::format("sample {:016x} is lost: {}", header->id, why)});
      }
      // A header that holds says where the next record starts, even when the record's own contents are damaged.
      offset += header->record_bytes;
      searching = false;
      continue;
    }
    if (!searching) problems.push_back({name, offset, why + "; what follows up to the next whole record is lost"});
    searching = true;
    // Records start at multiples of 8 from the shard's beginning; a hit elsewhere is chance.
    do {
      offset += 8;
      const void* hit =
          offset < file.size() ? memmem(file.data() + offset, file.size() - offset, kRecordMagic, 4) : nullptr;
      offset = hit ? static_cast<uint64_t>(static_cast<const std::byte*>(hit) - file.data()) : file.size();
      if (!hit || offset % 8 == 0) break;
      offset -= offset % 8;
    } while (true);
  }
  scan.tail = scan.end < file.size();
  return scan;
}

std::string shard_name(uint32_t index) { return fmt::format("shard-{:05}.dss", index); }

std::vector<uint32_t> list_shards(const fs::path& folder) {
  std::vector<uint32_t> out;
  std::error_code ec;
  for (fs::directory_iterator it(folder, ec), end; !ec && it != end; it.increment(ec)) {
    const std::string name = it->path().filename().string();
    uint32_t index = 0;
    if (name.size() < 15 || name.size() > 19 || !name.starts_with("shard-") || !name.ends_with(".dss")) continue;
    const std::string digits = name.substr(6, name.size() - 10);
    if (!std::all_of(digits.begin(), digits.end(), [](char c) { return c >= '0' && c <= '9'; })) continue;
    index = static_cast<uint32_t>(std::stoul(digits));
    if (shard_name(index) == name) out.push_back(index);
  }
  DS_REQUIRE(!ec, "cannot list {}: {}", folder.string(), ec.message());
  std::sort(out.begin(), out.end());
  return out;
}

}  // namespace dspark::formats
