#include "core/json.h"

#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/files.h"

namespace dspark {

Json parse_json(std::string_view text, std::string_view where) {
  try {
    return Json::parse(text);
  } catch (const Json::parse_error& e) {
    fail("{}: not valid JSON at byte {}: {}", where, e.byte, e.what());
  } catch (const Json::exception& e) {  // a number beyond double's range
    fail("{}: not valid JSON: {}", where, e.what());
  }
}

Json read_json(const std::filesystem::path& path) { return parse_json(read_text(path), path.string()); }

}  // namespace dspark
