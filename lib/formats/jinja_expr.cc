// Expressions, and how attributes and items are found.
#include <algorithm>

#include "formats/jinja_eval.h"
#include "formats/jinja_parser.h"
#include "formats/jinja_text.h"

namespace dspark::formats::jinja {

namespace {

Value unsafe(const Value& object, const std::string& name) {
  return Value::undefined(fmt::format("access to attribute {} of '{}' object is unsafe.", repr_text(name), type_name(object)),
                          true);
}

Value no_attribute(const Value& object, const std::string& name) {
  return Value::undefined(fmt::format("'{}' has no attribute {}", object_type_repr(object), repr_text(name)));
}

Value bound_method(const Value& self, const std::string& name) {
  const auto method = std::make_shared<Method>();
  nest(*method, self);
  method->self = self;
  method->name = name;
  return Value::object(Type::method, method);
}

// Kinds that build a container rather than find one.
bool makes_elements(Expr::Kind kind) {
  return kind == Expr::list || kind == Expr::tuple || kind == Expr::slice || kind == Expr::filter || kind == Expr::call;
}

size_t element_count(const Value& value) {
  if (value.is(Type::list) || value.is(Type::tuple)) return value.items().size();
  if (value.is(Type::iterator)) return value.as<Iterator>().items.size() - value.as<Iterator>().pos;
  return 0;
}

// Functions that are classes in Python, with attributes of their own.
bool is_class(const Function& function) {
  return function.name == "dict" || function.name == "namespace" || function.name == "cycler" || function.name == "joiner";
}

// Attributes that every Python object has; templates must not reach them.
bool is_dunder(const std::string& name) {
  return name.size() > 4 && name.starts_with("__") && name.ends_with("__");
}

}  // namespace

Value Interp::eval(const Expr& expr, const ScopePtr& scope) {
  const Depth depth(depth_);
  meter.step();
  try {
    Value value = eval_node(expr, scope);
    if (makes_elements(expr.kind)) meter.elements(element_count(value));
    return value;
  } catch (PyError& error) {
    if (error.line == 0) error.line = expr.line;
    throw;
  }
}

Value Interp::eval_node(const Expr& expr, const ScopePtr& scope) {
  const auto child = [&](size_t index) -> const Expr& { return *expr.children[index]; };
  switch (expr.kind) {
    case Expr::constant: return expr.value;
    case Expr::name: return lookup(expr.symbol, scope);
    case Expr::tuple: return Value::tuple(eval_items(expr, scope, 0));
    case Expr::list: return Value::list(eval_items(expr, scope, 0));
    case Expr::dict: return eval_dict(expr, scope);
    case Expr::attribute: return get_attribute(eval(child(0), scope), expr.text);
    case Expr::item: {
      const Value object = eval(child(0), scope);
      return get_item(object, eval(child(1), scope));
    }
    case Expr::slice: return eval_slice(expr, scope);
    case Expr::call: return eval_call(expr, scope, nullptr);
    case Expr::filter: return eval_filter(expr, scope, nullptr);
    case Expr::test: {
      const Value value = eval(child(0), scope);
      if (!is_test(expr.text))
        throw PyError("TemplateRuntimeError", fmt::format("No test named {} found.", repr_text(expr.text)));
      return Value::boolean(call_test(expr.text, value, eval_arguments(expr, scope)));
    }
    case Expr::negative:
    case Expr::positive: return negate(eval(child(0), scope), expr.kind == Expr::negative);
    case Expr::logical_not: return Value::boolean(!truthy(eval(child(0), scope)));
    case Expr::add:
    case Expr::subtract:
    case Expr::multiply:
    case Expr::divide:
    case Expr::floor_divide:
    case Expr::modulo:
    case Expr::power: {
      const Value left = eval(child(0), scope);
      return arithmetic(expr.kind, left, eval(child(1), scope), *this);
    }
    case Expr::concat: return eval_concat(expr, scope);
    case Expr::compare: return eval_compare(expr, scope);
    case Expr::logical_and: {
      Value left = eval(child(0), scope);
      return truthy(left) ? eval(child(1), scope) : left;
    }
    case Expr::logical_or: {
      Value left = eval(child(0), scope);
      return truthy(left) ? left : eval(child(1), scope);
    }
    case Expr::condition: return eval_condition(expr, scope);
  }
  return {};
}

Values Interp::eval_items(const Expr& expr, const ScopePtr& scope, size_t first) {
  Values items;
  items.reserve(expr.children.size() - first);
  for (size_t i = first; i < expr.children.size(); ++i) items.push_back(eval(*expr.children[i], scope));
  return items;
}

Value Interp::eval_dict(const Expr& expr, const ScopePtr& scope) {
  const auto dict = std::make_shared<Dict>();
  for (size_t i = 0; i + 1 < expr.children.size(); i += 2) {
    const Value key = eval(*expr.children[i], scope);
    dict_set(*dict, key, eval(*expr.children[i + 1], scope), meter);
  }
  return Value::object(Type::dict, dict);
}

Value Interp::eval_slice(const Expr& expr, const ScopePtr& scope) {
  const Value object = eval(*expr.children[0], scope);
  Value bounds[3];
  for (size_t i = 0; i < 3; ++i)
    if (expr.children[i + 1]) bounds[i] = eval(*expr.children[i + 1], scope);
  const auto bound = [&](size_t i) { return expr.children[i + 1] ? &bounds[i] : nullptr; };
  return slice(object, bound(0), bound(1), bound(2), *this);
}

Value Interp::eval_concat(const Expr& expr, const ScopePtr& scope) {
  std::string out;
  for (const auto& child : expr.children) out += text(eval(*child, scope));
  return Value::text(std::move(out));
}

Value Interp::eval_condition(const Expr& expr, const ScopePtr& scope) {
  if (truthy(eval(*expr.children[0], scope))) return eval(*expr.children[1], scope);
  if (expr.children[2]) return eval(*expr.children[2], scope);
  return Value::undefined(fmt::format(
      "the inline if-expression on line {} evaluated to false and no else section was defined.", expr.line));
}

bool Interp::compare_once(Expr::Operator op, const Value& left, const Value& right) {
  switch (op) {
    case Expr::eq: return equal(left, right, meter);
    case Expr::ne: return !equal(left, right, meter);
    case Expr::lt: return compare(left, right, Order::lt, meter);
    case Expr::le: return compare(left, right, Order::le, meter);
    case Expr::gt: return compare(left, right, Order::gt, meter);
    case Expr::ge: return compare(left, right, Order::ge, meter);
    case Expr::in: return contains(right, left, meter);
    case Expr::not_in: return !contains(right, left, meter);
  }
  return false;
}

Value Interp::eval_compare(const Expr& expr, const ScopePtr& scope) {
  Value left = eval(*expr.children[0], scope);
  for (size_t i = 0; i < expr.operators.size(); ++i) {
    Value right = eval(*expr.children[i + 1], scope);
    if (!compare_once(expr.operators[i], left, right)) return Value::boolean(false);
    left = std::move(right);
  }
  return Value::boolean(true);
}

Args Interp::eval_arguments(const Expr& expr, const ScopePtr& scope) {
  Args args;
  args.positional = eval_items(expr, scope, 1);
  for (const auto& [name, value] : expr.keywords) args.keywords.emplace_back(name, eval(*value, scope));
  if (expr.star_args)
    for (const Value& item : iterate(eval(*expr.star_args, scope), meter)) args.positional.push_back(item);
  if (expr.star_keywords) {
    const Value more = eval(*expr.star_keywords, scope);
    if (!more.is(Type::dict)) type_error("argument after ** must be a mapping, not {}", type_name(more));
    for (const auto& [key, value] : more.as<Dict>().entries) {
      if (!key.is(Type::text)) type_error("keywords must be strings");
      for (const auto& keyword : args.keywords)
        if (keyword.first == key.str()) type_error("got multiple values for keyword argument '{}'", key.str());
      args.keywords.emplace_back(key.str(), value);
    }
  }
  return args;
}

Value Interp::eval_call(const Expr& expr, const ScopePtr& scope, const Value* caller) {
  const Value callee = eval(*expr.children[0], scope);
  Args args = eval_arguments(expr, scope);
  if (caller != nullptr) args.keywords.emplace_back("caller", *caller);
  return call(callee, args);
}

Value Interp::eval_filter(const Expr& expr, const ScopePtr& scope, const Value* input) {
  // The innermost filter of a filter block has no input of its own.
  const Value value = expr.children[0] == nullptr                        ? *input
                      : input != nullptr && expr.children[0]->kind == Expr::filter ? eval_filter(*expr.children[0], scope, input)
                                                                          : eval(*expr.children[0], scope);
  if (!is_filter(expr.text))
    throw PyError("TemplateRuntimeError", fmt::format("No filter named {} found.", repr_text(expr.text)));
  return call_filter(expr.text, value, eval_arguments(expr, scope));
}

// `object.name`: Python's attribute first, then the item of that name.
Value Interp::get_attribute(const Value& object, const std::string& name) {
  if (object.is(Type::undefined)) raise_undefined(object);
  if (is_dunder(name)) {
    static constexpr std::string_view kCommon[] = {"__class__", "__doc__", "__init__", "__new__", "__eq__", "__str__",
                                                   "__repr__", "__hash__", "__dir__", "__format__", "__getattribute__",
                                                   "__reduce__", "__reduce_ex__", "__setattr__", "__delattr__", "__sizeof__",
                                                   "__subclasshook__", "__init_subclass__"};
    if (std::find(std::begin(kCommon), std::end(kCommon), name) != std::end(kCommon)) return unsafe(object, name);
    if (!object.is(Type::dict) || object.as<Dict>().find(name) == nullptr)
      unsupported("the attribute '{}'", name);
  }
  if (object.is(Type::function) && is_class(object.as<Function>()))
    unsupported("the attribute '{}' of '{}'", name, object.as<Function>().name);
  if (object.is(Type::name_space)) {
    for (const auto& [key, value] : object.as<Namespace>().attributes)
      if (key == name) return name.starts_with("_") ? unsafe(object, name) : value;
    return no_attribute(object, name);
  }
  if (object.is(Type::loop)) {
    bool found = false;
    Value value = loop_attribute(object, name, found);
    return found ? value : no_attribute(object, name);
  }
  switch (attribute_kind(object, name)) {
    case AttributeKind::method: return bound_method(object, name);
    case AttributeKind::changes_object: return unsafe(object, name);
    case AttributeKind::other: return call_method(*this, object, name, {});
    case AttributeKind::none: break;
  }
  if (object.is(Type::dict))
    if (const Value* value = dict_get(object.as<Dict>(), Value::text(name), meter)) return *value;
  return no_attribute(object, name);
}

// `object[index]`: the item first, then Python's attribute of that name.
Value Interp::get_item(const Value& object, const Value& index) {
  if (object.is(Type::undefined)) raise_undefined(object);
  if (object.is(Type::dict)) {
    const bool is_hashable = !index.is(Type::list) && !index.is(Type::dict);
    const Value* value = is_hashable ? dict_get(object.as<Dict>(), index, meter) : nullptr;
    if (value != nullptr) return *value;
  }
  if (index.is_integral()) {
    const auto size = [&]() -> Int {
      return object.is(Type::list) || object.is(Type::tuple) || object.is(Type::text) || object.is(Type::range)
                 ? static_cast<Int>(length(object)) : -1;
    }();
    if (size >= 0) {
      const Int at = index.as_int() < 0 ? index.as_int() + size : index.as_int();
      if (at >= 0 && at < size) {
        const auto i = static_cast<size_t>(at);
        if (object.is(Type::text)) {
          const auto& value = object.as<Text>();
          if (value.ascii()) return Value::text(std::string(1, value.text[i]));
          meter.scan(value.text.size());
          const size_t begin = byte_offset(value.text, i);
          size_t end = begin;
          next_point(value.text, end);
          return Value::text(value.text.substr(begin, end - begin));
        }
        if (object.is(Type::range)) {
          const auto& range = object.as<Range>();
          return Value::integer(range.start + at * range.step);
        }
        return object.items()[i];
      }
    }
  }
  if (object.is(Type::function) && is_class(object.as<Function>()))
    unsupported("an item of '{}'", object.as<Function>().name);
  if (index.is(Type::text)) {
    switch (attribute_kind(object, index.str())) {
      case AttributeKind::method: return bound_method(object, index.str());
      case AttributeKind::changes_object: return unsafe(object, index.str());
      case AttributeKind::other: return call_method(*this, object, index.str(), {});
      case AttributeKind::none: break;
    }
    if (object.is(Type::name_space) || object.is(Type::loop)) return get_attribute(object, index.str());
    if (is_dunder(index.str())) return unsafe(object, index.str());
    return no_attribute(object, index.str());
  }
  return Value::undefined(fmt::format("{} has no element {}", object_type_repr(object), repr(index, meter)));
}

}  // namespace dspark::formats::jinja
