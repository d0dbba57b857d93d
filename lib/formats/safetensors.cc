#include "formats/safetensors.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <tuple>
#include <utility>

#include "core/error.h"
#include "core/json.h"

namespace dspark::formats {
namespace {

constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // the limit of the reference reader

uint64_t little_endian_u64(std::span<const std::byte> bytes) {
  uint64_t v = 0;
  for (size_t i = 8; i-- > 0;) v = (v << 8) | std::to_integer<uint64_t>(bytes[i]);
  return v;
}

// The header as JSON. A second entry of one name would silently replace the first one, so names are watched as they
// come.
Json parse_header(std::string_view text, const std::string& path) {
  std::set<std::string> names, fields;
  const auto watch = [&](int depth, Json::parse_event_t event, Json& parsed) {
    if (event != Json::parse_event_t::key || depth > 2) return true;
    const auto& key = parsed.get_ref<const std::string&>();
    if (depth == 1) fields.clear();
    DS_REQUIRE((depth == 1 ? names : fields).insert(key).second, "{}: the header names '{}' twice", path, key);
    return true;
  };
  try {
    return Json::parse(text, watch);
  } catch (const Json::exception& e) {
    fail("{}: the header is not valid JSON: {}", path, json_error(e));
  }
}

uint64_t unsigned_number(const Json& value, const std::string& where) {
  DS_REQUIRE(value.is_number_unsigned(), "{}: expected a non-negative integer, found {}", where,
             value.dump(-1, ' ', false, Json::error_handler_t::replace));
  return value.get<uint64_t>();
}

struct Entry {
  TensorView view;
  uint64_t begin, end;
};

Entry parse_entry(const std::string& name, const Json& value, const std::string& path) {
  const std::string where = fmt::format("{}: tensor '{}'", path, name);
  DS_REQUIRE(value.is_object(), "{}: its header entry is not an object", where);
  const auto field = [&](const char* key, Json::value_t type, const char* what) -> const Json& {
    const auto it = value.find(key);
    DS_REQUIRE(it != value.end(), "{}: '{}' is missing from its header entry", where, key);
    DS_REQUIRE(it->type() == type, "{}: '{}' is not {}", where, key, what);
    return *it;
  };
  Entry e;
  e.view.name = name;
  const auto& type = field("dtype", Json::value_t::string, "a string").get_ref<const std::string&>();
  try {
    e.view.dtype = dtype_from_name(type);
  } catch (const Error& error) {
    fail("{}: {}", where, error.what());
  }
  for (const Json& dim : field("shape", Json::value_t::array, "an array")) {
    const uint64_t n = unsigned_number(dim, where + ", shape");
    DS_REQUIRE(n <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max()), "{}: dimension {} is too large", where,
               n);
    e.view.shape.push_back(static_cast<int64_t>(n));
  }
  const Json& offsets = field("data_offsets", Json::value_t::array, "an array");
  DS_REQUIRE(offsets.size() == 2, "{}: data_offsets has {} numbers, expected 2", where, offsets.size());
  e.begin = unsigned_number(offsets[0], where + ", data_offsets");
  e.end = unsigned_number(offsets[1], where + ", data_offsets");
  DS_REQUIRE(e.begin <= e.end, "{}: data_offsets [{}, {}] run backwards", where, e.begin, e.end);
  const auto count = static_cast<unsigned __int128>(shape_count(e.view.shape, where));
  const auto expected = count * static_cast<unsigned __int128>(dtype_bytes(e.view.dtype));
  DS_REQUIRE(expected == e.end - e.begin, "{}: {} of {} does not fill its data_offsets [{}, {}]", where, type,
             shape_text(e.view.shape), e.begin, e.end);
  return e;
}

}  // namespace

int64_t shape_count(const std::vector<int64_t>& shape, std::string_view where) {
  int64_t count = 1;
  for (int64_t d : shape)
    DS_REQUIRE(d >= 0 && !__builtin_mul_overflow(count, d, &count), "{}: the shape {} has no valid number of elements",
               where, shape_text(shape));
  return count;
}

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += fmt::format("{}{}", i ? ", " : "", shape[i]);
  return text + "]";
}

SafetensorsFile::SafetensorsFile(const fs::path& path) : file_(path) {
  const std::string where = path.string();
  const uint64_t header_bytes = little_endian_u64(file_.slice(0, 8, "the safetensors header length"));
  DS_REQUIRE(header_bytes <= kMaxHeaderBytes, "{}: the header claims {} bytes (limit {}): not a safetensors file?",
             where, header_bytes, kMaxHeaderBytes);
  const auto header = file_.slice(8, header_bytes, "the safetensors header");
  const uint64_t data_begin = 8 + header_bytes, data_bytes = file_.size() - data_begin;
  const Json json = parse_header({reinterpret_cast<const char*>(header.data()), header.size()}, where);
  DS_REQUIRE(json.is_object(), "{}: the header is not a JSON object", where);

  std::vector<Entry> entries;
  for (const auto& [name, value] : json.items()) {
    if (name != "__metadata__") {
      entries.push_back(parse_entry(name, value, where));
      continue;
    }
    DS_REQUIRE(value.is_object(), "{}: __metadata__ is not an object", where);
    for (const auto& [key, text] : value.items()) {
      DS_REQUIRE(text.is_string(), "{}: __metadata__ '{}' is not a string", where, key);
      metadata_[key] = text.get<std::string>();
    }
  }
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
    return std::tie(a.begin, a.end, a.view.name) < std::tie(b.begin, b.end, b.view.name);
  });
  uint64_t next = 0;
  for (Entry& e : entries) {
    DS_REQUIRE(e.begin == next, "{}: tensor '{}' starts at data offset {}, {}; tensors must follow one another from {}",
               where, e.view.name, e.begin, e.begin < next ? "inside another tensor" : "after a hole", next);
    DS_REQUIRE(e.end <= data_bytes,
               "{}: tensor '{}' ends at data offset {} but the file holds {} bytes of data: it is cut off", where,
               e.view.name, e.end, data_bytes);
    next = e.end;
    e.view.data = file_.slice(data_begin + e.begin, e.end - e.begin, e.view.name);
    index_[e.view.name] = tensors_.size();
    tensors_.push_back(std::move(e.view));
  }
  DS_REQUIRE(next == data_bytes, "{}: {} bytes of data follow the last tensor: the file is damaged", where,
             data_bytes - next);
}

const TensorView* SafetensorsFile::find(std::string_view name) const {
  const auto it = index_.find(name);
  return it == index_.end() ? nullptr : &tensors_[it->second];
}

const TensorView& SafetensorsFile::get(std::string_view name) const {
  const TensorView* t = find(name);
  DS_REQUIRE(t, "{}: tensor '{}' is missing", path().string(), name);
  return *t;
}

const TensorView& SafetensorsFile::get(std::string_view name, const std::vector<int64_t>& shape) const {
  const TensorView& t = get(name);
  DS_REQUIRE(t.shape == shape, "{}: tensor '{}' has shape {}, expected {}", path().string(), name, shape_text(t.shape),
             shape_text(shape));
  return t;
}

SafetensorsSet SafetensorsSet::open(const fs::path& path) {
  SafetensorsSet set(path);
  std::error_code ec;  // a path that cannot be looked at is reported by opening it
  const bool folder = fs::is_directory(path, ec);
  const fs::path index_path = folder ? path / "model.safetensors.index.json" : path;
  if (index_path.extension() == ".json" && fs::exists(index_path, ec)) {
    set.open_shards(index_path);
    return set;
  }
  const fs::path single = folder ? path / "model.safetensors" : path;
  DS_REQUIRE(!folder || fs::exists(single, ec), "{} holds neither model.safetensors nor model.safetensors.index.json",
             path.string());
  set.files_.emplace_back(single);
  for (const TensorView& t : set.files_[0].tensors()) set.index_[t.name] = &t;
  return set;
}

void SafetensorsSet::open_shards(const fs::path& index_path) {
  const std::string where = index_path.string();
  const Json json = read_json(index_path);
  const auto map = json.is_object() ? json.find("weight_map") : json.end();
  DS_REQUIRE(json.is_object() && map != json.end() && map->is_object() && !map->empty(),
             "{}: there is no 'weight_map' object", where);
  std::map<std::string, size_t> shards;
  for (const auto& [name, shard] : map->items()) {
    DS_REQUIRE(shard.is_string(), "{}: the shard of '{}' is not a string", where, name);
    const auto& file = shard.get_ref<const std::string&>();
    // A shard lies beside its index: a downloaded file must not make us read elsewhere.
    DS_REQUIRE(
        !file.empty() && file.find('/') == std::string::npos && file != ".." && file.find('\0') == std::string::npos,
        "{}: the shard '{}' of '{}' is not a plain file name", where, file, name);
    shards.emplace(file, 0);
  }
  files_.reserve(shards.size());
  for (auto& [file, idx] : shards) {
    idx = files_.size();
    files_.emplace_back(index_path.parent_path() / file);
  }
  for (const auto& [name, shard] : map->items()) index_[name] = &files_[shards.at(shard.get<std::string>())].get(name);
  // Tensors that the index forgot are still there, as for other readers; twice without an index entry is ambiguous.
  for (const SafetensorsFile& file : files_)
    for (const TensorView& t : file.tensors()) {
      const auto [it, added] = index_.emplace(t.name, &t);
      DS_REQUIRE(added || it->second == &t || map->contains(t.name),
                 "{}: tensor '{}' is in two shards and not in the index", where, t.name);
    }
}

std::vector<std::string> SafetensorsSet::names() const {
  std::vector<std::string> names;
  for (const auto& [name, tensor] : index_) names.push_back(name);
  return names;
}

const TensorView* SafetensorsSet::find(std::string_view name) const {
  const auto it = index_.find(name);
  return it == index_.end() ? nullptr : it->second;
}

const TensorView& SafetensorsSet::get(std::string_view name) const {
  const TensorView* t = find(name);
  DS_REQUIRE(t, "{}: tensor '{}' is missing", path_.string(), name);
  return *t;
}

const TensorView& SafetensorsSet::get(std::string_view name, const std::vector<int64_t>& shape) const {
  const TensorView& t = get(name);
  DS_REQUIRE(t.shape == shape, "{}: tensor '{}' has shape {}, expected {}", path_.string(), name, shape_text(t.shape),
             shape_text(shape));
  return t;
}

}  // namespace dspark::formats
