// Values as text, and compared as Python compares them.
#include <algorithm>
#include <cmath>

#include "formats/jinja_text.h"
#include "formats/jinja_value.h"

namespace dspark::formats::jinja {

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

}  // namespace dspark::formats::jinja
