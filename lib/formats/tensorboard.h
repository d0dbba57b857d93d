// TensorBoard event files: what `tensorboard --logdir DIR` draws as curves.
//
// A file is a sequence of TFRecords (length, masked CRC32C of the length, bytes, masked CRC32C of the bytes). Each holds one Event
// protobuf; the first says "brain.Event:2". TensorBoard takes all event files below a folder as one run, in the order of their names. A
// SessionLog START event at step s makes it forget what earlier files say of steps >= s: so a resumed run appends a file and its curves
// go on as if nothing had happened.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "core/files.h"

namespace dspark::formats {

struct Scalar {
  std::string tag;   // "loss/total": what stands before the first slash is a group of charts
  double value = 0;  // stored as fp32
};

class EventWriter {
 public:
  // Makes the folder and a new file in it, named so that it comes after those already there. Values of step `first_step` and later
  // ones in those files are void from now on.
  EventWriter(const fs::path& folder, int64_t first_step);
  ~EventWriter();
  EventWriter(const EventWriter&) = delete;
  EventWriter& operator=(const EventWriter&) = delete;

  // One record in one write(2): a process killed at any moment leaves whole records, and at most one cut one at the end, which readers
  // take for the end of the file.
  void write(int64_t step, std::span<const Scalar> scalars);
  const fs::path& path() const { return path_; }

 private:
  void append(const std::string& event);
  fs::path path_;
  int fd_ = -1;
};

// The parts, for tests.
uint32_t masked_crc32c(std::string_view bytes);  // ((crc >> 15) | (crc << 17)) + 0xa282ead8
std::string tf_record(std::string_view bytes);
std::string scalar_event(double wall_time, int64_t step, std::span<const Scalar> scalars);

}  // namespace dspark::formats
