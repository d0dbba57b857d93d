// Safetensors: the weight files of Hugging Face, and the files dspark writes.
//
// A SafetensorsFile is a mapped file whose header was checked in full when it was opened: names are unique, every
// element type is known, every size follows from its shape, and the tensors cover the data area exactly, without
// overlap or hole. TensorViews point into the mapping and live as long as the file object (moving it does not move
// them). A SafetensorsSet is one file, or the shards that a `model.safetensors.index.json` names, under one roof.
// Reading is thread-safe.
#pragma once

#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/dtype.h"
#include "core/files.h"

namespace dspark::formats {

struct TensorSpec {
  std::string name;
  DType dtype = DType::f32;
  std::vector<int64_t> shape;  // slowest dimension first; {} is a scalar
};

// Elements of a shape; an Error naming `where` when a dimension is negative or the product does not fit in 63 bits.
int64_t shape_count(const std::vector<int64_t>& shape, std::string_view where);
std::string shape_text(const std::vector<int64_t>& shape);  // "[2, 3]"

struct TensorView {
  std::string name;
  DType dtype = DType::f32;
  std::vector<int64_t> shape;
  std::span<const std::byte> data;  // row-major, little-endian; may be unaligned in files of others
  int64_t count() const { return static_cast<int64_t>(data.size()) / dtype_bytes(dtype); }
};

// The values converted: F32, F64, BF16 and F16 sources (F64 to bf16 rounds by way of fp32). Other types are an Error.
std::vector<float> read_f32(const TensorView& tensor);
std::vector<double> read_f64(const TensorView& tensor);
std::vector<bf16> read_bf16(const TensorView& tensor);
// Into memory of the caller, exactly tensor.count() elements.
void read_into(const TensorView& tensor, std::span<float> out);
void read_into(const TensorView& tensor, std::span<double> out);
void read_into(const TensorView& tensor, std::span<bf16> out);
// I64, I32, U8 and BOOL sources.
std::vector<int64_t> read_i64(const TensorView& tensor);

class SafetensorsFile {
 public:
  explicit SafetensorsFile(const fs::path& path);
  SafetensorsFile(SafetensorsFile&&) noexcept = default;

  const fs::path& path() const { return file_.path(); }
  // In file order (ascending offset; empty tensors by name).
  const std::vector<TensorView>& tensors() const { return tensors_; }
  const TensorView* find(std::string_view name) const;  // null when absent
  const TensorView& get(std::string_view name) const;   // an Error naming file and tensor when absent
  // get(), and an Error when the shape is another one.
  const TensorView& get(std::string_view name, const std::vector<int64_t>& shape) const;
  const std::map<std::string, std::string>& metadata() const { return metadata_; }

 private:
  MappedFile file_;
  std::vector<TensorView> tensors_;
  std::map<std::string, size_t, std::less<>> index_;
  std::map<std::string, std::string> metadata_;
};

class SafetensorsSet {
 public:
  // A .safetensors file, a .index.json, or a folder that holds model.safetensors.index.json or model.safetensors.
  static SafetensorsSet open(const fs::path& path);
  SafetensorsSet(SafetensorsSet&&) noexcept = default;

  const fs::path& path() const { return path_; }
  const std::vector<SafetensorsFile>& files() const { return files_; }
  std::vector<std::string> names() const;  // sorted
  bool has(std::string_view name) const { return find(name) != nullptr; }
  const TensorView* find(std::string_view name) const;
  const TensorView& get(std::string_view name) const;
  const TensorView& get(std::string_view name, const std::vector<int64_t>& shape) const;

 private:
  explicit SafetensorsSet(fs::path path) : path_(std::move(path)) {}
  void open_shards(const fs::path& index_path);
  fs::path path_;
  std::vector<SafetensorsFile> files_;
  std::map<std::string, const TensorView*, std::less<>> index_;  // into files_, whose tensors never move
};

// Writes one file in a single pass; it appears under its name only after finish(). The file's order is fixed by the
// list alone: larger elements first (so that all data is aligned to its element), then by name. Give the data in the
// order of specs():
//   SafetensorsWriter w(path, specs, {{"format", "pt"}});
//   for (const TensorSpec& s : w.specs()) w.write(s.name, bytes_of(s.name));
//   w.finish();
class SafetensorsWriter {
 public:
  // Throws on a duplicate or reserved name.
  SafetensorsWriter(const fs::path& path, std::vector<TensorSpec> specs,
                    const std::map<std::string, std::string>& metadata = {});

  const std::vector<TensorSpec>& specs() const { return specs_; }  // in file order
  // All bytes of the next tensor, or a piece of it: pieces of one tensor follow one another until it is complete.
  void write(std::string_view name, std::span<const std::byte> bytes);
  template <typename T>
  void write(std::string_view name, const std::vector<T>& values) {
    write(name, std::as_bytes(std::span<const T>(values)));
  }
  void finish();

 private:
  void skip_complete();
  AtomicFile file_;
  std::vector<TensorSpec> specs_;
  size_t next_ = 0;
  uint64_t tensor_written_ = 0;  // bytes of specs_[next_] so far
};

// Everything at once, from views (whose order does not matter).
void write_safetensors(const fs::path& path, const std::vector<TensorView>& tensors,
                       const std::map<std::string, std::string>& metadata = {});

}  // namespace dspark::formats
