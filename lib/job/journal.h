// Journal: an append-only file of JSON lines that survives being killed at any byte. A last line without its newline is cut off
// when the journal is opened again.
#pragma once

#include <functional>
#include <string>

#include "core/files.h"
#include "core/json.h"

namespace dspark::job {

class Journal {
 public:
  // Reads every whole line (in order), then appends. Throws for a line that is whole but not JSON.
  Journal(const fs::path& path, const std::function<void(const Json&)>& each);
  ~Journal();
  Journal(const Journal&) = delete;
  Journal& operator=(const Journal&) = delete;

  void append(const OrderedJson& line);

 private:
  fs::path path_;
  int fd_ = -1;
};

}  // namespace dspark::job
