#include "formats/deepspec_cache.h"

#include <cstring>
#include <map>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/json.h"

namespace dspark::formats {
namespace {

constexpr uint64_t kIndexRecordBytes = 56;

template <typename T>
T get(const std::byte* p) {
  T v;
  std::memcpy(&v, p, sizeof(T));
  return v;
}

void expect(const Json& j, const char* key, const Json& value, const fs::path& path) {
  DS_REQUIRE(j.contains(key) && j[key] == value, "{}: {} is {}, this dspark reads {}", path.string(), key,
             j.contains(key) ? j[key].dump() : "missing", value.dump());
}

}  // namespace

bool is_deepspec_cache(const fs::path& folder) {
  return fs::exists(folder / "samples.idx") && fs::exists(folder / "manifest.json");
}

DeepSpecCache::DeepSpecCache(const fs::path& folder) : folder_(folder) {
  const fs::path manifest_path = folder / "manifest.json";
  const Json j = read_json(manifest_path);
  DS_REQUIRE(j.is_object(), "{}: not a JSON object", manifest_path.string());
  expect(j, "version", 2, manifest_path);
  expect(j, "hidden_dtype", "bfloat16", manifest_path);
  expect(j, "token_dtype", "int32", manifest_path);
  expect(j, "mask_dtype", "uint8", manifest_path);
  expect(j, "index_record_size", kIndexRecordBytes, manifest_path);

  uint64_t n_samples = 0, n_shards = 0;
  std::map<uint32_t, uint32_t> shard_of_id;
  try {
    identity_.target = j.value("target_model_name_or_path", std::string());
    identity_.hidden_size = j.at("hidden_size").get<int64_t>();
    for (int id : j.at("target_layer_ids").get<std::vector<int>>()) identity_.taps.push_back(id + 1);
    n_samples = j.at("num_samples").get<uint64_t>();
    n_shards = j.at("num_shards").get<uint64_t>();
    for (const Json& shard : j.at("shards")) {
      const std::string name = shard.at("file_name").get<std::string>();
      DS_REQUIRE(!name.empty() && name.find('/') == std::string::npos && name != "..",
                 "{}: shard file name '{}' leaves the folder", manifest_path.string(), name);
      const auto [it, added] =
          shard_of_id.emplace(shard.at("shard_id").get<uint32_t>(), static_cast<uint32_t>(shards_.size()));
      DS_REQUIRE(added, "{}: shard id {} is there twice", manifest_path.string(), it->first);
      shards_.emplace_back(folder / name);
    }
  } catch (const Json::exception& e) {
    fail("{}: not a target cache manifest: {}", manifest_path.string(), json_error(e));
  }
  identity_.last_state = LastState::post_norm;
  identity_.codec = StoreCodec::raw;
  check_identity(identity_, manifest_path.string());
  DS_REQUIRE(shards_.size() == n_shards, "{}: {} shards listed, num_shards says {}", manifest_path.string(),
             shards_.size(), n_shards);

  const MappedFile index(folder / "samples.idx");
  DS_REQUIRE(index.size() % kIndexRecordBytes == 0 && index.size() / kIndexRecordBytes == n_samples,
             "{}: {} bytes, expected {} records of {}", index.path().string(), index.size(), n_samples,
             kIndexRecordBytes);
  const uint64_t E = static_cast<uint64_t>(identity_.hidden_size), L = identity_.taps.size();
  for (uint64_t i = 0; i < n_samples; ++i) {
    const std::byte* r = index.bytes().data() + i * kIndexRecordBytes;
    const uint32_t shard_id = get<uint32_t>(r + 8);
    const uint64_t S = get<uint32_t>(r + 12);
    const auto it = shard_of_id.find(shard_id);
    DS_REQUIRE(it != shard_of_id.end(), "{}: record {} names shard {}, which the manifest does not list",
               index.path().string(), i, shard_id);
    DS_REQUIRE(S > 0, "{}: record {} has no tokens", index.path().string(), i);
    const MappedFile& shard = shards_[it->second];
    const auto range = [&](int field, uint64_t bytes, const char* what) {
      const uint64_t offset = get<uint64_t>(r + 16 + 8 * field);
      shard.slice(offset, bytes, fmt::format("{} of sample {}", what, i));
      return offset;
    };
    const Place place{it->second, range(0, S * 4, "input_ids"), range(2, S, "loss_mask"),
                      range(3, S * L * E * 2, "target_hidden_states"),
                      range(4, S * E * 2, "target_last_hidden_states")};
    const auto* attention = reinterpret_cast<const uint8_t*>(at(it->second, range(1, S, "attention_mask")));
    const auto* mask = reinterpret_cast<const uint8_t*>(at(it->second, place.loss_mask));
    SampleInfo info;
    info.id = info.conversation = get<uint64_t>(r);
    info.n_tokens = static_cast<int64_t>(S);
    info.stored_bytes = S * (6 + (L + 1) * E * 2) + kIndexRecordBytes;
    for (uint64_t t = 0; t < S; ++t) {
      DS_REQUIRE(attention[t] == 1,
                 "{}: sample {} hides token {} from attention (attention_mask {}): padded samples are not read",
                 folder.string(), i, t, attention[t]);
      DS_REQUIRE(mask[t] <= 1, "{}: sample {} has a loss_mask of {} at token {}, expected 0 or 1", folder.string(), i,
                 mask[t], t);
      info.n_mask += mask[t];
    }
    infos_.push_back(info);
    places_.push_back(place);
  }
}

const SampleInfo& DeepSpecCache::info(int64_t i) const {
  DS_ASSERT(i >= 0 && i < size(), "sample {} of {}", i, size());
  return infos_[static_cast<size_t>(i)];
}

SampleTokens DeepSpecCache::tokens(int64_t i) const {
  const size_t S = static_cast<size_t>(info(i).n_tokens);
  const Place& p = places_[static_cast<size_t>(i)];
  SampleTokens out;
  out.token_ids.resize(S);
  std::memcpy(out.token_ids.data(), at(p.shard, p.ids), S * 4);
  const auto* mask = reinterpret_cast<const uint8_t*>(at(p.shard, p.loss_mask));
  out.loss_mask.assign(mask, mask + S);
  return out;
}

void DeepSpecCache::read_states(int64_t i, bf16* dst, int64_t row_stride, RowRange rows,
                                std::span<const int> parts) const {
  const StateSelection sel = select_states(*this, i, row_stride, rows, parts);
  const Place& place = places_[static_cast<size_t>(i)];
  const uint64_t E = static_cast<uint64_t>(identity_.hidden_size), L = identity_.taps.size();
  for (int64_t r = sel.begin; r < sel.end; ++r) {
    bf16* out = dst + (r - sel.begin) * row_stride;
    for (int part : sel.parts) {
      const uint64_t row = static_cast<uint64_t>(r), p = static_cast<uint64_t>(part);
      const uint64_t offset = p < L ? place.taps + (row * L + p) * E * 2 : place.last + row * E * 2;
      std::memcpy(out, at(place.shard, offset), E * 2);
      out += E;
    }
  }
}

std::string DeepSpecCache::check(int64_t) const { return ""; }  // everything checkable was checked when opening

}  // namespace dspark::formats
