#include "core/json.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <span>

#include "core/error.h"
#include "core/files.h"
#include "core/hash.h"

namespace dspark {

namespace {
// "at byte 7, near '}'", or by line and column where there are lines. `byte` counts from 1 and may be one behind the end.
std::string place(std::string_view text, size_t byte) {
  const size_t at = std::min(byte > 0 ? byte - 1 : 0, text.size());
  const std::string_view before = text.substr(0, at);
  const auto lines = std::count(before.begin(), before.end(), '\n');
  const std::string where = lines == 0 ? fmt::format("at byte {}", at) : fmt::format("at line {}, column {}", lines + 1, at - before.rfind('\n'));
  if (text.find_first_not_of(" \t\r\n", at) == std::string_view::npos) return where + ", where it ends too early";
  const std::string_view rest = text.substr(at, 20);
  return fmt::format("{}, near '{}'", where, rest.substr(0, rest.find('\n')));
}
}  // namespace

Json parse_json(std::string_view text, std::string_view where) {
  DS_REQUIRE(!text.empty(), "{}: not valid JSON: it is empty", where);
  try {
    return Json::parse(text);
  } catch (const Json::parse_error& e) {
    fail("{}: not valid JSON {}", where, place(text, e.byte));
  } catch (const Json::exception&) {
    fail("{}: not valid JSON: a number in it is too large", where);
  }
}

Json read_json(const std::filesystem::path& path) { return parse_json(read_text(path), path.string()); }

std::string json_error(const std::exception& e) {
  const std::string_view text = e.what();
  const size_t end = text.find("] ");
  return std::string(text.starts_with("[json.exception.") && end != std::string_view::npos ? text.substr(end + 2) : text);
}

std::string json_checksum(const Json& value) {
  const std::string text = value.dump(-1, ' ', false, Json::error_handler_t::replace);
  return fmt::format("{:08x}", crc32c(std::as_bytes(std::span(text.data(), text.size()))));
}

}  // namespace dspark
