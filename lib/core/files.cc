#include "core/files.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "core/error.h"

namespace dspark {

MappedFile::MappedFile(const fs::path& path) : path_(path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  DS_REQUIRE(fd >= 0, "cannot open {}: {}", path.string(), errno_text());
  struct stat st {};
  if (::fstat(fd, &st) != 0 || !S_ISREG(st.st_mode)) {
    ::close(fd);
    fail("{} is not a regular file", path.string());
  }
  size_ = static_cast<uint64_t>(st.st_size);
  if (size_ > 0) {
    void* p = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, fd, 0);
    if (p == MAP_FAILED) {
      const std::string why = errno_text();
      ::close(fd);
      fail("cannot map {} ({} bytes): {}", path.string(), size_, why);
    }
    data_ = static_cast<const std::byte*>(p);
  }
  ::close(fd);
}

MappedFile::~MappedFile() {
  if (data_) ::munmap(const_cast<std::byte*>(data_), size_);
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)), data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

std::span<const std::byte> MappedFile::slice(uint64_t offset, uint64_t count, std::string_view what) const {
  DS_REQUIRE(offset <= size_ && count <= size_ - offset,
             "{}: {} needs bytes [{}, +{}) but the file has {} bytes: it is cut off or damaged", path_.string(), what,
             offset, count, size_);
  return {data_ + offset, count};
}

std::string read_text(const fs::path& path) {
  MappedFile file(path);
  return std::string(reinterpret_cast<const char*>(file.bytes().data()), file.size());
}

void write_all(int fd, const void* data, size_t bytes, const fs::path& path) {
  const char* p = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t n = ::write(fd, p, bytes);
    if (n < 0 && errno == EINTR) continue;
    DS_REQUIRE(n >= 0, "cannot write {}: {}", path.string(), errno_text());
    p += n;
    bytes -= static_cast<size_t>(n);
  }
}

void fsync_path(const fs::path& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  DS_REQUIRE(fd >= 0, "cannot open {}: {}", path.string(), errno_text());
  const int rc = ::fsync(fd);
  const std::string why = rc != 0 ? errno_text() : "";
  ::close(fd);
  DS_REQUIRE(rc == 0, "cannot sync {}: {}", path.string(), why);
}

AtomicFile::AtomicFile(const fs::path& path)
    : path_(path), temporary_(path.string() + ".tmp." + std::to_string(::getpid())) {
  std::error_code ec;
  const fs::file_status there = fs::status(path, ec);
  DS_REQUIRE(!fs::is_directory(there), "cannot create {}: it is a folder, expected a file", path.string());
  in_place_ = fs::is_character_file(there) || fs::is_block_file(there) || fs::is_fifo(there);
  fd_ = in_place_ ? ::open(path.c_str(), O_WRONLY | O_CLOEXEC) : ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  DS_REQUIRE(fd_ >= 0, "cannot create {}: {}", path.string(), errno_text());
}

AtomicFile::~AtomicFile() {
  if (fd_ < 0) return;
  ::close(fd_);
  if (!in_place_) ::unlink(temporary_.c_str());
}

void AtomicFile::write(const void* data, size_t bytes) {
  write_all(fd_, data, bytes, path_);
  written_ += bytes;
}

void AtomicFile::commit() {
  if (in_place_) {
    SYS_CHECK(::close(std::exchange(fd_, -1)), "close {}", path_.string());
    return;
  }
  SYS_CHECK(::fsync(fd_), "sync {}", path_.string());
  SYS_CHECK(::close(std::exchange(fd_, -1)), "close {}", path_.string());
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) {
    const std::string why = errno_text();
    ::unlink(temporary_.c_str());
    fail("cannot rename {} to {}: {}", temporary_.string(), path_.string(), why);
  }
  fsync_path(path_.parent_path().empty() ? fs::path(".") : path_.parent_path());
}

void write_text_atomic(const fs::path& path, std::string_view text) {
  AtomicFile file(path);
  file.write(text);
  file.commit();
}

void make_folder(const fs::path& path) {
  std::error_code ec;
  fs::create_directories(path, ec);
  DS_REQUIRE(!ec && fs::is_directory(path), "cannot make folder {}: {}", path.string(),
             ec ? ec.message() : "a file of that name exists");
}

FolderLock::FolderLock(const fs::path& folder) {
  const fs::path path = folder / ".lock";
  fd_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  DS_REQUIRE(fd_ >= 0, "cannot create {}: {}", path.string(), errno_text());
  if (::flock(fd_, LOCK_EX | LOCK_NB) != 0) {
    const bool held = errno == EWOULDBLOCK;
    const std::string why = errno_text();
    ::close(fd_);
    if (held) fail("{} is in use by another dspark process; wait for it or choose another output", folder.string());
    fail("cannot lock {}: {}", path.string(), why);
  }
}

FolderLock::~FolderLock() {
  if (fd_ >= 0) ::close(fd_);
}

}  // namespace dspark
