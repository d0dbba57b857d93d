// JSON: nlohmann-json behind two aliases. Include <nlohmann/json.hpp> only in .cc files that build or read values.
#pragma once

#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <string_view>

namespace dspark {

using Json = nlohmann::json;
using OrderedJson = nlohmann::ordered_json;

// Parses text; an Error names `where` (a path, or "path:line") and the byte at which it stops being JSON.
Json parse_json(std::string_view text, std::string_view where);
Json read_json(const std::filesystem::path& path);

}  // namespace dspark
