#include "core/error.h"
#include "formats/gguf.h"
#include "formats/safetensors.h"  // shape_count

namespace dspark::formats {
namespace {
constexpr uint64_t kAlignment = 32;
uint64_t padding(uint64_t at) { return (kAlignment - at % kAlignment) % kAlignment; }

template <typename T>
void append(std::string& out, T value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof(T));
}

void append_string(std::string& out, std::string_view text) {
  append<uint64_t>(out, text.size());
  out += text;
}
}  // namespace

template <typename T>
void GgufWriter::put(T value) {
  append(metadata_, value);
}

void GgufWriter::put_string(std::string_view text) { append_string(metadata_, text); }

void GgufWriter::entry(std::string_view key, GgufType type) {
  DS_ASSERT(!begun_ && !key.empty() && key != "general.alignment", "metadata key '{}'", key);
  DS_REQUIRE(keys_.emplace(key, true).second, "the metadata key '{}' is set twice", key);
  put_string(key);
  put(static_cast<uint32_t>(type));
}

void GgufWriter::array_entry(std::string_view key, GgufType type, uint64_t count) {
  entry(key, GgufType::array);
  put(static_cast<uint32_t>(type));
  put(count);
}

void GgufWriter::set_string(std::string_view key, std::string_view value) {
  entry(key, GgufType::string);
  put_string(value);
}
void GgufWriter::set_u32(std::string_view key, uint32_t value) { entry(key, GgufType::u32), put(value); }
void GgufWriter::set_i32(std::string_view key, int32_t value) { entry(key, GgufType::i32), put(value); }
void GgufWriter::set_u64(std::string_view key, uint64_t value) { entry(key, GgufType::u64), put(value); }
void GgufWriter::set_f32(std::string_view key, float value) { entry(key, GgufType::f32), put(value); }
void GgufWriter::set_bool(std::string_view key, bool value) {
  entry(key, GgufType::boolean);
  put(static_cast<uint8_t>(value));
}
void GgufWriter::set_strings(std::string_view key, std::span<const std::string> values) {
  array_entry(key, GgufType::string, values.size());
  for (const std::string& v : values) put_string(v);
}
void GgufWriter::set_u32s(std::string_view key, std::span<const uint32_t> values) {
  array_entry(key, GgufType::u32, values.size());
  for (uint32_t v : values) put(v);
}
void GgufWriter::set_i32s(std::string_view key, std::span<const int32_t> values) {
  array_entry(key, GgufType::i32, values.size());
  for (int32_t v : values) put(v);
}
void GgufWriter::set_f32s(std::string_view key, std::span<const float> values) {
  array_entry(key, GgufType::f32, values.size());
  for (float v : values) put(v);
}
void GgufWriter::set_bools(std::string_view key, const std::vector<bool>& values) {
  array_entry(key, GgufType::boolean, values.size());
  for (bool v : values) put(static_cast<uint8_t>(v));
}

void GgufWriter::copy(const Gguf& from, std::string_view key) {
  const Gguf::Value* v = from.find_value(key);
  DS_REQUIRE(v, "{}: the metadata key '{}' is missing, it cannot be copied", from.path().string(), key);
  if (v->array)
    array_entry(key, v->type, v->count);
  else
    entry(key, v->type);
  metadata_.append(reinterpret_cast<const char*>(v->payload.data()), v->payload.size());
}

void GgufWriter::add_tensor(std::string name, GgmlType type, std::vector<int64_t> shape) {
  const GgmlTypeInfo& info = ggml_type_info(type);
  DS_ASSERT(!begun_ && !name.empty() && shape.size() <= 4, "tensor '{}' {}", name, shape_text(shape));
  const int64_t count = shape_count(shape, name);
  DS_REQUIRE(count > 0 && (shape.empty() ? 1 : shape.back()) % info.block_elements == 0,
             "tensor '{}' {} cannot be stored as {}: rows must be whole blocks of {}", name, shape_text(shape),
             info.name, info.block_elements);
  DS_REQUIRE(names_.emplace(name, true).second, "the tensor '{}' is added twice", name);
  const auto bytes = static_cast<uint64_t>(count / info.block_elements * info.block_bytes);
  specs_.push_back({std::move(name), type, std::move(shape), bytes});
}

void GgufWriter::begin() {
  DS_ASSERT(!begun_);
  begun_ = true;
  std::string head = "GGUF";
  append<uint32_t>(head, 3);
  append<uint64_t>(head, specs_.size());
  append<uint64_t>(head, keys_.size());
  head += metadata_;
  uint64_t offset = 0;
  for (const Spec& s : specs_) {
    append_string(head, s.name);
    append<uint32_t>(head, static_cast<uint32_t>(s.shape.size()));
    for (size_t d = s.shape.size(); d-- > 0;) append<uint64_t>(head, static_cast<uint64_t>(s.shape[d]));
    append<uint32_t>(head, static_cast<uint32_t>(s.type));
    append<uint64_t>(head, offset);
    offset += s.bytes + padding(s.bytes);
  }
  head.append(padding(head.size()), '\0');
  file_.write(head);
}

void GgufWriter::write(std::string_view name, std::span<const std::byte> bytes) {
  DS_ASSERT(begun_ && next_ < specs_.size() && specs_[next_].name == name, "tensor '{}' is not the next one to write",
            name);
  const uint64_t left = specs_[next_].bytes - tensor_written_;
  DS_ASSERT(bytes.size() <= left, "{} bytes for tensor '{}', which takes {} more", bytes.size(), name, left);
  file_.write(bytes.data(), bytes.size());
  tensor_written_ += bytes.size();
  if (bytes.size() < left) return;
  file_.write(std::string(padding(tensor_written_), '\0'));  // the last tensor is padded too, as llama.cpp's files are
  ++next_;
  tensor_written_ = 0;
}

void GgufWriter::finish() {
  DS_ASSERT(begun_ && next_ == specs_.size(), "{} of {} tensors were written", next_, specs_.size());
  file_.commit();
}

}  // namespace dspark::formats
