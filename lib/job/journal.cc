#include "job/journal.h"

#include <fcntl.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "core/error.h"

namespace dspark::job {

Journal::Journal(const fs::path& path, const std::function<void(const Json&)>& each) : path_(path) {
  fd_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  DS_REQUIRE(fd_ >= 0, "cannot open {}: {}", path.string(), errno_text());
  const std::string text = read_text(path);
  size_t begin = 0;
  int64_t line = 1;
  for (size_t end; (end = text.find('\n', begin)) != std::string::npos; begin = end + 1, ++line)
    try {
      each(parse_json(std::string_view(text).substr(begin, end - begin), fmt::format("{}:{}", path.string(), line)));
    } catch (const Json::exception&) {  // JSON, but not what was appended here
      fail("{}:{}: damaged, or not written by dspark; take this line away, or the whole file to begin anew", path.string(), line);
    }
  if (begin < text.size()) SYS_CHECK(::ftruncate(fd_, static_cast<off_t>(begin)), "cut the broken last line off {}", path.string());
}

Journal::~Journal() {
  if (fd_ >= 0) ::close(fd_);
}

void Journal::append(const OrderedJson& line) {
  const std::string text = line.dump() + "\n";
  write_all(fd_, text.data(), text.size(), path_);
}

}  // namespace dspark::job
