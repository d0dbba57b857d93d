#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <tuple>

#include "core/error.h"
#include "core/json.h"
#include "formats/safetensors.h"

namespace dspark::formats {
namespace {

uint64_t spec_bytes(const TensorSpec& s) {
  return static_cast<uint64_t>(shape_count(s.shape, s.name)) * static_cast<uint64_t>(dtype_bytes(s.dtype));
}

}  // namespace

SafetensorsWriter::SafetensorsWriter(const fs::path& path, std::vector<TensorSpec> specs,
                                     const std::map<std::string, std::string>& metadata)
    : file_(path), specs_(std::move(specs)) {
  std::sort(specs_.begin(), specs_.end(), [](const TensorSpec& a, const TensorSpec& b) {
    const auto wide_a = -dtype_bytes(a.dtype), wide_b = -dtype_bytes(b.dtype);
    return std::tie(wide_a, a.name) < std::tie(wide_b, b.name);
  });
  OrderedJson header = OrderedJson::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  std::set<std::string> names;
  uint64_t offset = 0;
  for (const TensorSpec& s : specs_) {
    DS_REQUIRE(s.name != "__metadata__" && names.insert(s.name).second, "{}: the tensor name '{}' {}", path.string(),
               s.name, s.name == "__metadata__" ? "is reserved" : "is given twice");
    const uint64_t end = offset + spec_bytes(s);
    header[s.name] = {{"dtype", dtype_name(s.dtype)}, {"shape", s.shape}, {"data_offsets", {offset, end}}};
    offset = end;
  }
  std::string text;
  try {
    text = header.dump();
  } catch (const OrderedJson::exception& e) {
    fail("cannot write {}: a name or metadata text is not UTF-8 ({})", path.string(), json_error(e));
  }
  text.resize((text.size() + 7) / 8 * 8, ' ');
  unsigned char length[8];
  for (int i = 0; i < 8; ++i) length[i] = static_cast<unsigned char>(text.size() >> (8 * i));
  file_.write(length, 8);
  file_.write(text);
  skip_complete();
}

// Moves on past tensors that need no (more) bytes, so that empty tensors need no write call.
void SafetensorsWriter::skip_complete() {
  while (next_ < specs_.size() && tensor_written_ == spec_bytes(specs_[next_])) ++next_, tensor_written_ = 0;
}

void SafetensorsWriter::write(std::string_view name, std::span<const std::byte> bytes) {
  if (bytes.empty()) return;
  DS_ASSERT(next_ < specs_.size() && specs_[next_].name == name, "tensor '{}' is not the next one to write", name);
  const uint64_t left = spec_bytes(specs_[next_]) - tensor_written_;
  DS_ASSERT(bytes.size() <= left, "{} bytes for tensor '{}', which takes {} more", bytes.size(), name, left);
  file_.write(bytes.data(), bytes.size());
  tensor_written_ += bytes.size();
  skip_complete();
}

void SafetensorsWriter::finish() {
  DS_ASSERT(next_ == specs_.size(), "tensor '{}' was not written", specs_[next_].name);
  file_.commit();
}

void write_safetensors(const fs::path& path, const std::vector<TensorView>& tensors,
                       const std::map<std::string, std::string>& metadata) {
  std::vector<TensorSpec> specs;
  std::map<std::string, const TensorView*, std::less<>> by_name;
  for (const TensorView& t : tensors) {
    specs.push_back({t.name, t.dtype, t.shape});
    by_name[t.name] = &t;
  }
  SafetensorsWriter writer(path, std::move(specs), metadata);
  for (const TensorSpec& s : writer.specs()) writer.write(s.name, by_name.at(s.name)->data);
  writer.finish();
}

}  // namespace dspark::formats
