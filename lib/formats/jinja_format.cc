// Three formatting languages of Python: `%`, str.format and strftime. Only what templates use; the rest is an error.
#include <algorithm>
#include <cmath>
#include <cstdio>

#include "formats/jinja_eval.h"
#include "formats/jinja_text.h"

namespace dspark::formats::jinja {

namespace {

constexpr int kMaxWidth = 10000;

// What both `%` and str.format can ask for.
struct Spec {
  std::string fill = " ";
  char align = 0;      // '<', '>', '^', '='
  char sign = '-';     // '-', '+', ' '
  bool alternate = false, grouping = false;
  int width = 0, precision = -1;
  char type = 0;
};

std::string pad(const std::string& text, const Spec& spec, char default_align, size_t sign_length = 0) {
  const auto length = static_cast<int>(count_points(text));
  if (length >= spec.width) return text;
  const int total = spec.width - length;
  const char align = spec.align != 0 ? spec.align : default_align;
  const auto filled = [&](int count) {
    std::string out;
    for (int i = 0; i < count; ++i) out += spec.fill;
    return out;
  };
  if (align == '<') return text + filled(total);
  if (align == '^') return filled(total / 2) + text + filled(total - total / 2);
  if (align == '=') return text.substr(0, sign_length) + filled(total) + text.substr(sign_length);
  return filled(total) + text;
}

std::string integer_digits(Int value, int base, bool upper_case) {
  const char* const digits = upper_case ? "0123456789ABCDEF" : "0123456789abcdef";
  const auto radix = static_cast<unsigned>(base);
  auto rest = value < 0 ? -static_cast<unsigned __int128>(value) : static_cast<unsigned __int128>(value);
  std::string out;
  do {
    out += digits[static_cast<unsigned>(rest % radix)];
    rest /= radix;
  } while (rest != 0);
  std::reverse(out.begin(), out.end());
  return out;
}

std::string group_thousands(std::string digits) {
  const size_t end = std::min(digits.find('.'), digits.size());
  for (size_t i = end; i > 3; i -= 3) digits.insert(i - 3, 1, ',');
  return digits;
}

std::string with_sign(bool negative, const Spec& spec) {
  return negative ? "-" : spec.sign == '+' ? "+" : spec.sign == ' ' ? " " : "";
}

std::string format_integer(Int value, const Spec& spec) {
  const char type = spec.type;
  const int base = type == 'x' || type == 'X' ? 16 : type == 'o' ? 8 : type == 'b' ? 2 : 10;
  std::string digits = integer_digits(value, base, type == 'X');
  if (spec.precision >= 0 && static_cast<int>(digits.size()) < spec.precision)
    digits.insert(0, static_cast<size_t>(spec.precision) - digits.size(), '0');
  if (spec.grouping) digits = group_thousands(std::move(digits));
  std::string prefix = with_sign(value < 0, spec);
  if (spec.alternate && base != 10) {
    prefix += '0';
    prefix += type;
  }
  return pad(prefix + digits, spec, '>', prefix.size());
}

std::string format_real(double value, const Spec& spec) {
  if (!std::isfinite(value)) unsupported("formatting infinity or NaN");
  const char type = spec.type == 0 ? 'g' : spec.type == 'F' ? 'f' : spec.type == '%' ? 'f' : spec.type;
  const int precision = spec.precision < 0 ? 6 : spec.precision;
  const double shown = spec.type == '%' ? value * 100 : value;
  char buffer[kMaxWidth + 400];
  std::string format = spec.alternate ? "%#.*" : "%.*";
  format.push_back(type);
  const int length = std::snprintf(buffer, sizeof buffer, format.c_str(), precision, std::abs(shown));
  std::string digits(buffer, static_cast<size_t>(std::clamp<int>(length, 0, sizeof buffer - 1)));
  if (spec.grouping) digits = group_thousands(std::move(digits));
  if (spec.type == '%') digits += '%';
  const std::string sign = with_sign(std::signbit(value), spec);
  return pad(sign + digits, spec, '>', sign.size());
}

std::string cut(const std::string& text, int precision) {
  return precision < 0 ? text : text.substr(0, byte_offset(text, static_cast<size_t>(precision)));
}

// Digits at pos, no larger than kMaxWidth.
int read_number(std::string_view text, size_t& pos, int otherwise) {
  if (pos >= text.size() || text[pos] < '0' || text[pos] > '9') return otherwise;
  int out = 0;
  while (pos < text.size() && text[pos] >= '0' && text[pos] <= '9') {
    out = out * 10 + (text[pos++] - '0');
    if (out > kMaxWidth) unsupported("a format width beyond {}", kMaxWidth);
  }
  return out;
}

class PrintfFormatter {
 public:
  PrintfFormatter(Interp& interp, const std::string& format, const Value& args)
      : interp_(interp), format_(format), is_mapping_(args.is(Type::dict)), mapping_(args) {
    if (args.is(Type::tuple)) {
      values_ = args.items();
    } else {
      values_ = {args};
    }
    // Python lets anything that looks like a mapping go unused, a list too.
    may_be_unused_ = is_mapping_ || args.is(Type::list) || args.is(Type::range);
  }

  std::string run() {
    std::string out;
    for (size_t pos = 0; pos < format_.size();) {
      if (format_[pos] != '%') {
        out += format_[pos++];
        continue;
      }
      ++pos;
      if (pos >= format_.size()) value_error("incomplete format");
      if (format_[pos] == '%') {
        out += '%';
        ++pos;
        continue;
      }
      const std::string piece = directive(pos);
      interp_.meter.bytes(piece.size());
      out += piece;
    }
    if (used_ < values_.size() && !may_be_unused_) type_error("not all arguments converted during string formatting");
    return out;
  }

 private:
  std::string directive(size_t& pos) {
    Value value;
    bool keyed = false;
    if (format_[pos] == '(') {
      if (!is_mapping_) type_error("format requires a mapping");
      const size_t end = format_.find(')', pos);
      if (end == std::string::npos) value_error("incomplete format key");
      const std::string key = format_.substr(pos + 1, end - pos - 1);
      const Value* found = mapping_.as<Dict>().find(key);
      if (found == nullptr) throw PyError("KeyError", repr_text(key));
      value = *found;
      keyed = true;
      pos = end + 1;
    }
    Spec spec;
    bool zero = false;
    for (; pos < format_.size() && std::string_view("#0- +").find(format_[pos]) != std::string_view::npos; ++pos) {
      switch (format_[pos]) {
        case '#': spec.alternate = true; break;
        case '0': zero = true; break;
        case '-': spec.align = '<'; break;
        case '+': spec.sign = '+'; break;
        default: if (spec.sign != '+') spec.sign = ' ';
      }
    }
    if (pos < format_.size() && format_[pos] == '*') unsupported("'*' in a '%' format");
    spec.width = read_number(format_, pos, 0);
    if (pos < format_.size() && format_[pos] == '.') spec.precision = read_number(format_, ++pos, 0);
    if (pos >= format_.size()) value_error("incomplete format");
    spec.type = format_[pos++];
    if (!keyed) {
      if (used_ >= values_.size()) type_error("not enough arguments for format string");
      value = values_[used_++];
    }
    return convert(value, spec, zero);
  }

  std::string convert(const Value& value, Spec& spec, bool zero) {
    const auto zero_fill = [&] {
      if (zero && spec.align == 0) spec.fill.assign(1, '0'), spec.align = '=';
    };
    switch (spec.type) {
      case 's': return pad(cut(interp_.text(value), spec.precision), spec, '>');
      case 'r': return pad(cut(repr(value, interp_.meter), spec.precision), spec, '>');
      case 'd':
      case 'i':
      case 'u': {
        if (!value.is_number())
          type_error("%{} format: a real number is required, not {}", spec.type, type_name(value));
        zero_fill();
        spec.type = 'd';
        if (value.is(Type::real)) {
          const double whole = std::trunc(value.as_double());
          if (!(std::abs(whole) < 1e18)) unsupported("a float of this size as an integer");
          return format_integer(static_cast<Int>(whole), spec);
        }
        return format_integer(value.as_int(), spec);
      }
      case 'x':
      case 'X':
      case 'o':
        if (!value.is_integral())
          type_error("%{} format: an integer is required, not {}", spec.type, type_name(value));
        zero_fill();
        return format_integer(value.as_int(), spec);
      case 'f':
      case 'F':
      case 'e':
      case 'E':
      case 'g':
      case 'G':
        if (!value.is_number()) type_error("must be real number, not {}", type_name(value));
        zero_fill();
        return format_real(value.as_double(), spec);
      default: unsupported("the format '%{}'", spec.type);
    }
  }

  Interp& interp_;
  const std::string& format_;
  Values values_;
  size_t used_ = 0;
  bool is_mapping_, may_be_unused_ = false;
  Value mapping_;
};

Spec parse_spec(const std::string& text) {
  Spec spec;
  size_t pos = 0;
  size_t after_fill = 0;
  if (!text.empty()) next_point(text, after_fill);
  const auto is_align = [&](size_t at) { return at < text.size() && std::string_view("<>=^").find(text[at]) != std::string_view::npos; };
  if (is_align(after_fill)) {
    spec.fill = text.substr(0, after_fill);
    spec.align = text[after_fill];
    pos = after_fill + 1;
  } else if (is_align(0)) {
    spec.align = text[0];
    pos = 1;
  }
  if (pos < text.size() && (text[pos] == '+' || text[pos] == '-' || text[pos] == ' ')) spec.sign = text[pos++];
  if (pos < text.size() && text[pos] == '#') spec.alternate = true, ++pos;
  if (pos < text.size() && text[pos] == '0') {
    if (spec.align == 0) spec.fill.assign(1, '0'), spec.align = '=';
    ++pos;
  }
  spec.width = read_number(text, pos, 0);
  if (pos < text.size() && text[pos] == ',') spec.grouping = true, ++pos;
  if (pos < text.size() && text[pos] == '.') {
    spec.precision = read_number(text, ++pos, -1);
    if (spec.precision < 0) value_error("Format specifier missing precision");
  }
  if (pos < text.size()) spec.type = text[pos++];
  if (pos < text.size()) value_error("Invalid format specifier");
  return spec;
}

std::string format_value(Interp& interp, const Value& value, const std::string& spec_text) {
  if (spec_text.empty()) return interp.text(value);
  const Spec spec = parse_spec(spec_text);
  if (value.is(Type::text)) {
    if ((spec.type != 0 && spec.type != 's') || spec.align == '=')
      value_error("Unknown format code '{}' for object of type 'str'", spec.type == 0 ? '=' : spec.type);
    return pad(cut(value.str(), spec.precision), spec, '<');
  }
  const bool integer_type = spec.type == 0 || std::string_view("dxXob").find(spec.type) != std::string_view::npos;
  if (value.is(Type::integer) && integer_type && spec.precision < 0) {
    return format_integer(value.as_int(), spec);
  }
  if ((value.is(Type::integer) || value.is(Type::real)) && std::string_view("fFeEgG%").find(spec.type) != std::string_view::npos &&
      spec.type != 0)
    return format_real(value.as_double(), spec);
  unsupported("the format '{}' for a '{}'", spec_text, type_name(value));
}

// The value of a replacement field's name: "0", "name", "a.b[c]".
Value field_value(const std::string& field, const Args& args, int& next_index) {
  const size_t end = std::min(field.find_first_of(".["), field.size());
  const std::string first = field.substr(0, end);
  Value value;
  const bool is_number = !first.empty() && std::all_of(first.begin(), first.end(), [](char c) { return c >= '0' && c <= '9'; });
  if (first.empty() || is_number) {
    if (first.empty() ? next_index < 0 : next_index > 0)
      value_error("cannot switch between manual field specification and automatic field numbering");
    size_t pos = 0;
    const auto index = static_cast<size_t>(first.empty() ? next_index++ : read_number(first, pos, 0));
    if (!first.empty()) next_index = -1;
    if (index >= args.positional.size())
      throw PyError("IndexError", fmt::format("Replacement index {} out of range for positional args tuple", index));
    value = args.positional[index];
  } else {
    const auto found = std::find_if(args.keywords.begin(), args.keywords.end(), [&](const auto& k) { return k.first == first; });
    if (found == args.keywords.end()) throw PyError("KeyError", repr_text(first));
    value = found->second;
  }
  if (end < field.size()) unsupported("attributes and items in a format string ('{{{}}}')", field);
  return value;
}

}  // namespace

std::string printf_format(Interp& interp, const std::string& format, const Value& args) {
  interp.meter.bytes(format.size());
  return PrintfFormatter(interp, format, args).run();
}

std::string brace_format(Interp& interp, const std::string& format, const Args& args) {
  std::string out;
  int next_index = 0;
  for (size_t pos = 0; pos < format.size();) {
    const char c = format[pos];
    if ((c == '{' || c == '}') && pos + 1 < format.size() && format[pos + 1] == c) {
      out += c;
      pos += 2;
      continue;
    }
    if (c == '}') value_error("Single '}}' encountered in format string");
    if (c != '{') {
      out += c;
      ++pos;
      continue;
    }
    const size_t end = format.find('}', pos);
    if (end == std::string::npos)
      value_error("{}", pos + 1 == format.size() ? "Single '{' encountered in format string" : "expected '}' before end of string");
    std::string field = format.substr(pos + 1, end - pos - 1), spec;
    if (field.find('{') != std::string::npos) unsupported("a format string with nested fields");
    if (const size_t colon = field.find(':'); colon != std::string::npos) {
      spec = field.substr(colon + 1);
      field.resize(colon);
    }
    char conversion = 0;
    if (const size_t mark = field.find('!'); mark != std::string::npos) {
      conversion = mark + 2 == field.size() ? field[mark + 1] : '?';
      if (conversion != 'r' && conversion != 's') unsupported("the conversion '{}' in a format string", field.substr(mark));
      field.resize(mark);
    }
    Value value = field_value(field, args, next_index);
    if (conversion != 0) value = Value::text(conversion == 'r' ? repr(value, interp.meter) : interp.text(value));
    const std::string piece = format_value(interp, value, spec);
    interp.meter.bytes(piece.size());
    out += piece;
    pos = end + 1;
  }
  return out;
}

std::string format_time(const std::string& format, const std::tm& time) {
  // Python handles %f, %z and %Z of a time without zone itself; the rest is the C library's, in the C locale.
  std::string prepared;
  for (size_t i = 0; i < format.size(); ++i) {
    if (format[i] != '%' || i + 1 == format.size()) {
      prepared += format[i];
      continue;
    }
    const char c = format[++i];
    if (c == 'f') {
      prepared += "000000";
    } else if (c != 'z' && c != 'Z') {
      prepared += '%';
      prepared += c;
    }
  }
  if (prepared.empty()) return "";
  std::string out(prepared.size() * 8 + 256, '\0');
  prepared += ' ';  // so that an empty result can be told from one that did not fit
  const size_t size = std::strftime(out.data(), out.size(), prepared.c_str(), &time);
  if (size == 0) unsupported("the time format '{}'", format);
  out.resize(size - 1);
  return out;
}

}  // namespace dspark::formats::jinja
