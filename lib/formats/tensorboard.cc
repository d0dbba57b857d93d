#include "formats/tensorboard.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <charconv>
#include <chrono>

#include "core/error.h"
#include "core/hash.h"

namespace dspark::formats {

namespace {

// Little-endian, whatever the machine is.
template <typename T>
std::string fixed(T value) {
  std::string bytes;
  for (size_t i = 0; i < sizeof(T); ++i) bytes += static_cast<char>(value >> (8 * i));
  return bytes;
}

// ---- protobuf's wire format: a field is (number << 3 | type), then a varint, 8 or 4 bytes, or a length and as many bytes.

enum WireType : uint64_t { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };

std::string varint(uint64_t v) {
  std::string bytes;
  for (; v >= 128; v >>= 7) bytes += static_cast<char>(v | 128);
  return bytes += static_cast<char>(v);
}
std::string field(uint64_t number, WireType type, std::string_view payload) { return varint(number << 3 | type).append(payload); }
std::string bytes_field(uint64_t number, std::string_view bytes) { return field(number, kBytes, varint(bytes.size()).append(bytes)); }

// Event: wall_time 1, step 2, file_version 3, summary 5, session_log 7.
std::string event(double wall_time, int64_t step) {
  return field(1, kFixed64, fixed(std::bit_cast<uint64_t>(wall_time))) + field(2, kVarint, varint(static_cast<uint64_t>(step)));
}

double wall_clock_s() { return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count(); }

// The second that stands in the names of event files; 0 for a name that is none.
int64_t second_of(const std::string& name) {
  constexpr std::string_view kPrefix = "events.out.tfevents.";
  int64_t second = 0;
  if (name.starts_with(kPrefix)) std::from_chars(name.data() + kPrefix.size(), name.data() + name.size(), second);
  return second;
}

}  // namespace

uint32_t masked_crc32c(std::string_view bytes) {
  const uint32_t crc = crc32c(std::as_bytes(std::span(bytes.data(), bytes.size())));
  return std::rotr(crc, 15) + 0xa282ead8u;
}

std::string tf_record(std::string_view bytes) {
  const std::string length = fixed(static_cast<uint64_t>(bytes.size()));
  return length + fixed(masked_crc32c(length)) + std::string(bytes) + fixed(masked_crc32c(bytes));
}

std::string scalar_event(double wall_time, int64_t step, std::span<const Scalar> scalars) {
  std::string summary;
  for (const Scalar& s : scalars)  // Summary: value 1; Summary.Value: tag 1, simple_value 2
    summary += bytes_field(1, bytes_field(1, s.tag) + field(2, kFixed32, fixed(std::bit_cast<uint32_t>(static_cast<float>(s.value)))));
  return event(wall_time, step) + bytes_field(5, summary);
}

EventWriter::EventWriter(const fs::path& folder, int64_t first_step) {
  make_folder(folder);
  const double now = wall_clock_s();
  auto second = static_cast<int64_t>(now);
  std::error_code ec;
  for (const auto& entry : fs::directory_iterator(folder, ec)) second = std::max(second, second_of(entry.path().filename().string()) + 1);
  char host[256] = "localhost";
  ::gethostname(host, sizeof host - 1);
  path_ = folder / fmt::format("events.out.tfevents.{:010}.{}.{}", second, host, ::getpid());
  fd_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_APPEND | O_CLOEXEC, 0644);
  DS_REQUIRE(fd_ >= 0, "cannot create {}: {}", path_.string(), errno_text());
  append(event(now, 0) + bytes_field(3, "brain.Event:2"));
  constexpr uint64_t kStart = 1;  // SessionLog: status 1
  append(event(now, first_step) + bytes_field(7, field(1, kVarint, varint(kStart))));
}

EventWriter::~EventWriter() {
  if (fd_ >= 0) ::close(fd_);
}

void EventWriter::append(const std::string& event) {
  const std::string record = tf_record(event);
  write_all(fd_, record.data(), record.size(), path_);
}

void EventWriter::write(int64_t step, std::span<const Scalar> scalars) { append(scalar_event(wall_clock_s(), step, scalars)); }

}  // namespace dspark::formats
