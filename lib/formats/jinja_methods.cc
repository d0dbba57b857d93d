// Methods of strings, lists, tuples and dictionaries. What Python has and this file has not is an error, never undefined.
#include <string.h>

#include <algorithm>
#include <cmath>

#include "formats/jinja_eval.h"
#include "formats/jinja_text.h"

namespace dspark::formats::jinja {

namespace {

using Names = std::initializer_list<std::string_view>;

bool among(Names names, std::string_view name) { return std::find(names.begin(), names.end(), name) != names.end(); }

bool text_has(std::string_view name) {
  return among({"capitalize", "casefold", "center", "count", "encode", "endswith", "expandtabs", "find", "format",
                "format_map", "index", "isalnum", "isalpha", "isascii", "isdecimal", "isdigit", "isidentifier", "islower",
                "isnumeric", "isprintable", "isspace", "istitle", "isupper", "join", "ljust", "lower", "lstrip", "maketrans",
                "partition", "removeprefix", "removesuffix", "replace", "rfind", "rindex", "rjust", "rpartition", "rsplit",
                "rstrip", "split", "splitlines", "startswith", "strip", "swapcase", "title", "translate", "upper", "zfill"},
               name);
}

size_t find_bytes(std::string_view text, std::string_view part, size_t from) {
  if (part.empty()) return from;
  if (from >= text.size()) return std::string_view::npos;
  // memmem keeps long parts from taking quadratic time; the thread sanitizer has it read the whole rest of the text each time.
  if (part.size() == 1) return text.find(part[0], from);
  const void* hit = memmem(text.data() + from, text.size() - from, part.data(), part.size());
  return hit == nullptr ? std::string_view::npos : static_cast<size_t>(static_cast<const char*>(hit) - text.data());
}

std::vector<std::string_view> split_all(std::string_view text, std::string_view separator, int64_t limit) {
  std::vector<std::string_view> parts;
  size_t from = 0;
  while (limit < 0 || static_cast<int64_t>(parts.size()) < limit) {
    const size_t hit = find_bytes(text, separator, from);
    if (hit == std::string_view::npos) break;
    parts.push_back(text.substr(from, hit - from));
    from = hit + separator.size();
  }
  parts.push_back(text.substr(from));
  return parts;
}

std::vector<std::string_view> rsplit_all(std::string_view text, std::string_view separator, int64_t limit) {
  if (limit < 0) return split_all(text, separator, -1);
  std::vector<std::string_view> parts;
  while (static_cast<int64_t>(parts.size()) < limit) {
    const size_t hit = text.rfind(separator);
    if (hit == std::string_view::npos) break;
    parts.push_back(text.substr(hit + separator.size()));
    text = text.substr(0, hit);
  }
  parts.push_back(text);
  std::reverse(parts.begin(), parts.end());
  return parts;
}

std::vector<std::string_view> split_space(std::string_view text, int64_t limit) {
  std::vector<std::string_view> parts;
  size_t pos = skip_space(text, 0);
  while (pos < text.size()) {
    if (limit >= 0 && static_cast<int64_t>(parts.size()) == limit) {
      parts.push_back(strip(text.substr(pos), false, true));
      break;
    }
    const size_t begin = pos;
    while (pos < text.size()) {
      size_t next = pos;
      if (is_space(next_point(text, next))) break;
      pos = next;
    }
    parts.push_back(text.substr(begin, pos - begin));
    pos = skip_space(text, pos);
  }
  return parts;
}

std::vector<std::string_view> rsplit_space(std::string_view text, int64_t limit) {
  auto parts = split_space(text, -1);
  if (limit < 0 || static_cast<int64_t>(parts.size()) <= limit) return parts;
  const size_t keep = parts.size() - static_cast<size_t>(limit);  // pieces that stay together on the left
  const std::string_view last = parts[keep - 1];
  const std::string_view head = strip(text.substr(0, static_cast<size_t>(last.data() + last.size() - text.data())), true, false);
  parts.erase(parts.begin(), parts.begin() + static_cast<std::ptrdiff_t>(keep));
  parts.insert(parts.begin(), head);
  return parts;
}

std::vector<std::string_view> split_lines(std::string_view text, bool keep_ends) {
  std::vector<std::string_view> lines;
  size_t begin = 0;
  for (size_t pos = 0; pos < text.size();) {
    const size_t at = pos;
    const char32_t c = next_point(text, pos);
    const bool ends = (c >= 10 && c <= 13) || (c >= 0x1C && c <= 0x1E) || c == 0x85 || c == 0x2028 || c == 0x2029;
    if (!ends) continue;
    if (c == '\r' && pos < text.size() && text[pos] == '\n') ++pos;
    lines.push_back(text.substr(begin, (keep_ends ? pos : at) - begin));
    begin = pos;
  }
  if (begin < text.size()) lines.push_back(text.substr(begin));
  return lines;
}

Value text_list(const std::vector<std::string_view>& parts, Meter& meter) {
  Values items;
  for (const auto part : parts) {
    meter.step();
    meter.bytes(part.size());
    items.push_back(Value::text(std::string(part)));
  }
  return Value::list(std::move(items));
}

// startswith and endswith: a string or a tuple of them, and the optional bounds.
bool has_affix(const Value& self, const std::string& name, const Args& args, Interp& interp) {
  const Params params(name, args, {"prefix", "start", "end"}, 1);
  Value subject = self;
  if (params[1] || params[2]) subject = slice(self, params[1], params[2], nullptr, interp);
  const std::string_view text = subject.str();
  const auto matches = [&](const Value& affix) {
    if (!affix.is(Type::text))
      type_error("{} first arg must be str or a tuple of str, not {}", name, type_name(affix));
    return name == "startswith" ? text.starts_with(affix.str()) : text.ends_with(affix.str());
  };
  require_defined(*params[0]);
  if (!params[0]->is(Type::tuple)) return matches(*params[0]);
  return std::any_of(params[0]->items().begin(), params[0]->items().end(), matches);
}

// find, rfind, index, rindex, count, within optional bounds.
Value find_text(const Value& self, const std::string& name, const Args& args, Interp& interp) {
  const Params params(name, args, {"sub", "start", "end"}, 1);
  const std::string& part = params.str(0);
  Value subject = self;
  int64_t offset = 0;
  if (params[1] || params[2]) {
    if (part.empty()) unsupported("searching an empty string within bounds");
    subject = slice(self, params[1], params[2], nullptr, interp);
    if (params[1] && !params[1]->is(Type::none)) {
      const int64_t size = static_cast<int64_t>(length(self)), start = to_index(*params[1]);
      offset = std::clamp<int64_t>(start < 0 ? start + size : start, 0, size);
    }
  }
  const std::string_view text = subject.str();
  interp.meter.scan(text.size());
  if (name == "count") {
    if (part.empty()) return Value::integer(static_cast<Int>(length(subject)) + 1);
    return Value::integer(static_cast<Int>(split_all(text, part, -1).size()) - 1);
  }
  const bool from_right = name[0] == 'r';
  const size_t hit = from_right ? text.rfind(part) : find_bytes(text, part, 0);
  if (from_right) interp.meter.step(text.size() / 64 * (part.size() / 64 + 1));
  if (hit != std::string_view::npos) return Value::integer(static_cast<Int>(count_points(text.substr(0, hit))) + offset);
  if (name.ends_with("index")) value_error("substring not found");
  return Value::integer(-1);
}

Value split_text(const std::string& text, const std::string& name, const Args& args, Interp& interp) {
  const Params params(name, args, {"sep", "maxsplit"});
  const bool by_space = params[0] == nullptr || params[0]->is(Type::none);
  const int64_t limit = params.integer(1, -1);
  const bool right = name == "rsplit";
  interp.meter.scan(text.size());
  if (by_space) return text_list(right ? rsplit_space(text, limit) : split_space(text, limit), interp.meter);
  const Value& separator = *params[0];
  require_defined(separator);
  if (!separator.is(Type::text)) type_error("must be str or None, not {}", type_name(separator));
  if (separator.str().empty()) value_error("empty separator");
  if (right) interp.meter.step(text.size() / 64 * (separator.str().size() / 64 + 1));
  const auto parts = right ? rsplit_all(text, separator.str(), limit) : split_all(text, separator.str(), limit);
  return text_list(parts, interp.meter);
}

Value partition_text(const std::string& text, const std::string& name, const Args& args, Interp& interp) {
  const Params params(name, args, {"sep"}, 1);
  const std::string& separator = params.str(0);
  if (separator.empty()) value_error("empty separator");
  const bool right = name[0] == 'r';
  interp.meter.bytes(text.size() * 2);
  const auto parts = right ? rsplit_all(text, separator, 1) : split_all(text, separator, 1);
  const auto piece = [](std::string_view part) { return Value::text(std::string(part)); };
  if (parts.size() == 2) return Value::tuple({piece(parts[0]), piece(separator), piece(parts[1])});
  return right ? Value::tuple({piece(""), piece(""), piece(text)}) : Value::tuple({piece(text), piece(""), piece("")});
}

Value strip_text(const std::string& text, const std::string& name, const Args& args) {
  const Params params(name, args, {"chars"});
  const bool left = name != "rstrip", right = name != "lstrip";
  if (params[0] == nullptr || params[0]->is(Type::none)) return Value::text(std::string(strip(text, left, right)));
  require_defined(*params[0]);
  if (!params[0]->is(Type::text)) type_error("{} arg must be None or str", name);
  return Value::text(std::string(strip_chars(text, params[0]->str(), left, right)));
}

Value join_text(const std::string& separator, const Args& args, Interp& interp) {
  const Params params("join", args, {"iterable"}, 1);
  const Values items = iterate(*params[0], interp.meter);
  std::string out;
  for (size_t i = 0; i < items.size(); ++i) {
    if (!items[i].is(Type::text)) type_error("sequence item {}: expected str instance, {} found", i, type_name(items[i]));
    interp.meter.bytes(items[i].str().size() + separator.size());
    if (i > 0) out += separator;
    out += items[i].str();
  }
  return Value::text(std::move(out));
}

// Every character passes, and there is at least one.
bool all_points(const std::string& text, bool (*test)(char32_t)) {
  for (size_t pos = 0; pos < text.size();)
    if (!test(next_point(text, pos))) return false;
  return !text.empty();
}

bool is_other_digit(char32_t c) {  // characters where isdigit, isnumeric and isalnum need more than the category
  return c >= 0x80 && is_word(c) && !is_alpha(c) && !is_decimal(c);
}

bool classify(const std::string& text, const std::string& name) {
  if (name == "isascii") return count_points(text) == text.size();
  if (name == "isspace") return all_points(text, is_space);
  if (name == "isalpha") return all_points(text, is_alpha);
  if (name == "isdecimal") return all_points(text, is_decimal);
  if (name == "isprintable") return text.empty() || all_points(text, is_printable);
  if (name == "islower" || name == "isupper") {
    bool any = false;
    for (size_t pos = 0; pos < text.size();) {
      const char32_t c = next_point(text, pos);
      if (name == "islower" ? is_upper(c) : is_lower(c)) return false;
      any = any || is_upper(c) || is_lower(c);
    }
    return any;
  }
  for (size_t pos = 0; pos < text.size();)
    if (is_other_digit(next_point(text, pos))) unsupported("{} of characters such as superscripts", name);
  if (name == "isdigit" || name == "isnumeric") return all_points(text, is_decimal);
  return all_points(text, [](char32_t c) { return is_alpha(c) || is_decimal(c); });  // isalnum
}

Value pad_text(const Value& self, const std::string& name, const Args& args, Meter& meter) {
  const Params params(name, args, {"width", "fillchar"}, 1);
  const std::string fill = params[1] ? params.str(1) : " ";
  if (count_points(fill) != 1) type_error("The fill character must be exactly one character long");
  const int64_t size = static_cast<int64_t>(length(self)), width = params.integer(0, 0);
  if (width <= size) return self;
  const int64_t total = width - size;
  meter.bytes(static_cast<uint64_t>(total) * fill.size() + self.str().size());
  int64_t left = name == "ljust" ? 0 : name == "rjust" ? total : total / 2 + (total & width & 1);
  const auto filled = [&](int64_t count) {
    std::string out;
    for (int64_t i = 0; i < count; ++i) out += fill;
    return out;
  };
  return Value::text(filled(left) + self.str() + filled(total - left));
}

Value zfill(const Value& self, const Args& args, Meter& meter) {
  const Params params("zfill", args, {"width"}, 1);
  const int64_t missing = params.integer(0, 0) - static_cast<int64_t>(length(self));
  if (missing <= 0) return self;
  meter.bytes(static_cast<uint64_t>(missing) + self.str().size());
  const std::string& text = self.str();
  const size_t sign = !text.empty() && (text[0] == '-' || text[0] == '+');
  return Value::text(text.substr(0, sign) + std::string(static_cast<size_t>(missing), '0') + text.substr(sign));
}

Value text_method(Interp& interp, const Value& self, const std::string& name, const Args& args) {
  const std::string& text = self.str();
  Meter& meter = interp.meter;
  if (self.is_markup()) unsupported("the method '{}' of escaped text", name);
  if (name == "join") return join_text(text, args, interp);
  if (name == "startswith" || name == "endswith") return Value::boolean(has_affix(self, name, args, interp));
  if (among({"find", "rfind", "index", "rindex", "count"}, name)) return find_text(self, name, args, interp);
  if (name == "partition" || name == "rpartition") return partition_text(text, name, args, interp);
  meter.bytes(text.size());
  if (name == "split" || name == "rsplit") return split_text(text, name, args, interp);
  if (name == "strip" || name == "lstrip" || name == "rstrip") return strip_text(text, name, args);
  if (name == "format") return Value::text(brace_format(interp, text, args));
  if (name == "replace") {
    const Params params(name, args, {"old", "new", "count"}, 2);
    const auto parts = split_all(text, params.str(0), params.str(0).empty() ? 0 : params.integer(2, -1));
    if (params.str(0).empty()) unsupported("replacing an empty string");
    meter.bytes((parts.size() - 1) * params.str(1).size());
    std::string out(parts[0]);
    for (size_t i = 1; i < parts.size(); ++i) out.append(params.str(1)).append(parts[i]);
    return Value::text(std::move(out));
  }
  if (name == "removeprefix" || name == "removesuffix") {
    const Params params(name, args, {"affix"}, 1);
    const std::string& affix = params.str(0);
    if (name == "removeprefix") return Value::text(text.starts_with(affix) ? text.substr(affix.size()) : text);
    return Value::text(text.ends_with(affix) ? text.substr(0, text.size() - affix.size()) : text);
  }
  if (name == "splitlines") {
    const Params params(name, args, {"keepends"});
    return text_list(split_lines(text, params.flag(0, false)), meter);
  }
  if (among({"center", "ljust", "rjust"}, name)) return pad_text(self, name, args, meter);
  if (name == "zfill") return zfill(self, args, meter);
  if (among({"upper", "lower", "title", "capitalize", "swapcase"}, name)) {
    const Params params(name, args, {});
    return Value::text(name == "upper"   ? upper(text)
                       : name == "lower" ? lower(text)
                       : name == "title" ? title(text)
                       : name == "capitalize" ? capitalize(text)
                                              : swapcase(text));
  }
  if (among({"isascii", "isspace", "isalpha", "isdecimal", "isprintable", "islower", "isupper", "isdigit", "isnumeric",
             "isalnum"}, name)) {
    const Params params(name, args, {});
    return Value::boolean(classify(text, name));
  }
  unsupported("the method '{}' of 'str'", name);
}

Value dict_method(Interp& interp, const Value& self, const std::string& name, const Args& args) {
  if (name == "get") {
    if (!args.keywords.empty()) type_error("dict.get() takes no keyword arguments");
    if (args.positional.empty()) type_error("get expected at least 1 argument, got 0");
    const Params params(name, args, {"key", "default"}, 1);
    if (const Value* value = dict_get(self.as<Dict>(), *params[0], interp.meter)) return *value;
    return params[1] ? *params[1] : Value::none();
  }
  const Params params(name, args, {});
  if (name == "copy") return self;
  if (name != "keys" && name != "values" && name != "items") unsupported("the method '{}' of 'dict'", name);
  const auto view = std::make_shared<View>();
  nest(*view, self);
  view->kind = name == "keys" ? View::keys : name == "values" ? View::values : View::items;
  view->dict = self.shared<Dict>();
  return Value::object(Type::view, view);
}

Value list_method(Interp& interp, const Value& self, const std::string& name, const Args& args) {
  if (name == "copy") return Params(name, args, {}), self;
  if (name == "count") {
    const Params params(name, args, {"value"}, 1);
    Int count = 0;
    for (const Value& item : self.items()) count += equal(item, *params[0], interp.meter);
    return Value::integer(count);
  }
  if (name == "index") {
    const Params params(name, args, {"value"}, 1);
    for (size_t i = 0; i < self.items().size(); ++i)
      if (equal(self.items()[i], *params[0], interp.meter)) return Value::integer(static_cast<Int>(i));
    if (self.is(Type::tuple)) value_error("tuple.index(x): x not in tuple");
    value_error("{} is not in list", repr(*params[0], interp.meter));
  }
  unsupported("the method '{}' of '{}'", name, type_name(self));
}

Value cycler_method(const Value& self, const std::string& name, const Args& args) {
  Cycler& cycler = self.as<Cycler>();
  if (name == "current") return cycler.items[cycler.pos];
  const Params params(name, args, {});
  if (name == "reset") {
    cycler.pos = 0;
    return Value::none();
  }
  if (name != "next") unsupported("the attribute '{}' of a cycler", name);
  const Value value = cycler.items[cycler.pos];
  cycler.pos = (cycler.pos + 1) % cycler.items.size();
  return value;
}

}  // namespace

AttributeKind attribute_kind(const Value& object, std::string_view name) {
  using enum AttributeKind;
  switch (object.type()) {
    case Type::text: return text_has(name) ? method : none;
    case Type::dict:
      if (among({"clear", "pop", "popitem", "setdefault", "update"}, name)) return changes_object;
      return among({"copy", "fromkeys", "get", "items", "keys", "values"}, name) ? method : none;
    case Type::list:
      if (among({"append", "clear", "pop", "reverse", "insert", "sort", "extend", "remove"}, name)) return changes_object;
      return among({"copy", "count", "index"}, name) ? method : none;
    case Type::tuple:
      if (object.as<Sequence>().is_group && (name == "grouper" || name == "list")) return other;
      return among({"count", "index"}, name) ? method : none;
    case Type::boolean:
    case Type::integer:
      if (among({"real", "imag", "numerator", "denominator"}, name)) return other;
      return among({"as_integer_ratio", "bit_count", "bit_length", "conjugate", "from_bytes", "to_bytes"}, name) ? method : none;
    case Type::real:
      if (among({"real", "imag"}, name)) return other;
      return among({"as_integer_ratio", "conjugate", "fromhex", "hex", "is_integer"}, name) ? method : none;
    case Type::view: return among({"isdisjoint", "mapping"}, name) ? other : none;
    case Type::range:
      if (among({"start", "stop", "step"}, name)) return other;
      return among({"count", "index"}, name) ? method : none;
    case Type::iterator: return among({"send", "throw", "close"}, name) ? method : none;
    case Type::macro:
      return among({"name", "arguments", "catch_kwargs", "catch_varargs", "caller", "explicit_caller"}, name) ? other : none;
    case Type::cycler:
      if (name == "current" || name == "items" || name == "pos") return other;
      return name == "next" || name == "reset" ? method : none;
    case Type::joiner: return name == "sep" || name == "used" ? other : none;
    default: return none;
  }
}

Value call_method(Interp& interp, const Value& self, const std::string& name, const Args& args) {
  switch (self.type()) {
    case Type::text: return text_method(interp, self, name, args);
    case Type::dict: return dict_method(interp, self, name, args);
    case Type::tuple:
      if (self.as<Sequence>().is_group && name == "grouper") return self.items()[0];
      if (self.as<Sequence>().is_group && name == "list") return self.items()[1];
      return list_method(interp, self, name, args);
    case Type::list: return list_method(interp, self, name, args);
    case Type::cycler: return cycler_method(self, name, args);
    case Type::real:
      if (name == "is_integer") return Value::boolean(std::floor(self.as_double()) == self.as_double() &&
                                                      std::isfinite(self.as_double()));
      [[fallthrough]];
    default: unsupported("the attribute '{}' of '{}'", name, type_name(self));
  }
}

}  // namespace dspark::formats::jinja
