// Finding a filter, and the filters over text.
#include "formats/jinja_filters.h"

#include <algorithm>

#include "formats/jinja_parser.h"
#include "formats/jinja_text.h"

namespace dspark::formats::jinja {

namespace {

// Filters of Jinja that chat templates have no use for: known, so that the message can say so.
constexpr std::string_view kUnsupported[] = {"pprint", "random", "urlize", "wordwrap", "xmlattr", "forceescape"};

std::string plain(Interp& interp, const Value& value) {
  if (value.is_markup()) unsupported("filtering escaped text");
  return interp.text(value);
}

template <std::string (*kMap)(std::string_view)>
Value mapped(Interp& interp, const Value& value, const Args& args) {
  const Params params("filter", args, {});
  return Value::text(kMap(interp.text(value)), value.is_markup());
}

// Words begin after white space, '-' and opening brackets; unlike str.title.
std::string title_filter(std::string_view text) {
  std::string out;
  size_t begin = 0;
  const auto flush = [&](size_t end) {
    if (end == begin) return;
    size_t first = begin;
    next_point(text, first);
    out += upper(text.substr(begin, first - begin)) + lower(text.substr(first, end - first));
    begin = end;
  };
  bool in_break = false;
  for (size_t pos = 0; pos < text.size();) {
    const size_t at = pos;
    const char32_t c = next_point(text, pos);
    const bool is_break = is_space(c) || c == '-' || c == '(' || c == '{' || c == '[' || c == '<';
    if (is_break != in_break) flush(at);
    in_break = is_break;
  }
  flush(text.size());
  return out;
}

Value trim(Interp& interp, const Value& value, const Args& args) {
  const Params params("trim", args, {"chars"});
  const std::string text = interp.text(value);
  if (params[0] == nullptr || params[0]->is(Type::none))
    return Value::text(std::string(strip(text, true, true)), value.is_markup());
  if (!params[0]->is(Type::text)) type_error("strip arg must be None or str");
  return Value::text(std::string(strip_chars(text, params[0]->str(), true, true)), value.is_markup());
}

Value replace(Interp& interp, const Value& value, const Args& args) {
  const Params params("replace", args, {"old", "new", "count"}, 2);
  Args inner;
  inner.positional = {Value::text(interp.text(*params[0])), Value::text(interp.text(*params[1]))};
  if (params[2] != nullptr && !params[2]->is(Type::none)) inner.positional.push_back(*params[2]);
  return call_method(interp, Value::text(interp.text(value)), "replace", inner);
}

Value string(Interp& interp, const Value& value, const Args& args) {
  const Params params("string", args, {});
  return value.is(Type::text) ? value : Value::text(interp.text(value));
}

Value center(Interp& interp, const Value& value, const Args& args) {
  const Params params("center", args, {"width"});
  Args inner;
  inner.positional = {params[0] ? *params[0] : Value::integer(80)};
  return call_method(interp, Value::text(plain(interp, value)), "center", inner);
}

Value indent(Interp& interp, const Value& value, const Args& args) {
  const Params params("indent", args, {"width", "first", "blank"});
  std::string margin(4, ' ');
  if (params[0] && params[0]->is(Type::text)) {
    margin = params[0]->str();
  } else if (params[0]) {
    const int64_t width = std::max<int64_t>(to_index(*params[0]), 0);
    interp.meter.bytes(static_cast<uint64_t>(width));
    margin.assign(static_cast<size_t>(width), ' ');
  }
  require_defined(value);
  if (!value.is(Type::text)) type_error("unsupported operand type(s) for +=: '{}' and 'str'", type_name(value));
  const bool blank = params.flag(2, false);
  const Value lines = call_method(interp, Value::text(plain(interp, value) + "\n"), "splitlines", {});
  std::string out;
  for (size_t i = 0; i < lines.items().size(); ++i) {
    const std::string& line = lines.items()[i].str();
    interp.meter.bytes(margin.size() + line.size() + 1);
    if (i > 0) out += '\n';
    if (i > 0 ? blank || !line.empty() : params.flag(1, false)) out += margin;
    out += line;
  }
  return Value::text(std::move(out));
}

Value truncate(Interp& interp, const Value& value, const Args& args) {
  const Params params("truncate", args, {"length", "killwords", "end", "leeway"});
  const int64_t size = params.integer(0, 255);
  const std::string end = params[2] ? params.str(2) : "...";
  const auto end_size = static_cast<int64_t>(count_points(end));
  const int64_t leeway = params[3] && !params[3]->is(Type::none) ? params.integer(3, 5) : 5;
  if (size < end_size)
    throw PyError("AssertionError", fmt::format("expected length >= {}, got {}", end_size, size));
  if (leeway < 0) throw PyError("AssertionError", fmt::format("expected leeway >= 0, got {}", leeway));
  if (static_cast<int64_t>(length(value)) <= size + leeway) return value;
  const std::string text = plain(interp, value);
  std::string cut = text.substr(0, byte_offset(text, static_cast<size_t>(size - end_size)));
  if (!params.flag(1, false)) cut.resize(std::min(cut.rfind(' '), cut.size()));
  return Value::text(cut + end);
}

Value wordcount(Interp& interp, const Value& value, const Args& args) {
  const Params params("wordcount", args, {});
  const std::string text = plain(interp, value);
  Int count = 0;
  bool inside = false;
  for (size_t pos = 0; pos < text.size();) {
    const bool word = is_word(next_point(text, pos));
    count += word && !inside;
    inside = word;
  }
  return Value::integer(count);
}

Value format(Interp& interp, const Value& value, const Args& args) {
  if (!args.positional.empty() && !args.keywords.empty())
    throw PyError("FilterArgumentError", "can't handle positional and keyword arguments at the same time");
  Value values = Value::tuple(args.positional);
  if (!args.keywords.empty()) {
    std::vector<std::pair<Value, Value>> entries;
    for (const auto& [key, item] : args.keywords) entries.emplace_back(Value::text(key), item);
    values = Value::dict(std::move(entries));
  }
  return Value::text(printf_format(interp, plain(interp, value), values));
}

Value escape(Interp& interp, const Value& value, const Args& args) {
  const Params params("escape", args, {});
  return value.is_markup() ? value : Value::text(escape_html(interp.text(value), interp.meter), true);
}

Value safe(Interp& interp, const Value& value, const Args& args) {
  const Params params("safe", args, {});
  return Value::text(interp.text(value), true);
}

Value striptags(Interp& interp, const Value& value, const Args& args) {
  const Params params("striptags", args, {});
  const std::string text = interp.text(value);
  std::string without_comments, out;
  const auto remove = [](const std::string& from, std::string& to, std::string_view open, std::string_view close) {
    size_t pos = 0;
    while (true) {
      const size_t begin = from.find(open, pos);
      const size_t end = begin == std::string::npos ? begin : from.find(close, begin);
      if (end == std::string::npos) break;
      to.append(from, pos, begin - pos);
      pos = end + close.size();
    }
    to.append(from, pos);
  };
  remove(text, without_comments, "<!--", "-->");
  remove(without_comments, out, "<", ">");
  if (out.find('&') != std::string::npos) unsupported("character entities in 'striptags'");
  const Value words = call_method(interp, Value::text(std::move(out)), "split", {});
  Args join;
  join.positional = {words};
  return call_method(interp, Value::text(" "), "join", join);
}

std::string quote(std::string_view text, bool query) {
  std::string out;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    const bool plain_char = byte < 0x80 && (is_alpha(byte) || is_decimal(byte) || std::string_view("_.-~").find(c) != std::string_view::npos ||
                                       (c == '/' && !query));
    if (plain_char) {
      out += c;
    } else if (query && c == ' ') {
      out += '+';
    } else {
      out += fmt::format("%{:02X}", byte);
    }
  }
  return out;
}

Value urlencode(Interp& interp, const Value& value, const Args& args) {
  const Params params("urlencode", args, {});
  if (value.is(Type::text) || !is_iterable(value)) {
    const std::string text = interp.text(value);
    interp.meter.bytes(text.size() * 3);
    return Value::text(quote(text, false));
  }
  const Values pairs = value.is(Type::dict) ? iterate(call_method(interp, value, "items", {}), interp.meter)
                                            : iterate(value, interp.meter);
  std::string out;
  for (const Value& pair : pairs) {
    const Values parts = iterate(pair, interp.meter);
    if (parts.size() != 2) value_error("not enough values to unpack (expected 2, got {})", parts.size());
    const std::string key = interp.text(parts[0]), item = interp.text(parts[1]);
    interp.meter.bytes((key.size() + item.size()) * 3);
    if (!out.empty()) out += '&';
    out += quote(key, true) + "=" + quote(item, true);
  }
  return Value::text(std::move(out));
}

Value tojson(Interp& interp, const Value& value, const Args& args) {
  const Params params("tojson", args, {"ensure_ascii", "indent", "separators", "sort_keys"});
  JsonStyle style;
  style.ascii = params.flag(0, false);
  style.sort_keys = params.flag(3, false);
  if (params[1] && !params[1]->is(Type::none)) {
    if (params[1]->is(Type::text)) {
      style.indent = params[1]->str();
    } else {
      const int64_t width = std::max<int64_t>(to_index(*params[1]), 0);
      interp.meter.bytes(static_cast<uint64_t>(width));
      style.indent = std::string(static_cast<size_t>(width), ' ');
    }
    style.item_separator = ",";
  }
  if (params[2] && !params[2]->is(Type::none)) {
    const Values pair = iterate(*params[2], interp.meter);
    if (pair.size() != 2) value_error("separators must be a pair");
    if (!pair[0].is(Type::text) || !pair[1].is(Type::text)) type_error("separators must be strings");
    style.item_separator = pair[0].str();
    style.key_separator = pair[1].str();
  }
  return Value::text(to_json(value, style, interp.meter));
}

Value default_filter(Interp&, const Value& value, const Args& args) {
  const Params params("default", args, {"default_value", "boolean"});
  if (!value.is(Type::undefined) && !(params.flag(1, false) && !truthy(value))) return value;
  return params[0] ? *params[0] : Value::text("");
}

Value attr(Interp& interp, const Value& value, const Args& args) {
  const Params params("attr", args, {"name"}, 1);
  if (value.is(Type::dict) && attribute_kind(value, params.str(0)) == AttributeKind::none)
    return Value::undefined(fmt::format("'dict object' has no attribute {}", repr_text(params.str(0))));
  return interp.get_attribute(value, params.str(0));
}

constexpr FilterEntry kTextFilters[] = {
    {"upper", mapped<upper>}, {"lower", mapped<lower>}, {"capitalize", mapped<capitalize>}, {"title", mapped<title_filter>},
    {"trim", trim}, {"replace", replace}, {"string", string}, {"center", center}, {"indent", indent}, {"truncate", truncate},
    {"wordcount", wordcount}, {"format", format}, {"e", escape}, {"escape", escape}, {"safe", safe}, {"striptags", striptags},
    {"urlencode", urlencode}, {"tojson", tojson}, {"default", default_filter}, {"d", default_filter}, {"attr", attr}};

const FilterEntry* find_filter(std::string_view name) {
  for (const auto table : {text_filters(), number_filters(), sequence_filters()})
    for (const FilterEntry& entry : table)
      if (entry.name == name) return &entry;
  return nullptr;
}

bool is_unsupported(std::string_view name) {
  return std::find(std::begin(kUnsupported), std::end(kUnsupported), name) != std::end(kUnsupported);
}

}  // namespace

std::span<const FilterEntry> text_filters() { return kTextFilters; }

std::string escape_html(const std::string& text, Meter& meter) {
  meter.bytes(text.size() * 2);
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&': out += "&amp;"; break;
      case '<': out += "&lt;"; break;
      case '>': out += "&gt;"; break;
      case '\'': out += "&#39;"; break;
      case '"': out += "&#34;"; break;
      default: out += c;
    }
  }
  return out;
}

bool is_filter(std::string_view name) { return find_filter(name) != nullptr || is_unsupported(name); }

Value Interp::call_filter(const std::string& name, const Value& value, const Args& args) {
  const Depth depth(depth_);
  meter.step(1 + args.positional.size());
  const FilterEntry* entry = find_filter(name);
  if (entry != nullptr) return entry->call(*this, value, args);
  if (is_unsupported(name)) unsupported("the filter '{}'", name);
  throw PyError("TemplateRuntimeError", fmt::format("No filter named {}.", repr_text(name)));
}

}  // namespace dspark::formats::jinja
