#include "formats/store_manifest.h"

#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/hash.h"
#include "core/json.h"
#include "formats/store_layout.h"

namespace dspark::formats {
namespace {

constexpr const char* kFormatName = "dspark-store";

std::optional<StoreSummary> read_one(const fs::path& path, std::vector<StoreProblem>& problems) {
  const std::string name = path.filename().string();
  if (!fs::exists(path)) return std::nullopt;
  const auto damaged = [&](std::string_view why) {
    problems.push_back({name, 0, fmt::format("not usable ({}); the shards were scanned instead", why)});
    return std::nullopt;
  };
  Json j = Json::parse(read_text(path), nullptr, false);
  if (!j.is_object()) return damaged("not JSON");
  const std::string format = j.value("format", Json()).is_string() ? j["format"].get<std::string>() : "";
  try {
    const Json crc = j.value("crc32c", Json());
    j.erase("crc32c");
    if (!crc.is_string() || crc.get<std::string>() != json_checksum(j)) return damaged("its checksum is wrong");
    DS_REQUIRE(format == kFormatName, "{} is a manifest of something else: format '{}'", path.string(), format);
    const auto version = j.at("version").get<std::vector<int>>();
    DS_REQUIRE(
        !version.empty() && version[0] == kStoreMajor,
        "{} is of a hidden-state store of version {}; this dspark reads version {}: use the dspark that wrote it",
        path.string(), version.empty() ? 0 : version[0], kStoreMajor);
    StoreSummary s;
    s.complete = j.at("complete").get<bool>();
    s.identity_text = j.at("identity").dump(-1, ' ', false, Json::error_handler_t::replace);
    s.identity_text.resize((s.identity_text.size() + 7) / 8 * 8, ' ');
    s.samples = j.at("samples").get<uint64_t>();
    s.tokens = j.at("tokens").get<uint64_t>();
    s.mask_tokens = j.at("loss_tokens").get<uint64_t>();
    s.record_bytes = j.at("record_bytes").get<uint64_t>();
    for (const Json& shard : j.at("shards"))
      s.shard_bytes[shard.at("index").get<uint32_t>()] = shard.at("bytes").get<uint64_t>();
    return s;
  } catch (const Json::exception& e) {
    return damaged(json_error(e));
  }
}

}  // namespace

void write_summary(const fs::path& path, const StoreSummary& s) {
  Json j;
  j["format"] = kFormatName;
  j["version"] = {kStoreMajor, kStoreMinor};
  j["complete"] = s.complete;
  j["identity"] = parse_json(s.identity_text, "the store's identity");
  j["samples"] = s.samples;
  j["tokens"] = s.tokens;
  j["loss_tokens"] = s.mask_tokens;
  j["record_bytes"] = s.record_bytes;
  j["shards"] = Json::array();
  for (const auto& [index, bytes] : s.shard_bytes)
    j["shards"].push_back({{"index", index}, {"file", shard_name(index)}, {"bytes", bytes}});
  j["crc32c"] = json_checksum(j);
  write_text_atomic(path, j.dump(1) + "\n");
}

std::optional<StoreSummary> read_summary(const fs::path& folder, std::vector<StoreProblem>& problems) {
  if (auto s = read_one(folder / kManifestName, problems)) return s;
  auto s = read_one(folder / kProgressName, problems);
  if (s) s->complete = false;  // it may be a manifest that was taken back because more is being appended
  return s;
}

uint64_t StoreFacts::vouched(uint32_t shard) const {
  if (!summary) return 0;
  const auto it = summary->shard_bytes.find(shard);
  return it == summary->shard_bytes.end() ? 0 : it->second;
}

StoreFacts read_facts(const fs::path& folder, const std::vector<uint32_t>& shards,
                      std::vector<StoreProblem>& problems) {
  StoreFacts facts;
  facts.summary = read_summary(folder, problems);
  if (facts.summary) facts.identity_text = facts.summary->identity_text;
  std::string said_by = kManifestName;
  for (uint32_t index : shards) {
    const std::string name = shard_name(index);
    const MappedFile file(folder / name);
    std::string why;
    const auto header = parse_shard_header(file.bytes(), (folder / name).string(), why);
    if (!header) {
      problems.push_back({name, 0, why});
      continue;
    }
    if (facts.identity_text.empty()) {
      facts.identity_text = header->identity_text;
      said_by = name;
    }
    if (header->identity_text == facts.identity_text) continue;
    const std::string difference =
        identity_difference(parse_identity(facts.identity_text, said_by), parse_identity(header->identity_text, name));
    fail("{}: {} and {} are of different stores ({})", folder.string(), said_by, name,
         difference.empty() ? "their identities are spelled differently" : difference);
  }
  return facts;
}

}  // namespace dspark::formats
