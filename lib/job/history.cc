#include "job/history.h"

#include <fcntl.h>
#include <unistd.h>

#include <nlohmann/json.hpp>
#include <string_view>

#include "core/error.h"
#include "core/log.h"

namespace dspark::job {

namespace {

// A record with its phase and step, or discarded.
OrderedJson parse_record(std::string_view line) {
  OrderedJson record = OrderedJson::parse(line, nullptr, false);
  const bool good = record.is_object() && record.contains("phase") && record["phase"].is_string() && record.contains("step") && record["step"].is_number_integer();
  return good ? record : OrderedJson(OrderedJson::value_t::discarded);
}

std::string_view text_of(const MappedFile& file) { return {reinterpret_cast<const char*>(file.bytes().data()), file.size()}; }

}  // namespace

History::History(const fs::path& path, int64_t step, int64_t total) : path_(path) {
  if (!fs::exists(path)) return;
  size_t keep = 0;
  if (step > 0) {
    const MappedFile file(path);
    const std::string_view text = text_of(file);
    keep = text.rfind('\n') + 1;  // npos + 1 is 0
    // From the end, until a line that stays. The last validation is done again by a run that was complete.
    while (keep > 0) {
      const size_t before = keep >= 2 ? text.rfind('\n', keep - 2) + 1 : 0;
      const OrderedJson record = parse_record(text.substr(before, keep - 1 - before));
      if (!record.is_discarded()) {
        const auto at = record["step"].get<int64_t>();
        if (at <= step && !(at == total && record["phase"] != "train")) break;
      }
      keep = before;
    }
  }
  SYS_CHECK(::truncate(path.c_str(), static_cast<off_t>(keep)), "cut {} back to step {}", path.string(), step);
}

History::~History() {
  if (fd_ >= 0) ::close(fd_);
}

int64_t History::read(const std::function<void(const OrderedJson&)>& each) const {
  if (!fs::exists(path_)) return 0;
  const MappedFile file(path_);
  const std::string_view text = text_of(file);
  int64_t unread = 0;
  size_t begin = 0;
  for (size_t end; (end = text.find('\n', begin)) != std::string_view::npos; begin = end + 1) {
    const OrderedJson record = parse_record(text.substr(begin, end - begin));
    if (record.is_discarded()) ++unread;
    else each(record);
  }
  return unread;
}

void History::append(const OrderedJson& record) {
  if (failed_) return;
  try {
    if (fd_ < 0) fd_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    DS_REQUIRE(fd_ >= 0, "cannot open {}: {}", path_.string(), errno_text());
    const std::string line = record.dump() + "\n";
    write_all(fd_, line.data(), line.size(), path_);
  } catch (const Error& e) {
    failed_ = true;
    log_warn("{}; training goes on, the run's curves end here", e.what());
  }
}

}  // namespace dspark::job
