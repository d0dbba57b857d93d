// GGUF: the model files of llama.cpp (versions 2 and 3, little-endian), read and written.
//
// A Gguf is a mapped file of typed metadata (key -> value or flat array) and tensors. Everything was checked when it
// was opened: no count, length or offset of the file is believed before it fits into the file. Tensor data and strings
// point into the mapping and live as long as the object (moving it does not move them). Reading is thread-safe.
//
// GGUF writes dimensions fastest first; GgufTensor::shape is turned round, slowest first, as everywhere else in dspark.
#pragma once

#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/files.h"

namespace dspark::formats {

// Numbers as in ggml.h. Types that ggml removed (4, 5, 31-33, 36-38) are not listed and refused by their number.
enum class GgmlType : uint32_t {
  F32 = 0,
  F16 = 1,
  Q4_0 = 2,
  Q4_1 = 3,
  Q5_0 = 6,
  Q5_1 = 7,
  Q8_0 = 8,
  Q8_1 = 9,
  Q2_K = 10,
  Q3_K = 11,
  Q4_K = 12,
  Q5_K = 13,
  Q6_K = 14,
  Q8_K = 15,
  IQ2_XXS = 16,
  IQ2_XS = 17,
  IQ3_XXS = 18,
  IQ1_S = 19,
  IQ4_NL = 20,
  IQ3_S = 21,
  IQ2_S = 22,
  IQ4_XS = 23,
  I8 = 24,
  I16 = 25,
  I32 = 26,
  I64 = 27,
  F64 = 28,
  IQ1_M = 29,
  BF16 = 30,
  TQ1_0 = 34,
  TQ2_0 = 35,
  MXFP4 = 39,
  NVFP4 = 40
};

struct GgmlTypeInfo {
  GgmlType type;
  const char* name;
  int64_t block_elements, block_bytes;  // blocks run along the fastest dimension
};
// Null when the number names no type we know.
const GgmlTypeInfo* ggml_type_info(uint32_t number);
const GgmlTypeInfo& ggml_type_info(GgmlType type);

// The values of whole blocks, bit for bit as ggml computes them. `bytes` and `out` must be the same number of blocks.
// F32, F64 (rounded), F16, BF16 and all block types of ggml except Q8_1 and Q8_K, which never are stored; those and the
// integer types are an Error.
void dequantise(GgmlType type, std::span<const std::byte> bytes, std::span<float> out);

struct GgufTensor {
  std::string name;
  GgmlType type = GgmlType::F32;
  std::vector<int64_t> shape;       // slowest first; all dimensions are at least 1
  std::span<const std::byte> data;  // whole rows of blocks
  int64_t count() const;            // elements
};
// Dequantised, in file order (row-major in `shape`).
std::vector<float> read_f32(const GgufTensor& tensor);

enum class GgufType : uint32_t { u8, i8, u16, i16, u32, i32, f32, boolean, string, array, u64, i64, f64 };
const char* gguf_type_name(GgufType type);

class Gguf {
 public:
  explicit Gguf(const fs::path& path);
  Gguf(Gguf&&) noexcept = default;

  const fs::path& path() const { return file_.path(); }
  uint32_t version() const { return version_; }
  uint64_t alignment() const { return alignment_; }

  // Metadata. A missing key or another kind of value is an Error that names file, key and both types; the forms with a
  // default allow only the key to be missing. Integers may be stored in any width that holds them, numbers as integers
  // or floats (an f32 comes back as exactly that f32's value).
  const std::vector<std::string>& keys() const { return keys_; }  // in file order
  bool has(std::string_view key) const { return find_value(key) != nullptr; }
  std::string_view string(std::string_view key) const;
  std::string_view string(std::string_view key, std::string_view fallback) const;
  int64_t integer(std::string_view key) const;
  int64_t integer(std::string_view key, int64_t fallback) const;
  double number(std::string_view key) const;
  double number(std::string_view key, double fallback) const;
  bool boolean(std::string_view key) const;
  bool boolean(std::string_view key, bool fallback) const;
  bool is_array(std::string_view key) const;  // false when missing
  uint64_t array_size(std::string_view key) const;
  std::vector<std::string_view> strings(std::string_view key) const;
  std::vector<int64_t> integers(std::string_view key) const;  // arrays of any integer type, or of bool as 0 and 1
  std::vector<double> numbers(std::string_view key) const;
  // "1234", "[3 strings]": for messages and `--inspect`.
  std::string describe(std::string_view key) const;

  const std::vector<GgufTensor>& tensors() const { return tensors_; }  // in file order
  const GgufTensor* find(std::string_view name) const;                 // null when absent
  const GgufTensor& get(std::string_view name) const;                  // an Error naming file and tensor when absent
  const GgufTensor& get(std::string_view name, const std::vector<int64_t>& shape) const;

 private:
  friend class GgufParser;
  friend class GgufWriter;
  struct Value {
    GgufType type;  // of the elements when `array`
    bool array = false;
    uint64_t count = 1, offset = 0;  // offset: of the payload in the file
    std::span<const std::byte> payload;
  };
  const Value* find_value(std::string_view key) const;
  const Value& value(std::string_view key, bool array, const char* wanted) const;
  [[noreturn]] void wrong_type(std::string_view key, const Value& v, const char* wanted) const;
  int64_t integer_at(std::string_view key, const Value& v, uint64_t i) const;
  double number_at(std::string_view key, const Value& v, uint64_t i) const;

  MappedFile file_;
  uint32_t version_ = 0;
  uint64_t alignment_ = 32;
  std::vector<std::string> keys_;
  std::map<std::string, Value, std::less<>> values_;
  std::vector<GgufTensor> tensors_;
  std::map<std::string, size_t, std::less<>> tensor_index_;
};

// Writes a version 3 file in one pass; it appears under its name only after finish(). First all metadata and the list
// of tensors, then begin(), then the data of every tensor in the order they were added (in pieces if that suits), then
// finish(). A key or a tensor given twice is an Error.
class GgufWriter {
 public:
  explicit GgufWriter(const fs::path& path) : file_(path) {}

  void set_string(std::string_view key, std::string_view value);
  void set_u32(std::string_view key, uint32_t value);
  void set_i32(std::string_view key, int32_t value);
  void set_u64(std::string_view key, uint64_t value);
  void set_f32(std::string_view key, float value);
  void set_bool(std::string_view key, bool value);
  void set_strings(std::string_view key, std::span<const std::string> values);
  void set_u32s(std::string_view key, std::span<const uint32_t> values);
  void set_i32s(std::string_view key, std::span<const int32_t> values);
  void set_f32s(std::string_view key, std::span<const float> values);
  void set_bools(std::string_view key, const std::vector<bool>& values);
  // The entry of another file as it is, whatever its type (a tokenizer, a chat template).
  void copy(const Gguf& from, std::string_view key);

  // `shape` slowest first; the fastest dimension must be whole blocks of `type`.
  void add_tensor(std::string name, GgmlType type, std::vector<int64_t> shape);
  void begin();
  void write(std::string_view name, std::span<const std::byte> bytes);
  void finish();

 private:
  struct Spec {
    std::string name;
    GgmlType type;
    std::vector<int64_t> shape;
    uint64_t bytes;
  };
  void entry(std::string_view key, GgufType type);
  void array_entry(std::string_view key, GgufType type, uint64_t count);
  template <typename T>
  void put(T value);
  void put_string(std::string_view text);

  AtomicFile file_;
  std::string metadata_;  // encoded entries
  std::map<std::string, bool, std::less<>> keys_, names_;
  std::vector<Spec> specs_;
  bool begun_ = false;
  size_t next_ = 0;
  uint64_t tensor_written_ = 0;
};

}  // namespace dspark::formats
