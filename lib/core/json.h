// JSON: nlohmann-json behind two aliases. Include <nlohmann/json.hpp> only in .cc files that build or read values.
#pragma once

#include <exception>
#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace dspark {

using Json = nlohmann::json;
using OrderedJson = nlohmann::ordered_json;

// Parses text; an Error names `where` (a path, or "path:line") and the place at which it stops being JSON.
Json parse_json(std::string_view text, std::string_view where);
Json read_json(const std::filesystem::path& path);

// What the library's exception says, without its own name in front ("[json.exception.type_error.302] "); another's as it is.
std::string json_error(const std::exception& e);

// CRC32C of a value's canonical text, as files that are JSON keep it over everything else in them: "crc32c": json_checksum(rest).
std::string json_checksum(const Json& value);

}  // namespace dspark
