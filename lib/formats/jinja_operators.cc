// Arithmetic, slices, and the binding of arguments to parameters, with Python's rules and messages.
#include <algorithm>
#include <cmath>

#include "formats/jinja_eval.h"
#include "formats/jinja_filters.h"
#include "formats/jinja_text.h"

namespace dspark::formats::jinja {

namespace {

const char* sign_of(Expr::Kind kind) {
  switch (kind) {
    case Expr::add: return "+";
    case Expr::subtract: return "-";
    case Expr::multiply: return "*";
    case Expr::divide: return "/";
    case Expr::floor_divide: return "//";
    case Expr::modulo: return "%";
    default: return "** or pow()";
  }
}

[[noreturn]] void bad_operands(Expr::Kind kind, const Value& left, const Value& right) {
  type_error("unsupported operand type(s) for {}: '{}' and '{}'", sign_of(kind), type_name(left), type_name(right));
}

[[noreturn]] void zero_division(const char* message) { throw PyError("ZeroDivisionError", message); }
[[noreturn]] void too_big() { unsupported("an integer beyond 128 bits"); }

Int floor_divide(Int left, Int right) {
  Int quotient = left / right;
  if (left % right != 0 && (left < 0) != (right < 0)) --quotient;
  return quotient;
}

Int floor_modulo(Int left, Int right) {
  const Int rest = left % right;
  return rest != 0 && (rest < 0) != (right < 0) ? rest + right : rest;
}

Value int_power(Int base, Int exponent) {
  if (exponent < 0) {
    if (base == 0) zero_division("0.0 cannot be raised to a negative power");
    return Value::real(std::pow(static_cast<double>(base), static_cast<double>(exponent)));
  }
  if (base == 0 || base == 1) return Value::integer(exponent == 0 ? 1 : base);
  if (base == -1) return Value::integer(exponent % 2 == 0 ? 1 : -1);
  if (exponent > 127) too_big();
  Int out = 1;
  for (Int i = 0; i < exponent; ++i)
    if (__builtin_mul_overflow(out, base, &out)) too_big();
  return Value::integer(out);
}

Value int_arithmetic(Expr::Kind kind, Int left, Int right) {
  Int out = 0;
  bool overflow = false;
  switch (kind) {
    case Expr::add: overflow = __builtin_add_overflow(left, right, &out); break;
    case Expr::subtract: overflow = __builtin_sub_overflow(left, right, &out); break;
    case Expr::multiply: overflow = __builtin_mul_overflow(left, right, &out); break;
    case Expr::divide: {
      if (right == 0) zero_division("division by zero");
      constexpr Int kExact = Int(1) << 53;
      if (left > kExact || left < -kExact || right > kExact || right < -kExact)
        unsupported("dividing integers beyond 2^53");
      return Value::real(static_cast<double>(left) / static_cast<double>(right));
    }
    case Expr::floor_divide:
      if (right == 0) zero_division("integer division or modulo by zero");
      if (right == -1) {
        overflow = __builtin_sub_overflow(Int(0), left, &out);
      } else {
        out = floor_divide(left, right);
      }
      break;
    case Expr::modulo:
      if (right == 0) zero_division("integer modulo by zero");
      out = right == -1 ? 0 : floor_modulo(left, right);
      break;
    default: return int_power(left, right);
  }
  if (overflow) too_big();
  return Value::integer(out);
}

// Python's float divmod: the quotient is floored, the rest has the divisor's sign.
void float_divmod(double left, double right, double& quotient, double& rest) {
  rest = std::fmod(left, right);
  double div = (left - rest) / right;
  if (rest != 0) {
    if ((right < 0) != (rest < 0)) {
      rest += right;
      div -= 1.0;
    }
  } else {
    rest = std::copysign(0.0, right);
  }
  if (div != 0) {
    quotient = std::floor(div);
    if (div - quotient > 0.5) quotient += 1.0;
  } else {
    quotient = std::copysign(0.0, left / right);
  }
}

Value float_power(double base, double exponent) {
  if (base == 0 && exponent < 0) zero_division("0.0 cannot be raised to a negative power");
  if (base < 0 && std::isfinite(base) && std::isfinite(exponent) && exponent != std::floor(exponent))
    unsupported("complex numbers");
  const double out = std::pow(base, exponent);
  if (std::isinf(out) && std::isfinite(base) && std::isfinite(exponent))
    throw PyError("OverflowError", "(34, 'Numerical result out of range')");
  return Value::real(out);
}

Value float_arithmetic(Expr::Kind kind, double left, double right) {
  double quotient = 0, rest = 0;
  switch (kind) {
    case Expr::add: return Value::real(left + right);
    case Expr::subtract: return Value::real(left - right);
    case Expr::multiply: return Value::real(left * right);
    case Expr::divide:
      if (right == 0) zero_division("float division by zero");
      return Value::real(left / right);
    case Expr::floor_divide:
      if (right == 0) zero_division("float floor division by zero");
      float_divmod(left, right, quotient, rest);
      return Value::real(quotient);
    case Expr::modulo:
      if (right == 0) zero_division("float modulo");
      float_divmod(left, right, quotient, rest);
      return Value::real(rest);
    default: return float_power(left, right);
  }
}

bool is_sequence(const Value& value) {
  return value.is(Type::text) || value.is(Type::list) || value.is(Type::tuple);
}

Value add_sequences(const Value& left, const Value& right, Meter& meter) {
  if (left.type() != right.type())
    type_error("can only concatenate {} (not \"{}\") to {}", type_name(left), type_name(right), type_name(left));
  if (left.is(Type::text)) {
    meter.bytes(left.str().size() + right.str().size());
    if (!left.is_markup() && !right.is_markup()) return Value::text(left.str() + right.str());
    const auto escaped = [&](const Value& part) { return part.is_markup() ? part.str() : escape_html(part.str(), meter); };
    return Value::text(escaped(left) + escaped(right), true);
  }
  meter.elements(left.items().size() + right.items().size());
  Values items = left.items();
  items.insert(items.end(), right.items().begin(), right.items().end());
  return left.is(Type::list) ? Value::list(std::move(items)) : Value::tuple(std::move(items));
}

Value repeat(const Value& sequence, const Value& count, Meter& meter) {
  if (!count.is_integral()) type_error("can't multiply sequence by non-int of type '{}'", type_name(count));
  const Int wanted = std::max<Int>(count.as_int(), 0);
  if (wanted > (Int(1) << 40)) throw PyError("limit", "the template makes too much text (memory limit)");
  const auto times = static_cast<uint64_t>(wanted);
  if (sequence.is(Type::text)) {
    if (sequence.is_markup()) unsupported("repeating escaped text");
    const std::string& text = sequence.str();
    if (text.empty()) return Value::text("");
    meter.bytes(times > UINT64_MAX / text.size() ? UINT64_MAX : times * text.size());
    std::string out;
    out.reserve(times * text.size());
    for (uint64_t i = 0; i < times; ++i) out += text;
    return Value::text(std::move(out));
  }
  const Values& items = sequence.items();
  Values out;
  if (!items.empty()) {
    meter.elements(times > UINT64_MAX / items.size() ? UINT64_MAX : times * items.size());
    for (uint64_t i = 0; i < times; ++i) out.insert(out.end(), items.begin(), items.end());
  }
  return sequence.is(Type::list) ? Value::list(std::move(out)) : Value::tuple(std::move(out));
}

}  // namespace

Value arithmetic(Expr::Kind kind, const Value& left, const Value& right, Interp& interp) {
  if (left.is_number() && right.is_number()) {
    if (left.is_integral() && right.is_integral()) return int_arithmetic(kind, left.as_int(), right.as_int());
    return float_arithmetic(kind, left.as_double(), right.as_double());
  }
  if (kind == Expr::modulo && left.is(Type::text)) {
    if (left.is_markup()) unsupported("formatting escaped text");
    if (right.is(Type::undefined)) raise_undefined(right);
    return Value::text(printf_format(interp, left.str(), right));
  }
  require_defined(left);
  require_defined(right);
  if (kind == Expr::add && is_sequence(left)) return add_sequences(left, right, interp.meter);
  if (kind == Expr::multiply && is_sequence(left)) return repeat(left, right, interp.meter);
  if (kind == Expr::multiply && is_sequence(right)) return repeat(right, left, interp.meter);
  if (left.is(Type::view) || right.is(Type::view)) {
    if (kind == Expr::subtract) unsupported("the difference of dictionary views");
  }
  bad_operands(kind, left, right);
}

Value negate(const Value& value, bool minus) {
  require_defined(value);
  if (!value.is_number()) type_error("bad operand type for unary {}: '{}'", minus ? '-' : '+', type_name(value));
  if (value.is(Type::real)) return Value::real(minus ? -value.as_double() : value.as_double());
  Int out = value.as_int();
  if (minus && __builtin_sub_overflow(Int(0), out, &out)) too_big();
  return Value::integer(out);
}

int64_t to_index(const Value& value) {
  if (!value.is_integral()) type_error("'{}' object cannot be interpreted as an integer", type_name(value));
  if (value.as_int() > INT64_MAX || value.as_int() < INT64_MIN)
    throw PyError("OverflowError", "Python int too large to convert to C ssize_t");
  return static_cast<int64_t>(value.as_int());
}

Value slice(const Value& object, const Value* start, const Value* stop, const Value* step, Interp& interp) {
  require_defined(object);
  if (object.is(Type::dict)) type_error("unhashable type: 'slice'");
  if (!is_sequence(object) && !object.is(Type::range)) type_error("'{}' object is not subscriptable", type_name(object));
  const auto bound = [](const Value* value, Int otherwise) -> Int {
    if (value == nullptr || value->is(Type::none)) return otherwise;
    if (!value->is_integral()) type_error("slice indices must be integers or None or have an __index__ method");
    return value->as_int();
  };
  const Int size = static_cast<Int>(length(object));
  const Int by = std::clamp<Int>(bound(step, 1), -(Int(1) << 62), Int(1) << 62);
  if (by == 0) value_error("slice step cannot be zero");
  const auto clamp = [&](Int at) {
    if (at < 0) at = at < -size ? (by < 0 ? -1 : 0) : at + size;
    return at >= size ? (by < 0 ? size - 1 : size) : at;
  };
  const bool no_start = start == nullptr || start->is(Type::none), no_stop = stop == nullptr || stop->is(Type::none);
  const Int from = no_start ? (by < 0 ? size - 1 : 0) : clamp(bound(start, 0));
  const Int to = no_stop ? (by < 0 ? -1 : size) : clamp(bound(stop, 0));
  interp.meter.step(static_cast<uint64_t>(size) / 64 + 1);
  if (object.is(Type::text)) {
    const auto& value = object.as<Text>();
    if (value.markup) unsupported("slicing escaped text");
    interp.meter.bytes(value.text.size());
    if (by == 1) {
      if (to <= from) return Value::text("");
      const auto first = static_cast<size_t>(from), count = static_cast<size_t>(to - from);
      if (value.ascii()) return Value::text(value.text.substr(first, count));
      const size_t begin = byte_offset(value.text, first);
      return Value::text(value.text.substr(begin, byte_offset(std::string_view(value.text).substr(begin), count)));
    }
    std::u32string points;
    for (size_t pos = 0; pos < value.text.size();) points += next_point(value.text, pos);
    std::string out;
    for (Int i = from; by > 0 ? i < to : i > to; i += by) append_point(out, points[static_cast<size_t>(i)]);
    return Value::text(std::move(out));
  }
  const Values items = iterate(object, interp.meter);
  Values out;
  for (Int i = from; by > 0 ? i < to : i > to; i += by) out.push_back(items[static_cast<size_t>(i)]);
  if (object.is(Type::range)) unsupported("slicing a range");
  return object.is(Type::list) ? Value::list(std::move(out)) : Value::tuple(std::move(out));
}

Params::Params(std::string_view function, const Args& args, std::initializer_list<std::string_view> names, size_t required)
    : function_(function), names_(names), values_(names.size()) {
  if (args.positional.size() > names_.size())
    type_error("{}() takes at most {} arguments ({} given)", function, names_.size(), args.positional.size());
  for (size_t i = 0; i < args.positional.size(); ++i) values_[i] = &args.positional[i];
  for (const auto& [name, value] : args.keywords) {
    const auto found = std::find(names_.begin(), names_.end(), name);
    if (found == names_.end()) type_error("{}() got an unexpected keyword argument '{}'", function, name);
    const auto index = static_cast<size_t>(found - names_.begin());
    if (values_[index] != nullptr) type_error("{}() got multiple values for argument '{}'", function, name);
    values_[index] = &value;
  }
  for (size_t i = 0; i < required; ++i)
    if (values_[i] == nullptr) type_error("{}() missing 1 required positional argument: '{}'", function, names_[i]);
}

int64_t Params::integer(size_t index, int64_t otherwise) const {
  if (values_[index] == nullptr) return otherwise;
  require_defined(*values_[index]);
  return to_index(*values_[index]);
}

const std::string& Params::str(size_t index) const {
  DS_ASSERT(values_[index] != nullptr, "{}: parameter {} has no default", function_, names_[index]);
  const Value& value = *values_[index];
  require_defined(value);
  if (!value.is(Type::text)) type_error("{}() argument '{}' must be str, not {}", function_, names_[index], type_name(value));
  return value.str();
}

}  // namespace dspark::formats::jinja
