// manifest.json and progress.json: the summary of a store. The shards alone hold the data; a summary says whether the
// store was finished, how much it held then, and up to which byte of each shard that is known to be on disk.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "core/files.h"
#include "formats/sample_source.h"

namespace dspark::formats {

inline constexpr const char* kManifestName = "manifest.json";
inline constexpr const char* kProgressName = "progress.json";

struct StoreSummary {
  bool complete = false;
  std::string identity_text;
  uint64_t samples = 0, tokens = 0, mask_tokens = 0, record_bytes = 0;
  std::map<uint32_t, uint64_t> shard_bytes;  // shard index -> bytes known to be on disk
};

void write_summary(const fs::path& path, const StoreSummary& summary);
// Reads manifest.json, else progress.json. Nothing when neither is there or usable (damage is added to `problems`).
// A newer major version, or a manifest of something else, throws.
std::optional<StoreSummary> read_summary(const fs::path& folder, std::vector<StoreProblem>& problems);

// What a store's folder says about its identity before any record is read.
struct StoreFacts {
  std::optional<StoreSummary> summary;
  std::string identity_text;               // "" when nothing in the folder says it
  uint64_t vouched(uint32_t shard) const;  // bytes of it known to be on disk
};
// Throws when two shards belong to different stores.
StoreFacts read_facts(const fs::path& folder, const std::vector<uint32_t>& shards, std::vector<StoreProblem>& problems);

}  // namespace dspark::formats
