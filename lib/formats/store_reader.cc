#include <algorithm>
#include <cstring>

#include "core/error.h"
#include "core/hash.h"
#include "formats/store.h"
#include "formats/store_manifest.h"

namespace dspark::formats {

bool is_store(const fs::path& folder) {
  if (!list_shards(folder).empty()) return true;
  std::vector<StoreProblem> ignored;
  try {
    return read_summary(folder, ignored).has_value();
  } catch (const Error&) {
    return false;  // a manifest of something else
  }
}

StoreReader::StoreReader(const fs::path& folder) : folder_(folder) {
  const std::vector<uint32_t> shards = list_shards(folder);
  const StoreFacts facts = read_facts(folder, shards, problems_);
  if (facts.identity_text.empty()) {
    fail("{}: no shard header and no manifest can be read, so nothing says which target the states are of{}{}",
         folder.string(), problems_.empty() ? "" : ": ", problems_.empty() ? "" : problems_[0].text());
  }
  identity_ = parse_identity(facts.identity_text, folder.string());
  format_ = record_format(identity_, facts.identity_text);
  complete_ = facts.summary && facts.summary->complete;

  for (uint32_t index : shards) {
    const std::string name = shard_name(index);
    shards_.emplace_back(folder / name);
    names_.push_back(name);
    const auto bytes = shards_.back().bytes();
    std::string why;
    const auto header = parse_shard_header(bytes, name, why);  // a damaged one was reported by read_facts
    if (header && header->index != index)
      problems_.push_back({name, 0, fmt::format("the header says this is {}", shard_name(header->index))});
    const uint64_t vouched = facts.vouched(index);
    if (bytes.size() < vouched)
      problems_.push_back({name, bytes.size(), fmt::format("the file is cut off: it had {} bytes", vouched)});
    const size_t before = problems_.size();
    const ShardScan scan = scan_records(
        bytes, name, header ? header->header_bytes : 0, vouched, format_,
        [&](uint64_t offset, const RecordHeader& h) {
          infos_.push_back({h.id, h.n_tokens, h.n_mask, h.finish, h.record_bytes, h.conversation});
          places_.push_back({static_cast<uint32_t>(shards_.size() - 1), offset, h});
        },
        problems_);
    // An unfinished store may end in a record that was being written, or in a shard that was being made.
    if (complete_ || index != shards.back() || bytes.size() < vouched) continue;
    for (size_t i = before; i < problems_.size(); ++i) problems_[i].tail = problems_[i].offset >= std::max(scan.end, vouched);
    const bool being_made = !header && vouched == 0 && bytes.size() < kShardHeaderBytes + facts.identity_text.size();
    for (StoreProblem& p : problems_) p.tail |= being_made && p.file == name;
  }
  if (!facts.summary) return;
  for (const auto& [index, bytes] : facts.summary->shard_bytes)
    if (!std::binary_search(shards.begin(), shards.end(), index))
      problems_.push_back({shard_name(index), 0, "the file is missing"});
  if (infos_.size() < facts.summary->samples)
    problems_.push_back(
        {complete_ ? kManifestName : kProgressName, 0,
         fmt::format("{} samples were stored, {} are readable", facts.summary->samples, infos_.size())});
}

const SampleInfo& StoreReader::info(int64_t i) const {
  DS_ASSERT(i >= 0 && i < size(), "sample {} of {}", i, size());
  return infos_[static_cast<size_t>(i)];
}

uint64_t StoreReader::file_bytes() const {
  uint64_t total = 0;
  for (const MappedFile& f : shards_) total += f.size();
  return total;
}

const std::string& StoreReader::shard_of(int64_t i) const {
  DS_ASSERT(i >= 0 && i < size(), "sample {} of {}", i, size());
  return names_[places_[static_cast<size_t>(i)].shard];
}

uint64_t StoreReader::offset_of(int64_t i) const {
  DS_ASSERT(i >= 0 && i < size(), "sample {} of {}", i, size());
  return places_[static_cast<size_t>(i)].offset;
}

std::span<const std::byte> StoreReader::record(int64_t i) const {
  DS_ASSERT(i >= 0 && i < size(), "sample {} of {}", i, size());
  const Place& p = places_[static_cast<size_t>(i)];
  return shards_[p.shard].slice(p.offset, p.header.record_bytes, "a record");
}

void StoreReader::damaged(int64_t i, const std::string& why) const {
  fail(
      "{}: sample {} ({} at {}): {}; `dspark extract --verify {}` lists all damage, `--merge {} --out NEW` keeps what "
      "is "
      "whole, and the extract run again on NEW fills the gaps",
      folder_.string(), i, shard_of(i), offset_of(i), why, folder_.string(), folder_.string());
}

SampleTokens StoreReader::tokens(int64_t i) const {
  const auto bytes = record(i);
  const RecordHeader& h = places_[static_cast<size_t>(i)].header;
  if (const std::string why = check_rows(bytes, h); !why.empty()) damaged(i, why);
  SampleTokens out;
  out.token_ids.resize(h.n_tokens);
  out.loss_mask.resize(h.n_tokens);
  std::memcpy(out.token_ids.data(), bytes.data() + h.header_bytes, out.token_ids.size() * 4);
  std::memcpy(out.loss_mask.data(), bytes.data() + h.header_bytes + out.token_ids.size() * 4, out.loss_mask.size());
  return out;
}

void StoreReader::read_states(int64_t i, bf16* dst, int64_t row_stride, RowRange rows,
                              std::span<const int> parts) const {
  const StateSelection sel = select_states(*this, i, row_stride, rows, parts);
  const auto bytes = record(i);
  const RecordHeader& h = places_[static_cast<size_t>(i)].header;
  std::vector<BlockEntry> table;
  if (const std::string why = read_block_table(bytes, h, table); !why.empty()) damaged(i, why);
  std::vector<uint64_t> offsets(table.size());
  uint64_t at = h.blocks_offset();
  for (size_t b = 0; b < table.size(); ++b) {
    offsets[b] = at;
    at += table[b].stored_bytes;
  }
  const int64_t R = h.rows_per_block, T = h.n_tokens, E = identity_.hidden_size;
  BlockDecoder decoder;
  for (int64_t chunk = sel.begin / R; chunk * R < sel.end; ++chunk) {
    const int64_t first = chunk * R, n_rows = std::min(R, T - first);
    const int64_t begin = std::max(sel.begin, first), end = std::min(sel.end, first + n_rows);
    for (size_t p = 0; p < sel.parts.size(); ++p) {
      const size_t b = static_cast<size_t>(chunk * identity_.n_parts() + sel.parts[p]);
      const auto block = bytes.subspan(offsets[b], table[b].stored_bytes);
      std::string why = crc32c(block) == table[b].crc ? "" : "its checksum is wrong";
      if (why.empty())
        why = decoder.decode(block, table[b].coding, n_rows, E, begin - first, end - first,
                             dst + (begin - sel.begin) * row_stride + static_cast<int64_t>(p) * E, row_stride);
      if (!why.empty()) damaged(i, fmt::format("block {} of {}: {}", b, table.size(), why));
    }
  }
}

std::string StoreReader::check(int64_t i) const {
  return check_record(record(i), places_[static_cast<size_t>(i)].header);
}

}  // namespace dspark::formats
