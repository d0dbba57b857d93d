// Encoding one sample as a record of the store.
#include <algorithm>
#include <cstring>

#include "core/error.h"
#include "core/hash.h"
#include "formats/store.h"

namespace dspark::formats {
namespace {

// 128 Ki elements a block: large enough for Huffman tables to cost nothing (ratio within 0.1 % of 1 Mi elements), small
// enough that reading a few rows does not decode megabytes.
constexpr int64_t kBlockElements = 128 << 10;

void pad8(std::vector<std::byte>& out) { out.resize((out.size() + 7) / 8 * 8); }

}  // namespace

std::vector<std::byte> encode_record(const RecordFormat& format, const SampleView& s) {
  std::vector<std::byte> out;
  encode_record(format, s, out);
  return out;
}

void encode_record(const RecordFormat& format, const SampleView& s, std::vector<std::byte>& out) {
  const int64_t T = static_cast<int64_t>(s.token_ids.size()), E = format.hidden_size;
  DS_REQUIRE(T >= 1 && T <= (int64_t{1} << 30), "sample {:016x} has {} tokens; a store takes 1 to 2^30", s.id, T);
  DS_ASSERT(static_cast<int64_t>(s.loss_mask.size()) == T, "{} mask values for {} tokens", s.loss_mask.size(), T);
  DS_ASSERT(s.states && s.row_stride >= E * format.n_parts, "row stride {} for {} parts of {}", s.row_stride,
            format.n_parts, E);

  RecordHeader h;
  h.id = s.id;
  h.conversation = s.conversation;
  h.n_tokens = static_cast<uint32_t>(T);
  h.finish = s.finish;
  const int64_t R = std::clamp<int64_t>(kBlockElements / E, 1, T);
  h.rows_per_block = static_cast<uint32_t>(R);
  h.n_blocks = static_cast<uint32_t>((T + R - 1) / R * format.n_parts);

  out.clear();
  out.resize(h.blocks_offset());
  std::byte* rows = out.data() + h.header_bytes;
  std::memcpy(rows, s.token_ids.data(), s.token_ids.size_bytes());
  std::memcpy(rows + s.token_ids.size_bytes(), s.loss_mask.data(), s.loss_mask.size());
  for (uint8_t m : s.loss_mask) {
    DS_REQUIRE(m <= 1, "sample {:016x}: a loss mask value of {}, expected 0 or 1", s.id, m);
    h.n_mask += m;
  }

  std::vector<BlockEntry> table;
  BlockEncoder encoder(format.codec);
  out.reserve(out.size() + static_cast<size_t>(T * E * format.n_parts * (format.codec == StoreCodec::fp8 ? 1 : 2)));
  for (int64_t r = 0; r < T; r += R) {
    for (int p = 0; p < format.n_parts; ++p) {
      const size_t at = out.size();
      const bf16* src = s.states + r * s.row_stride + p * E;
      const BlockCoding coding = encoder.encode(src, std::min(R, T - r), E, s.row_stride, out);
      table.push_back({static_cast<uint32_t>(out.size() - at), crc32c(std::span(out).subspan(at)), coding});
    }
  }
  pad8(out);
  h.record_bytes = out.size();

  std::byte* entry = out.data() + h.table_offset();
  for (const BlockEntry& b : table) {
    std::memcpy(entry, &b.stored_bytes, 4);
    std::memcpy(entry + 4, &b.crc, 4);
    std::memcpy(entry + 8, &b.coding, 4);
    entry += kBlockEntryBytes;
  }
  h.rows_crc = crc32c({out.data() + h.header_bytes, h.rows_bytes()});
  h.table_crc = crc32c({out.data() + h.table_offset(), h.table_bytes()});
  pack_record_header(h, format, out.data());
}

uint64_t content_id(std::span<const int32_t> token_ids, std::span<const uint8_t> loss_mask) {
  std::vector<std::byte> bytes(token_ids.size_bytes() + loss_mask.size());
  if (!token_ids.empty()) std::memcpy(bytes.data(), token_ids.data(), token_ids.size_bytes());
  if (!loss_mask.empty()) std::memcpy(bytes.data() + token_ids.size_bytes(), loss_mask.data(), loss_mask.size());
  const std::string hex = sha256_hex(bytes);
  uint64_t id = 0;
  for (int i = 7; i >= 0; --i) id = id << 8 | std::stoul(hex.substr(static_cast<size_t>(2 * i), 2), nullptr, 16);
  return id;
}

}  // namespace dspark::formats
