// Tests: what stands after `is`, and in select, reject and their kin.
#include <algorithm>
#include <string_view>

#include "formats/jinja_eval.h"
#include "formats/jinja_parser.h"
#include "formats/jinja_text.h"

namespace dspark::formats::jinja {

namespace {

using Test = bool (*)(Interp&, const Value&, const Args&);

Value remainder(Interp& interp, const Value& value, const Value& by) {
  return arithmetic(Expr::modulo, value, by, interp);
}

template <int kRest>
bool has_parity(Interp& interp, const Value& value, const Args& args) {
  const Params params("parity", args, {});
  return equal(remainder(interp, value, Value::integer(2)), Value::integer(kRest), interp.meter);
}

bool is_divisible(Interp& interp, const Value& value, const Args& args) {
  const Params params("divisibleby", args, {"num"}, 1);
  return equal(remainder(interp, value, *params[0]), Value::integer(0), interp.meter);
}

template <bool (*kTest)(const Value&)>
bool simple(Interp&, const Value& value, const Args& args) {
  const Params params("test", args, {});
  return kTest(value);
}

const Value& other(const Args& args) {
  if (args.positional.size() != 1 || !args.keywords.empty()) type_error("the test takes exactly one argument");
  return args.positional[0];
}

template <Order kOrder>
bool ordered(Interp& interp, const Value& value, const Args& args) {
  return compare(value, other(args), kOrder, interp.meter);
}
bool equals(Interp& interp, const Value& value, const Args& args) { return equal(value, other(args), interp.meter); }
bool differs(Interp& interp, const Value& value, const Args& args) { return !equal(value, other(args), interp.meter); }
bool is_in(Interp& interp, const Value& value, const Args& args) { return contains(other(args), value, interp.meter); }
bool is_same(Interp&, const Value& value, const Args& args) { return same(value, other(args)); }

bool all_cased(Interp& interp, const Value& value, bool want_upper) {
  return truthy(call_method(interp, Value::text(interp.text(value)), want_upper ? "isupper" : "islower", {}));
}
template <bool kUpper>
bool cased(Interp& interp, const Value& value, const Args& args) {
  const Params params(kUpper ? "test_upper" : "test_lower", args, {});
  return all_cased(interp, value, kUpper);
}

bool names_filter(Interp&, const Value& value, const Args& args) {
  const Params params("test_filter", args, {});
  require_hashable(value);
  return value.is(Type::text) && is_filter(value.str());
}
bool names_test(Interp&, const Value& value, const Args& args) {
  const Params params("test_test", args, {});
  require_hashable(value);
  return value.is(Type::text) && is_test(value.str());
}

bool defined(const Value& v) { return !v.is(Type::undefined); }
bool undefined(const Value& v) { return v.is(Type::undefined); }
bool none(const Value& v) { return v.is(Type::none); }
bool boolean(const Value& v) { return v.is(Type::boolean); }
bool is_true(const Value& v) { return v.is(Type::boolean) && v.as_bool(); }
bool is_false(const Value& v) { return v.is(Type::boolean) && !v.as_bool(); }
bool integer(const Value& v) { return v.is(Type::integer); }
bool real(const Value& v) { return v.is(Type::real); }
bool number(const Value& v) { return v.is_number(); }
bool string(const Value& v) { return v.is(Type::text); }
bool mapping(const Value& v) { return v.is(Type::dict); }
bool sequence(const Value& v) {  // has a length and items; an undefined value's __getitem__ raises on use only
  return v.is(Type::text) || v.is(Type::list) || v.is(Type::tuple) || v.is(Type::dict) || v.is(Type::range) || undefined(v);
}
bool callable(const Value& v) {
  return v.is(Type::macro) || v.is(Type::function) || v.is(Type::method) || v.is(Type::loop) || v.is(Type::joiner) ||
         undefined(v);
}
bool escaped(const Value& v) { return v.is_markup(); }

struct Entry {
  std::string_view name;
  Test test;
};

constexpr Entry kTests[] = {
    {"odd", has_parity<1>}, {"even", has_parity<0>}, {"divisibleby", is_divisible},
    {"defined", simple<defined>}, {"undefined", simple<undefined>}, {"none", simple<none>},
    {"boolean", simple<boolean>}, {"true", simple<is_true>}, {"false", simple<is_false>},
    {"integer", simple<integer>}, {"float", simple<real>}, {"number", simple<number>},
    {"string", simple<string>}, {"mapping", simple<mapping>}, {"sequence", simple<sequence>},
    {"iterable", simple<is_iterable>}, {"callable", simple<callable>}, {"escaped", simple<escaped>},
    {"upper", cased<true>}, {"lower", cased<false>}, {"filter", names_filter}, {"test", names_test},
    {"sameas", is_same}, {"in", is_in},
    {"==", equals}, {"eq", equals}, {"equalto", equals}, {"!=", differs}, {"ne", differs},
    {">", ordered<Order::gt>}, {"gt", ordered<Order::gt>}, {"greaterthan", ordered<Order::gt>},
    {">=", ordered<Order::ge>}, {"ge", ordered<Order::ge>},
    {"<", ordered<Order::lt>}, {"lt", ordered<Order::lt>}, {"lessthan", ordered<Order::lt>},
    {"<=", ordered<Order::le>}, {"le", ordered<Order::le>}};

const Entry* find_test(std::string_view name) {
  const auto found = std::find_if(std::begin(kTests), std::end(kTests), [&](const Entry& e) { return e.name == name; });
  return found == std::end(kTests) ? nullptr : found;
}

}  // namespace

bool is_test(std::string_view name) { return find_test(name) != nullptr; }

bool Interp::call_test(const std::string& name, const Value& value, const Args& args) {
  const Entry* entry = find_test(name);
  if (entry == nullptr) throw PyError("TemplateRuntimeError", fmt::format("No test named {}.", repr_text(name)));
  return entry->test(*this, value, args);
}

}  // namespace dspark::formats::jinja
