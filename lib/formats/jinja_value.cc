#include "formats/jinja_value.h"

#include <string.h>

#include <algorithm>
#include <cmath>

#include "formats/jinja_text.h"

namespace dspark::formats::jinja {

Text::Text(std::string value, bool is_markup)
    : text(std::move(value)), length(count_points(text)), markup(is_markup) {}

void nest(Object& object, const Value& child) {
  object.nesting = std::max(object.nesting, child.nesting() + 1);
  if (object.nesting > kMaxNesting) throw PyError("limit", "a value nests too deeply");
}

Value Value::boolean(bool value) {
  Value out(Type::boolean);
  out.integer_ = value;
  return out;
}
Value Value::integer(Int value) {
  Value out(Type::integer);
  out.integer_ = value;
  return out;
}
Value Value::real(double value) {
  Value out(Type::real);
  out.real_ = value;
  return out;
}
Value Value::text(std::string value, bool markup) {
  return Value(Type::text, std::make_shared<Text>(std::move(value), markup));
}
Value Value::sequence(Type type, Values items) {
  auto object = std::make_shared<Sequence>();
  for (const Value& item : items) nest(*object, item);
  object->items = std::move(items);
  return Value(type, std::move(object));
}
Value Value::dict(std::vector<std::pair<Value, Value>> entries) {
  auto object = std::make_shared<Dict>();
  for (const auto& [key, value] : entries) nest(*object, key), nest(*object, value);
  object->entries = std::move(entries);
  return Value(Type::dict, std::move(object));
}
Value Value::iterator(Values items, const char* name) {
  auto object = std::make_shared<Iterator>();
  for (const Value& item : items) nest(*object, item);
  object->items = std::move(items);
  object->type_name = name;
  return Value(Type::iterator, std::move(object));
}
Value Value::undefined(std::string message, bool security) {
  auto info = std::make_shared<UndefinedInfo>();
  info->message = std::move(message);
  info->security = security;
  return Value(Type::undefined, std::move(info));
}

double Value::as_double() const { return type_ == Type::real ? real_ : static_cast<double>(integer_); }
const Values& Value::items() const { return as<Sequence>().items; }

const Value* Dict::find(std::string_view key) const {
  for (const auto& [name, value] : entries)
    if (name.is(Type::text) && name.str() == key) return &value;
  return nullptr;
}

std::string type_name(const Value& value) {
  switch (value.type()) {
    case Type::undefined: return "Undefined";
    case Type::none: return "NoneType";
    case Type::boolean: return "bool";
    case Type::integer: return "int";
    case Type::real: return "float";
    case Type::text: return value.is_markup() ? "Markup" : "str";
    case Type::list: return "list";
    case Type::tuple: return "tuple";
    case Type::dict: return "dict";
    case Type::view: {
      const auto kind = value.as<View>().kind;
      return kind == View::keys ? "dict_keys" : kind == View::values ? "dict_values" : "dict_items";
    }
    case Type::iterator: return value.as<Iterator>().type_name;
    case Type::range: return "range";
    case Type::macro: return "Macro";
    case Type::function: return "function";
    case Type::method: return "builtin_function_or_method";
    case Type::name_space: return "Namespace";
    case Type::loop: return "LoopContext";
    case Type::cycler: return "Cycler";
    case Type::joiner: return "Joiner";
  }
  return "object";
}

std::string object_type_repr(const Value& value) {
  switch (value.type()) {
    case Type::none: return "None";
    case Type::name_space: return "jinja2.utils.Namespace object";
    case Type::cycler: return "jinja2.utils.Cycler object";
    case Type::joiner: return "jinja2.utils.Joiner object";
    case Type::macro: return "jinja2.runtime.Macro object";
    case Type::loop: return "jinja2.runtime.LoopContext object";
    default: return value.is_markup() ? "markupsafe.Markup object" : type_name(value) + " object";
  }
}

void raise_undefined(const Value& value) {
  if (value.identity() == nullptr) throw PyError("undefined", "a value is undefined");
  const auto& info = value.as<UndefinedInfo>();
  throw PyError(info.security ? "security" : "undefined", info.message);
}
void require_defined(const Value& value) {
  if (value.is(Type::undefined)) raise_undefined(value);
}

bool truthy(const Value& value) {
  switch (value.type()) {
    case Type::undefined:
    case Type::none: return false;
    case Type::boolean:
    case Type::integer: return value.as_int() != 0;
    case Type::real: return value.as_double() != 0;
    case Type::loop: return true;  // a loop that runs has a length
    default: return !has_length(value) || length(value) != 0;
  }
}

bool has_length(const Value& value) {
  switch (value.type()) {
    case Type::undefined:
    case Type::text:
    case Type::list:
    case Type::tuple:
    case Type::dict:
    case Type::view:
    case Type::range: return true;
    default: return false;
  }
}

size_t length(const Value& value) {
  switch (value.type()) {
    case Type::undefined: return 0;
    case Type::text: return value.as<Text>().length;
    case Type::list:
    case Type::tuple: return value.items().size();
    case Type::dict: return value.as<Dict>().entries.size();
    case Type::view: return value.as<View>().dict->entries.size();
    case Type::range: return static_cast<size_t>(value.as<Range>().size);
    case Type::loop: unsupported("the length of 'loop' as a sequence (use loop.length)");
    default: type_error("object of type '{}' has no len()", type_name(value));
  }
}

bool is_iterable(const Value& value) { return has_length(value) || value.is(Type::iterator) || value.is(Type::loop); }

Values range_items(const Range& range) {
  Values out;
  out.reserve(static_cast<size_t>(range.size));
  for (int64_t i = 0; i < range.size; ++i) out.push_back(Value::integer(range.start + Int(i) * range.step));
  return out;
}

Values view_items(const View& view) {
  Values out;
  out.reserve(view.dict->entries.size());
  for (const auto& [key, value] : view.dict->entries)
    out.push_back(view.kind == View::keys ? key : view.kind == View::values ? value : Value::tuple({key, value}));
  return out;
}

Values iterate(const Value& value, Meter& meter) {
  if (has_length(value)) meter.step(length(value));
  switch (value.type()) {
    case Type::undefined: return {};
    case Type::list:
    case Type::tuple: return value.items();
    case Type::range: return range_items(value.as<Range>());
    case Type::view: return view_items(value.as<View>());
    case Type::dict: {
      Values out;
      for (const auto& entry : value.as<Dict>().entries) out.push_back(entry.first);
      return out;
    }
    case Type::text: {
      Values out;
      const std::string& text = value.str();
      meter.elements(value.as<Text>().length * 3);  // every character becomes a text of its own
      for (size_t pos = 0; pos < text.size();) {
        const size_t start = pos;
        next_point(text, pos);
        out.push_back(Value::text(text.substr(start, pos - start)));
      }
      return out;
    }
    case Type::iterator: {
      auto& iterator = value.as<Iterator>();
      meter.step(iterator.items.size() - iterator.pos);
      Values out(iterator.items.begin() + static_cast<std::ptrdiff_t>(iterator.pos), iterator.items.end());
      iterator.pos = iterator.items.size();
      return out;
    }
    case Type::loop: unsupported("iterating over 'loop'");
    default: type_error("'{}' object is not iterable", type_name(value));
  }
}

void require_hashable(const Value& key) {
  if (key.is(Type::list) || key.is(Type::dict)) type_error("unhashable type: '{}'", type_name(key));
  if (key.is(Type::view) && key.as<View>().kind != View::values) type_error("unhashable type: '{}'", type_name(key));
  if (key.is(Type::tuple))
    for (const Value& item : key.items()) require_hashable(item);
}

const Value* dict_get(const Dict& dict, const Value& key, Meter& meter) {
  require_hashable(key);
  meter.step(dict.entries.size() / 8);
  if (key.is(Type::text)) return meter.scan(key.str().size()), dict.find(key.str());
  for (const auto& [name, value] : dict.entries)
    if (equal(name, key, meter)) return &value;
  return nullptr;
}

void dict_set(Dict& dict, const Value& key, const Value& value, Meter& meter) {
  nest(dict, key);
  nest(dict, value);
  if (const Value* old = dict_get(dict, key, meter)) {
    const_cast<Value&>(*old) = value;  // the caller owns `dict` mutably; dict_get's result points into it
    return;
  }
  dict.entries.emplace_back(key, value);
}

}  // namespace dspark::formats::jinja
