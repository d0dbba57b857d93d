// Internal to the readers of configs: typed fields of a JSON object. A field that is null counts as missing, as it does
// in transformers. Messages name the file and the field. Include after <nlohmann/json.hpp>.
#pragma once

#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "core/error.h"
#include "core/json.h"

namespace dspark::formats {

class JsonFields {
 public:
  JsonFields(const Json& object, std::string where) : object_(object), where_(std::move(where)) {
    DS_REQUIRE(object.is_object(), "{}: expected a JSON object", where_);
  }
  const std::string& where() const { return where_; }

  const Json* find(std::string_view key) const {
    const auto it = object_.find(key);
    return it == object_.end() || it->is_null() ? nullptr : &*it;
  }
  bool has(std::string_view key) const { return find(key) != nullptr; }

  std::optional<int64_t> integer(std::string_view key) const {
    const Json* v = find(key);
    if (!v) return std::nullopt;
    DS_REQUIRE(v->is_number_integer() && (!v->is_number_unsigned() || v->get<uint64_t>() <= INT64_MAX),
               "{}: '{}' is {}, expected an integer", where_, key, shown(*v));
    return v->get<int64_t>();
  }
  std::optional<double> number(std::string_view key) const {
    const Json* v = find(key);
    if (!v) return std::nullopt;
    DS_REQUIRE(v->is_number() && std::isfinite(v->get<double>()), "{}: '{}' is {}, expected a number", where_, key,
               shown(*v));
    return v->get<double>();
  }
  std::optional<bool> boolean(std::string_view key) const {
    const Json* v = find(key);
    if (!v) return std::nullopt;
    DS_REQUIRE(v->is_boolean(), "{}: '{}' is {}, expected true or false", where_, key, shown(*v));
    return v->get<bool>();
  }
  std::optional<std::string> string(std::string_view key) const {
    const Json* v = find(key);
    if (!v) return std::nullopt;
    DS_REQUIRE(v->is_string(), "{}: '{}' is {}, expected a string", where_, key, shown(*v));
    return v->get<std::string>();
  }
  template <typename T>
  T required(std::string_view key, std::optional<T> value) const {
    DS_REQUIRE(value.has_value(), "{}: '{}' is missing", where_, key);
    return *value;
  }
  int64_t required_integer(std::string_view key) const { return required(key, integer(key)); }
  double required_number(std::string_view key) const { return required(key, number(key)); }

  static std::string shown(const Json& v) {
    std::string text = v.dump(-1, ' ', false, Json::error_handler_t::replace);
    return text.size() > 80 ? text.substr(0, 80) + "..." : text;
  }

 private:
  const Json& object_;
  std::string where_;
};

}  // namespace dspark::formats
