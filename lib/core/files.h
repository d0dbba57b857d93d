// Files: how dspark reads them (mapped, never trusted) and how it writes them (complete or not at all).
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace dspark {

namespace fs = std::filesystem;

// A whole file mapped read-only. Every access is a bounds-checked slice. Move-only; unmapped on destruction.
class MappedFile {
 public:
  explicit MappedFile(const fs::path& path);  // throws: no such file, not a regular file, no permission
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&&) = delete;

  const fs::path& path() const { return path_; }
  uint64_t size() const { return size_; }
  std::span<const std::byte> bytes() const { return {data_, size_}; }
  // [offset, offset + count), or an Error naming the file, `what`, the range and the file's size.
  std::span<const std::byte> slice(uint64_t offset, uint64_t count, std::string_view what) const;

 private:
  fs::path path_;
  const std::byte* data_ = nullptr;
  uint64_t size_ = 0;
};

// The whole file as text; throws with the path and the reason.
std::string read_text(const fs::path& path);

// A file that appears under its name only when commit() succeeds: written as `name.tmp.<pid>`, fsynced, renamed.
// A file that was not committed is removed. Every write is checked (a full disk is an Error that names the file).
// A name that is a device or a pipe already (/dev/null, <(...)) is written as it is.
class AtomicFile {
 public:
  explicit AtomicFile(const fs::path& path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(const void* data, size_t bytes);
  void write(std::string_view text) { write(text.data(), text.size()); }
  uint64_t written() const { return written_; }
  void commit();

 private:
  fs::path path_, temporary_;
  int fd_ = -1;
  bool in_place_ = false;
  uint64_t written_ = 0;
};

void write_text_atomic(const fs::path& path, std::string_view text);

// write(2) until all bytes are written; throws on any failure. `path` is for the message.
void write_all(int fd, const void* data, size_t bytes, const fs::path& path);
void fsync_path(const fs::path& path);  // a file or a folder

// Makes the folder (and parents); throws with the reason.
void make_folder(const fs::path& path);

// Holds an exclusive lock on `folder/.lock` for its lifetime; throws at once when another process holds it.
class FolderLock {
 public:
  explicit FolderLock(const fs::path& folder);
  ~FolderLock();
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;

 private:
  int fd_ = -1;
};

}  // namespace dspark
