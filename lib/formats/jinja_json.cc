// Between JSON and template values: the context comes in, `tojson` goes out as Python's json.dumps writes it.
#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "formats/jinja_text.h"
#include "formats/jinja_value.h"

namespace dspark::formats::jinja {

namespace {

Value read_json_value(const OrderedJson& json, Meter& meter, int depth) {
  if (depth > kMaxNesting) throw PyError("limit", "a value nests too deeply");
  meter.step();
  switch (json.type()) {
    case OrderedJson::value_t::null: return Value::none();
    case OrderedJson::value_t::boolean: return Value::boolean(json.get<bool>());
    case OrderedJson::value_t::number_integer: return Value::integer(json.get<int64_t>());
    case OrderedJson::value_t::number_unsigned: return Value::integer(json.get<uint64_t>());
    case OrderedJson::value_t::number_float: return Value::real(json.get<double>());
    case OrderedJson::value_t::string: {
      const auto& text = json.get_ref<const std::string&>();
      meter.bytes(text.size());
      if (!is_utf8(text)) value_error("a string of the conversation is not valid UTF-8");
      return Value::text(text);
    }
    case OrderedJson::value_t::array: {
      Values items;
      items.reserve(json.size());
      for (const auto& item : json) items.push_back(read_json_value(item, meter, depth + 1));
      return Value::list(std::move(items));
    }
    case OrderedJson::value_t::object: {
      std::vector<std::pair<Value, Value>> entries;
      entries.reserve(json.size());
      for (const auto& [key, item] : json.items()) {
        if (!is_utf8(key)) value_error("a key of the conversation is not valid UTF-8");
        entries.emplace_back(Value::text(key), read_json_value(item, meter, depth + 1));
      }
      return Value::dict(std::move(entries));
    }
    default: unsupported("a JSON value of type {}", json.type_name());
  }
}

void append_json_text(std::string& out, const std::string& text, bool ascii, Meter& meter) {
  meter.bytes(text.size() + 2);
  out += '"';
  for (size_t pos = 0; pos < text.size();) {
    const size_t start = pos;
    const char32_t c = next_point(text, pos);
    const auto value = static_cast<uint32_t>(c);
    switch (c) {
      case '"': out += "\\\""; break;
      case '\\': out += "\\\\"; break;
      case '\n': out += "\\n"; break;
      case '\r': out += "\\r"; break;
      case '\t': out += "\\t"; break;
      case '\f': out += "\\f"; break;
      case '\b': out += "\\b"; break;
      default:
        if (c < 0x20 || (ascii && c >= 0x7F && c < 0x10000)) {
          out += fmt::format("\\u{:04x}", value);
        } else if (ascii && c >= 0x10000) {
          out += fmt::format("\\u{:04x}\\u{:04x}", 0xD800 + ((value - 0x10000) >> 10), 0xDC00 + ((value - 0x10000) & 0x3FF));
        } else {
          out.append(text, start, pos - start);
        }
    }
  }
  out += '"';
}

std::string json_float(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value < 0 ? "-Infinity" : "Infinity";
  return repr_float(value);
}

class JsonWriter {
 public:
  JsonWriter(const JsonStyle& style, Meter& meter) : style_(style), meter_(meter) {}

  void write(const Value& value) {
    meter_.step();
    meter_.bytes(4);
    switch (value.type()) {
      case Type::none: out += "null"; return;
      case Type::boolean: out += value.as_bool() ? "true" : "false"; return;
      case Type::integer: out += int_text(value.as_int()); return;
      case Type::real: out += json_float(value.as_double()); return;
      case Type::text: return append_json_text(out, value.str(), style_.ascii, meter_);
      case Type::list:
      case Type::tuple: return write_items(value.items());
      case Type::dict: return write_dict(value.as<Dict>());
      default: type_error("Object of type {} is not JSON serializable", type_name(value));
    }
  }

  std::string out;

 private:
  void new_line() {
    if (!style_.indent) return;
    meter_.bytes(1 + level_ * style_.indent->size());
    out += '\n';
    for (size_t i = 0; i < level_; ++i) out += *style_.indent;
  }

  void separate(size_t index) {
    if (index > 0) {
      meter_.bytes(style_.item_separator.size());
      out += style_.item_separator;
    }
    new_line();
  }

  void write_items(const Values& items) {
    out += '[';
    ++level_;
    for (size_t i = 0; i < items.size(); ++i) {
      separate(i);
      write(items[i]);
    }
    --level_;
    if (!items.empty()) new_line();
    out += ']';
  }

  void write_dict(const Dict& dict) {
    auto entries = dict.entries;
    if (style_.sort_keys) {
      meter_.step(entries.size());
      std::stable_sort(entries.begin(), entries.end(),
                       [&](const auto& a, const auto& b) { return compare(a.first, b.first, Order::lt, meter_); });
    }
    out += '{';
    ++level_;
    for (size_t i = 0; i < entries.size(); ++i) {
      separate(i);
      append_json_text(out, key_text(entries[i].first), style_.ascii, meter_);
      meter_.bytes(style_.key_separator.size());
      out += style_.key_separator;
      write(entries[i].second);
    }
    --level_;
    if (!entries.empty()) new_line();
    out += '}';
  }

  std::string key_text(const Value& key) {
    switch (key.type()) {
      case Type::text: return key.str();
      case Type::none: return "null";
      case Type::boolean: return key.as_bool() ? "true" : "false";
      case Type::integer: return int_text(key.as_int());
      case Type::real: return json_float(key.as_double());
      default: type_error("keys must be str, int, float, bool or None, not {}", type_name(key));
    }
  }

  const JsonStyle& style_;
  Meter& meter_;
  size_t level_ = 0;
};

}  // namespace

Value from_json(const OrderedJson& json, Meter& meter) { return read_json_value(json, meter, 0); }

std::string to_json(const Value& value, const JsonStyle& style, Meter& meter) {
  JsonWriter writer(style, meter);
  writer.write(value);
  return std::move(writer.out);
}

}  // namespace dspark::formats::jinja
