#include "formats/gguf.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <utility>

#include "core/error.h"
#include "core/log.h"
#include "formats/safetensors.h"  // shape_text

namespace dspark::formats {
namespace {

constexpr uint32_t kMaxDims = 4;           // GGML_MAX_DIMS
constexpr uint64_t kMaxNameBytes = 65535;  // the format's limit for keys
constexpr uint64_t kMaxAlignment = 1 << 20;

// Bytes of one element; 0 for strings and arrays.
uint64_t scalar_bytes(GgufType type) {
  switch (type) {
    case GgufType::u8:
    case GgufType::i8:
    case GgufType::boolean:
      return 1;
    case GgufType::u16:
    case GgufType::i16:
      return 2;
    case GgufType::u32:
    case GgufType::i32:
    case GgufType::f32:
      return 4;
    case GgufType::u64:
    case GgufType::i64:
    case GgufType::f64:
      return 8;
    case GgufType::string:
    case GgufType::array:
      return 0;
  }
  return 0;
}

template <typename T>
T load(std::span<const std::byte> bytes, uint64_t idx) {
  T v;
  std::memcpy(&v, bytes.data() + idx * sizeof(T), sizeof(T));
  return v;
}

std::string_view text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// A name from a file inside a message: no pages of text.
std::string shown(std::string_view name) { return printable(name, 80); }

}  // namespace

// Walks the file once from front to back. `where_` says what is being read; every complaint carries it and the offset.
class GgufParser {
 public:
  explicit GgufParser(Gguf& gguf) : gguf_(gguf), file_(gguf.file_) {}

  void parse() {
    where_ = "the GGUF header";
    const std::string_view magic = text_of(take(4));
    DS_REQUIRE(magic == "GGUF", "{}: not a GGUF file (it does not start with 'GGUF')", path());
    gguf_.version_ = number<uint32_t>();
    if (gguf_.version_ == 2u << 24 || gguf_.version_ == 3u << 24)
      fail("{}: a big-endian GGUF file; convert it to little-endian (gguf-convert-endian of the gguf package)", path());
    DS_REQUIRE(gguf_.version_ == 2 || gguf_.version_ == 3, "{}: GGUF version {} is not supported (2 and 3 are)", path(),
               gguf_.version_);
    const auto n_tensors = number<uint64_t>(), n_keys = number<uint64_t>();
    // The smallest entry: length, type and a one-byte value; length, dimension count, type, offset.
    bound(n_keys, 13, "metadata keys");
    bound(n_tensors, 24, "tensors");
    for (uint64_t i = 0; i < n_keys; ++i) parse_key(i);
    parse_alignment();
    std::vector<uint64_t> offsets;
    for (uint64_t i = 0; i < n_tensors; ++i) offsets.push_back(parse_tensor(i));
    place_tensors(offsets);
  }

 private:
  std::string path() const { return file_.path().string(); }

  template <typename... Args>
  [[noreturn]] void complain(uint64_t at, fmt::format_string<Args...> format, Args&&... args) const {
    fail("{}: {} (at byte {}): {}", path(), where_, at, fmt::format(format, std::forward<Args>(args)...));
  }

  std::span<const std::byte> take(uint64_t n) {
    const auto bytes = file_.slice(at_, n, where_);
    at_ += n;
    return bytes;
  }

  template <typename T>
  T number() {
    return load<T>(take(sizeof(T)), 0);
  }

  std::string_view string() {
    const uint64_t start = at_, n = number<uint64_t>();
    if (n > file_.size() - at_)
      complain(start, "a string of {} bytes does not fit into the file's {}", n, file_.size());
    return text_of(take(n));
  }

  // `n` entries of at least `each` bytes must fit into the rest of the file.
  void bound(uint64_t n, uint64_t each, const char* what) const {
    if (n > (file_.size() - at_) / each)
      complain(at_, "{} {} do not fit into the file's {} bytes", n, what, file_.size());
  }

  std::string name(const char* what, uint64_t idx) {
    where_ = fmt::format("{} {}", what, idx);
    const uint64_t start = at_;
    const std::string_view text = string();
    if (text.empty() || text.size() > kMaxNameBytes) complain(start, "its name has {} bytes", text.size());
    where_ = fmt::format("{} '{}'", what, shown(text));
    return std::string(text);
  }

  GgufType value_type() {
    const uint64_t start = at_;
    const auto type = number<uint32_t>();
    if (type > static_cast<uint32_t>(GgufType::f64)) complain(start, "value type {} is unknown", type);
    return static_cast<GgufType>(type);
  }

  void parse_key(uint64_t idx) {
    const uint64_t start = at_;
    const std::string key = name("metadata key", idx);
    Gguf::Value v{};
    v.type = value_type();
    v.count = 1;
    if (v.type == GgufType::array) {
      v.array = true;
      v.type = value_type();
      if (v.type == GgufType::array) complain(at_, "arrays inside arrays are not supported");
      v.count = number<uint64_t>();
      bound(v.count, std::max<uint64_t>(scalar_bytes(v.type), v.type == GgufType::string ? 8 : 1), "elements");
    }
    v.offset = at_;
    if (v.type == GgufType::string) {
      for (uint64_t i = 0; i < v.count; ++i) string();
      v.payload = file_.bytes().subspan(v.offset, at_ - v.offset);
    } else {
      v.payload = take(v.count * scalar_bytes(v.type));
    }
    if (v.type == GgufType::boolean)
      for (uint64_t i = 0; i < v.count; ++i)
        if (const auto b = load<uint8_t>(v.payload, i); b > 1) complain(v.offset + i, "a bool holds {}", b);
    if (!gguf_.values_.emplace(key, v).second) complain(start, "the key is there twice");
    gguf_.keys_.push_back(key);
  }

  void parse_alignment() {
    const int64_t a = gguf_.integer("general.alignment", 32);
    DS_REQUIRE(a > 0 && static_cast<uint64_t>(a) <= kMaxAlignment && std::has_single_bit(static_cast<uint64_t>(a)),
               "{}: general.alignment is {}, expected a power of two up to {}", path(), a, kMaxAlignment);
    gguf_.alignment_ = static_cast<uint64_t>(a);
  }

  // Everything but the data, whose place is known only after the last tensor; returns its offset.
  uint64_t parse_tensor(uint64_t idx) {
    const uint64_t start = at_;
    GgufTensor t;
    t.name = name("tensor", idx);
    if (!gguf_.tensor_index_.emplace(t.name, idx).second) complain(start, "the tensor is there twice");
    const uint64_t dims_at = at_;
    const auto n_dims = number<uint32_t>();
    if (n_dims > kMaxDims) complain(dims_at, "it has {} dimensions (at most {})", n_dims, kMaxDims);
    int64_t count = 1;
    for (uint32_t d = 0; d < n_dims; ++d) {
      const auto n = number<uint64_t>();
      if (n == 0 || n > static_cast<uint64_t>(std::numeric_limits<int64_t>::max()) ||
          __builtin_mul_overflow(count, static_cast<int64_t>(n), &count))
        complain(dims_at, "dimension {} is {}: no valid number of elements", d, n);
      t.shape.insert(t.shape.begin(), static_cast<int64_t>(n));
    }
    const uint64_t type_at = at_;
    const auto type = number<uint32_t>();
    const GgmlTypeInfo* info = ggml_type_info(type);
    if (!info) complain(type_at, "tensor type {} is not supported", type);
    t.type = info->type;
    const int64_t row = t.shape.empty() ? 1 : t.shape.back();
    if (row % info->block_elements != 0)
      complain(dims_at, "rows of {} elements are not whole {} blocks of {}", row, info->name, info->block_elements);
    const int64_t blocks = count / info->block_elements;
    if (blocks > static_cast<int64_t>(file_.size()) / info->block_bytes)
      complain(dims_at, "its {} {} elements do not fit into the file's {} bytes: it is cut off", count, info->name,
               file_.size());
    bytes_.push_back(static_cast<uint64_t>(blocks * info->block_bytes));
    gguf_.tensors_.push_back(std::move(t));
    return number<uint64_t>();
  }

  void place_tensors(const std::vector<uint64_t>& offsets) {
    const uint64_t alignment = gguf_.alignment_, data_begin = (at_ + alignment - 1) / alignment * alignment;
    std::vector<std::pair<uint64_t, size_t>> order;
    for (size_t i = 0; i < offsets.size(); ++i) {
      where_ = fmt::format("tensor '{}'", shown(gguf_.tensors_[i].name));
      if (data_begin > file_.size() || offsets[i] > file_.size() - data_begin ||
          bytes_[i] > file_.size() - data_begin - offsets[i])
        complain(at_, "its {} bytes at data offset {} (data begins at {}) end beyond the file's {}: it is cut off",
                 bytes_[i], offsets[i], data_begin, file_.size());
      if (offsets[i] % alignment != 0)
        complain(at_, "its data offset {} is not a multiple of {}", offsets[i], alignment);
      gguf_.tensors_[i].data = file_.slice(data_begin + offsets[i], bytes_[i], where_);
      order.emplace_back(offsets[i], i);
    }
    std::sort(order.begin(), order.end());
    for (size_t k = 1; k < order.size(); ++k) {
      const auto [before, i] = order[k - 1];
      if (before + bytes_[i] > order[k].first)
        fail("{}: tensor '{}' at data offset {} overlaps tensor '{}'", path(),
             shown(gguf_.tensors_[order[k].second].name), order[k].first, shown(gguf_.tensors_[i].name));
    }
  }

  Gguf& gguf_;
  const MappedFile& file_;
  uint64_t at_ = 0;
  std::string where_;
  std::vector<uint64_t> bytes_;  // of every tensor
};

Gguf::Gguf(const fs::path& path) : file_(path) { GgufParser(*this).parse(); }

const Gguf::Value* Gguf::find_value(std::string_view key) const {
  const auto it = values_.find(key);
  return it == values_.end() ? nullptr : &it->second;
}

const Gguf::Value& Gguf::value(std::string_view key, bool array, const char* wanted) const {
  const Value* v = find_value(key);
  DS_REQUIRE(v, "{}: the metadata key '{}' is missing (expected {})", path().string(), key, wanted);
  if (v->array != array) wrong_type(key, *v, wanted);
  return *v;
}

void Gguf::wrong_type(std::string_view key, const Value& v, const char* wanted) const {
  fail("{}: the metadata key '{}' (at byte {}) is {}{}, expected {}", path().string(), key, v.offset,
       v.array ? "an array of " : "", gguf_type_name(v.type), wanted);
}

int64_t Gguf::integer_at(std::string_view key, const Value& v, uint64_t i) const {
  switch (v.type) {
    case GgufType::u8:
      return load<uint8_t>(v.payload, i);
    case GgufType::i8:
      return load<int8_t>(v.payload, i);
    case GgufType::u16:
      return load<uint16_t>(v.payload, i);
    case GgufType::i16:
      return load<int16_t>(v.payload, i);
    case GgufType::u32:
      return load<uint32_t>(v.payload, i);
    case GgufType::i32:
      return load<int32_t>(v.payload, i);
    case GgufType::i64:
      return load<int64_t>(v.payload, i);
    case GgufType::u64: {
      const auto n = load<uint64_t>(v.payload, i);
      DS_REQUIRE(n <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max()),
                 "{}: the metadata key '{}' is {}: too large", path().string(), key, n);
      return static_cast<int64_t>(n);
    }
    case GgufType::boolean:
      if (v.array) return load<uint8_t>(v.payload, i);
      break;
    default:
      break;
  }
  wrong_type(key, v, v.array ? "an array of integers" : "an integer");
}

double Gguf::number_at(std::string_view key, const Value& v, uint64_t i) const {
  if (v.type == GgufType::f32) return load<float>(v.payload, i);
  if (v.type == GgufType::f64) return load<double>(v.payload, i);
  if (v.type == GgufType::string || v.type == GgufType::boolean)
    wrong_type(key, v, v.array ? "an array of numbers" : "a number");
  return static_cast<double>(integer_at(key, v, i));
}

std::string_view Gguf::string(std::string_view key) const {
  const Value& v = value(key, false, "a string");
  if (v.type != GgufType::string) wrong_type(key, v, "a string");
  return text_of(v.payload.subspan(8));
}

int64_t Gguf::integer(std::string_view key) const { return integer_at(key, value(key, false, "an integer"), 0); }
double Gguf::number(std::string_view key) const { return number_at(key, value(key, false, "a number"), 0); }

bool Gguf::boolean(std::string_view key) const {
  const Value& v = value(key, false, "a bool");
  if (v.type != GgufType::boolean) wrong_type(key, v, "a bool");
  return load<uint8_t>(v.payload, 0) != 0;
}

std::string_view Gguf::string(std::string_view key, std::string_view fallback) const {
  return has(key) ? string(key) : fallback;
}
int64_t Gguf::integer(std::string_view key, int64_t fallback) const { return has(key) ? integer(key) : fallback; }
double Gguf::number(std::string_view key, double fallback) const { return has(key) ? number(key) : fallback; }
bool Gguf::boolean(std::string_view key, bool fallback) const { return has(key) ? boolean(key) : fallback; }

bool Gguf::is_array(std::string_view key) const {
  const Value* v = find_value(key);
  return v && v->array;
}

uint64_t Gguf::array_size(std::string_view key) const { return value(key, true, "an array").count; }

std::vector<std::string_view> Gguf::strings(std::string_view key) const {
  const Value& v = value(key, true, "an array of strings");
  if (v.type != GgufType::string) wrong_type(key, v, "an array of strings");
  std::vector<std::string_view> out;
  out.reserve(v.count);
  auto rest = v.payload;  // lengths were checked when the file was opened
  for (uint64_t i = 0; i < v.count; ++i) {
    const auto n = load<uint64_t>(rest, 0);
    out.push_back(text_of(rest.subspan(8, n)));
    rest = rest.subspan(8 + n);
  }
  return out;
}

std::vector<int64_t> Gguf::integers(std::string_view key) const {
  const Value& v = value(key, true, "an array of integers");
  std::vector<int64_t> out;
  out.reserve(v.count);
  for (uint64_t i = 0; i < v.count; ++i) out.push_back(integer_at(key, v, i));
  return out;
}

std::vector<double> Gguf::numbers(std::string_view key) const {
  const Value& v = value(key, true, "an array of numbers");
  std::vector<double> out;
  out.reserve(v.count);
  for (uint64_t i = 0; i < v.count; ++i) out.push_back(number_at(key, v, i));
  return out;
}

std::string Gguf::describe(std::string_view key) const {
  const Value* v = find_value(key);
  DS_REQUIRE(v, "{}: the metadata key '{}' is missing", path().string(), key);
  if (v->array) return fmt::format("[{} x {}]", v->count, gguf_type_name(v->type));
  if (v->type == GgufType::string) return fmt::format("\"{}\"", shown(string(key)));
  if (v->type == GgufType::boolean) return boolean(key) ? "true" : "false";
  if (v->type == GgufType::f32) return fmt::format("{}", load<float>(v->payload, 0));
  if (v->type == GgufType::u64) return fmt::format("{}", load<uint64_t>(v->payload, 0));
  return v->type == GgufType::f64 ? fmt::format("{}", number(key)) : fmt::format("{}", integer(key));
}

const GgufTensor* Gguf::find(std::string_view name) const {
  const auto it = tensor_index_.find(name);
  return it == tensor_index_.end() ? nullptr : &tensors_[it->second];
}

const GgufTensor& Gguf::get(std::string_view name) const {
  const GgufTensor* t = find(name);
  DS_REQUIRE(t, "{}: tensor '{}' is missing", path().string(), name);
  return *t;
}

const GgufTensor& Gguf::get(std::string_view name, const std::vector<int64_t>& shape) const {
  const GgufTensor& t = get(name);
  DS_REQUIRE(t.shape == shape, "{}: tensor '{}' has shape {}, expected {}", path().string(), name, shape_text(t.shape),
             shape_text(shape));
  return t;
}

}  // namespace dspark::formats
