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

namespace {

void append_repr(std::string& out, const Value& value, Meter& meter);

void append_items(std::string& out, const Values& items, char open, char close, bool tuple, Meter& meter) {
  out += open;
  for (size_t i = 0; i < items.size(); ++i) {
    if (i > 0) out += ", ";
    append_repr(out, items[i], meter);
  }
  if (tuple && items.size() == 1) out += ',';
  out += close;
}

void append_dict(std::string& out, const Dict& dict, Meter& meter) {
  out += '{';
  bool first = true;
  for (const auto& [key, item] : dict.entries) {
    if (!first) out += ", ";
    first = false;
    append_repr(out, key, meter);
    out += ": ";
    append_repr(out, item, meter);
  }
  out += '}';
}

void append_repr(std::string& out, const Value& value, Meter& meter) {
  meter.step();
  meter.bytes(4);
  switch (value.type()) {
    case Type::undefined: out += "Undefined"; return;
    case Type::none: out += "None"; return;
    case Type::boolean: out += value.as_bool() ? "True" : "False"; return;
    case Type::integer: out += int_text(value.as_int()); return;
    case Type::real: out += repr_float(value.as_double()); return;
    case Type::text:
      if (value.is_markup()) unsupported("printing escaped text inside a container");
      meter.bytes(value.str().size());
      out += repr_text(value.str());
      return;
    case Type::list: return append_items(out, value.items(), '[', ']', false, meter);
    case Type::tuple: return append_items(out, value.items(), '(', ')', true, meter);
    case Type::dict: return append_dict(out, value.as<Dict>(), meter);
    case Type::range: {
      const auto& range = value.as<Range>();
      out += fmt::format("range({}, {}", range.start, range.stop);
      if (range.step != 1) out += fmt::format(", {}", range.step);
      out += ')';
      return;
    }
    case Type::view: {
      out += type_name(value) + "(";
      append_items(out, view_items(value.as<View>()), '[', ']', false, meter);
      out += ')';
      return;
    }
    default: unsupported("printing a '{}' object", type_name(value));
  }
}

long double wide(const Value& number) {
  return number.is(Type::real) ? static_cast<long double>(number.as_double())
                               : static_cast<long double>(number.as_int());
}

bool is_sequence(const Value& value) { return value.is(Type::list) || value.is(Type::tuple); }

bool dict_equal(const Dict& left, const Dict& right, Meter& meter) {
  if (left.entries.size() != right.entries.size()) return false;
  for (const auto& [key, value] : left.entries) {
    const Value* other = dict_get(right, key, meter);
    if (other == nullptr || !equal(value, *other, meter)) return false;
  }
  return true;
}

template <typename T>
bool ordered(const T& left, const T& right, Order order) {
  switch (order) {
    case Order::lt: return left < right;
    case Order::le: return left <= right;
    case Order::gt: return left > right;
    case Order::ge: return left >= right;
  }
  return false;
}

}  // namespace

std::string repr(const Value& value, Meter& meter) {
  std::string out;
  append_repr(out, value, meter);
  return out;
}

std::string to_text(const Value& value, Meter& meter) {
  if (value.is(Type::text)) {
    meter.bytes(value.str().size());
    return value.str();
  }
  if (value.is(Type::undefined)) return "";
  return repr(value, meter);
}

bool same(const Value& left, const Value& right) {
  if (left.type() != right.type()) return false;
  if (left.is(Type::integer)) return left.as_int() == right.as_int();
  if (left.is(Type::none)) return true;
  if (left.is(Type::boolean)) return left.as_bool() == right.as_bool();
  return left.identity() != nullptr && left.identity() == right.identity();
}

bool equal(const Value& left, const Value& right, Meter& meter) {
  meter.step();
  if (left.is_number() && right.is_number()) {
    if (left.is_integral() && right.is_integral()) return left.as_int() == right.as_int();
    return wide(left) == wide(right);
  }
  if (left.type() != right.type()) return false;
  switch (left.type()) {
    case Type::undefined:
    case Type::none: return true;
    case Type::text: return meter.scan(left.str().size()), left.str() == right.str();
    case Type::list:
    case Type::tuple: {
      const Values &a = left.items(), &b = right.items();
      if (a.size() != b.size()) return false;
      for (size_t i = 0; i < a.size(); ++i)
        if (!equal(a[i], b[i], meter)) return false;
      return true;
    }
    case Type::dict: return dict_equal(left.as<Dict>(), right.as<Dict>(), meter);
    case Type::range: {
      const auto &a = left.as<Range>(), &b = right.as<Range>();
      return a.size == b.size && (a.size == 0 || (a.start == b.start && (a.size == 1 || a.step == b.step)));
    }
    case Type::view: {
      if (left.identity() == right.identity()) return true;
      unsupported("comparing '{}' objects", type_name(left));
    }
    case Type::method: unsupported("comparing methods");
    default: return left.identity() == right.identity();
  }
}

bool compare(const Value& left, const Value& right, Order order, Meter& meter) {
  meter.step();
  require_defined(left);
  require_defined(right);
  if (left.is_number() && right.is_number()) {
    if (left.is_integral() && right.is_integral()) return ordered(left.as_int(), right.as_int(), order);
    return ordered(wide(left), wide(right), order);
  }
  if (left.is(Type::text) && right.is(Type::text)) {
    meter.scan(std::min(left.str().size(), right.str().size()));
    return ordered(left.str(), right.str(), order);  // the order of UTF-8 bytes is that of code points
  }
  if (left.type() == right.type() && is_sequence(left)) {
    const Values &a = left.items(), &b = right.items();
    for (size_t i = 0; i < std::min(a.size(), b.size()); ++i)
      if (!equal(a[i], b[i], meter)) return compare(a[i], b[i], order, meter);
    return ordered(a.size(), b.size(), order);
  }
  if (left.is(Type::view) && right.is(Type::view)) unsupported("comparing '{}' objects", type_name(left));
  static constexpr const char* kSigns[] = {"<", "<=", ">", ">="};
  type_error("'{}' not supported between instances of '{}' and '{}'", kSigns[static_cast<int>(order)], type_name(left),
             type_name(right));
}

bool contains(const Value& container, const Value& item, Meter& meter) {
  switch (container.type()) {
    case Type::text: {
      if (!item.is(Type::text))
        type_error("'in <string>' requires string as left operand, not {}", type_name(item));
      const std::string &text = container.str(), &part = item.str();
      meter.scan(text.size());
      return part.empty() || memmem(text.data(), text.size(), part.data(), part.size()) != nullptr;
    }
    case Type::dict: return dict_get(container.as<Dict>(), item, meter) != nullptr;
    case Type::view: {
      const auto& view = container.as<View>();
      if (view.kind == View::keys) return dict_get(*view.dict, item, meter) != nullptr;
      break;
    }
    case Type::iterator: {  // consumes up to the match, as Python does
      auto& iterator = container.as<Iterator>();
      while (iterator.pos < iterator.items.size())
        if (equal(iterator.items[iterator.pos++], item, meter)) return true;
      return false;
    }
    default: break;
  }
  if (!is_iterable(container)) type_error("argument of type '{}' is not iterable", type_name(container));
  for (const Value& element : iterate(container, meter))
    if (same(element, item) || equal(element, item, meter)) return true;
  return false;
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
