// The filters over numbers.
#include <array>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "formats/jinja_filters.h"
#include "formats/jinja_text.h"

namespace dspark::formats::jinja {

namespace {

// Digits as int() reads them: white space around, a sign, single underscores. False when it is no number.
bool parse_int(std::string_view text, int base, Int& out) {
  text = strip(text, true, true);
  const bool negative = !text.empty() && text[0] == '-';
  if (!text.empty() && (text[0] == '-' || text[0] == '+')) text.remove_prefix(1);
  const auto has_prefix = [&](char mark) { return text.size() > 2 && text[0] == '0' && (text[1] | 0x20) == mark; };
  if ((base == 16 && has_prefix('x')) || (base == 8 && has_prefix('o')) || (base == 2 && has_prefix('b'))) {
    text.remove_prefix(2);
    if (text[0] == '_') text.remove_prefix(1);
  }
  if (text.empty()) return false;
  Int value = 0;
  bool after_digit = false;
  for (const char c : text) {
    if (c == '_' && after_digit) {
      after_digit = false;
      continue;
    }
    const int digit = c >= '0' && c <= '9' ? c - '0' : (c | 0x20) >= 'a' && (c | 0x20) <= 'z' ? (c | 0x20) - 'a' + 10 : 99;
    if (digit >= base) {
      if (static_cast<unsigned char>(c) >= 0x80) unsupported("digits beyond ASCII in a number");
      return false;
    }
    after_digit = true;
    if (__builtin_mul_overflow(value, Int(base), &value) || __builtin_add_overflow(value, Int(digit), &value))
      unsupported("an integer beyond 128 bits");
  }
  if (!after_digit) return false;
  out = negative ? -value : value;
  return true;
}

bool parse_float(std::string_view text, double& out) {
  text = strip(text, true, true);
  std::string digits;
  for (size_t i = 0; i < text.size(); ++i) {
    if (static_cast<unsigned char>(text[i]) >= 0x80) unsupported("digits beyond ASCII in a number");
    const auto is_digit = [&](size_t at) { return at < text.size() && text[at] >= '0' && text[at] <= '9'; };
    if (text[i] == '_') {
      if (i == 0 || !is_digit(i - 1) || !is_digit(i + 1)) return false;
      continue;
    }
    digits += text[i];
  }
  std::string_view body = digits;
  const bool negative = !body.empty() && body[0] == '-';
  if (!body.empty() && (body[0] == '-' || body[0] == '+')) body.remove_prefix(1);
  if (body.empty() || body[0] == '-' || body[0] == '+') return false;
  if (body.find('(') != std::string_view::npos) return false;  // "nan(...)" is C's, not Python's
  double value = 0;
  const auto result = std::from_chars(body.data(), body.data() + body.size(), value);
  if (result.ptr != body.data() + body.size()) return false;
  if (result.ec == std::errc::result_out_of_range) {
    value = std::strtod(std::string(body).c_str(), nullptr);  // infinity or zero, as in Python
  } else if (result.ec != std::errc()) {
    return false;
  }
  out = negative ? -value : value;
  return true;
}

Value float_to_int(double value) {
  if (!(std::abs(value) < 1e37)) unsupported("an integer beyond 128 bits");
  return Value::integer(static_cast<Int>(value));
}

Value int_filter(Interp&, const Value& value, const Args& args) {
  const Params params("int", args, {"default", "base"});
  const int64_t base = params.integer(1, 10);
  const Value otherwise = params[0] ? *params[0] : Value::integer(0);
  if (value.is(Type::undefined)) raise_undefined(value);
  if (value.is_integral()) return Value::integer(value.as_int());
  double real = 0;
  if (value.is(Type::real)) {
    real = value.as_double();
    return std::isfinite(real) ? float_to_int(real) : otherwise;
  }
  if (!value.is(Type::text)) return otherwise;
  if (base < 2 || base > 36) unsupported("the base {} of 'int'", base);
  Int parsed = 0;
  if (parse_int(value.str(), static_cast<int>(base), parsed)) return Value::integer(parsed);
  return parse_float(value.str(), real) && std::isfinite(real) ? float_to_int(real) : otherwise;
}

Value float_filter(Interp&, const Value& value, const Args& args) {
  const Params params("float", args, {"default"});
  if (value.is(Type::undefined)) raise_undefined(value);
  double real = 0;
  if (value.is_number()) return Value::real(value.as_double());
  if (value.is(Type::text) && parse_float(value.str(), real)) return Value::real(real);
  return params[0] ? *params[0] : Value::real(0);
}

Value absolute(Interp&, const Value& value, const Args& args) {
  const Params params("abs", args, {});
  if (!value.is_number()) type_error("bad operand type for abs(): '{}'", type_name(value));
  if (value.is(Type::real)) return Value::real(std::abs(value.as_double()));
  return value.as_int() < 0 ? negate(value, true) : Value::integer(value.as_int());
}

Value round_filter(Interp& interp, const Value& value, const Args& args) {
  const Params params("round", args, {"precision", "method"});
  const int64_t precision = params.integer(0, 0);
  const std::string method = params[1] ? params.str(1) : "common";
  if (method != "common" && method != "ceil" && method != "floor")
    throw PyError("FilterArgumentError", "method must be common, ceil or floor");
  if (!value.is_number()) type_error("type {} doesn't define __round__ method", type_name(value));
  if (precision < 0 || precision > 300) unsupported("'round' to {} digits", precision);
  if (method != "common") {
    const Value scale = arithmetic(Expr::power, Value::integer(10), Value::integer(precision), interp);
    const double scaled = arithmetic(Expr::multiply, value, scale, interp).as_double();
    const Value whole = float_to_int(method == "ceil" ? std::ceil(scaled) : std::floor(scaled));
    return arithmetic(Expr::divide, whole, scale, interp);
  }
  if (value.is_integral()) return Value::integer(value.as_int());
  if (!std::isfinite(value.as_double())) return value;
  char buffer[700];  // the exact decimal value, rounded half to even, as Python rounds
  std::snprintf(buffer, sizeof buffer, "%.*f", static_cast<int>(precision), value.as_double());
  return Value::real(std::strtod(buffer, nullptr));
}

Value filesizeformat(Interp&, const Value& value, const Args& args) {
  const Params params("filesizeformat", args, {"binary"});
  const bool binary = params.flag(0, false);
  require_defined(value);
  double bytes = 0;
  if (value.is_number()) {
    bytes = value.as_double();
  } else if (!value.is(Type::text)) {
    type_error("float() argument must be a string or a real number, not '{}'", type_name(value));
  } else if (!parse_float(value.str(), bytes)) {
    value_error("could not convert string to float: {}", repr_text(value.str()));
  }
  const double base = binary ? 1024 : 1000;
  if (bytes == 1) return Value::text("1 Byte");
  if (bytes < base) return Value::text(int_text(float_to_int(bytes).as_int()) + " Bytes");
  static constexpr std::string_view kPrefixes = "kMGTPEZY";
  double unit = base;
  for (size_t i = 0;; ++i) {
    unit *= base;
    if (bytes >= unit && i + 1 < kPrefixes.size()) continue;
    const char letter = binary && i == 0 ? 'K' : kPrefixes[i];
    return Value::text(fmt::format("{:.1f} {}{}", base * bytes / unit, letter, binary ? "iB" : "B"));
  }
}

constexpr FilterEntry kNumberFilters[] = {
    {"int", int_filter}, {"float", float_filter}, {"abs", absolute}, {"round", round_filter}, {"filesizeformat", filesizeformat}};

}  // namespace

std::span<const FilterEntry> number_filters() { return kNumberFilters; }

}  // namespace dspark::formats::jinja
