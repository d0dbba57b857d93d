// The values a template computes with: Python's, as far as templates see them.
//
// A Value is small and cheap to copy; text and containers are shared and never change once built (the sandbox of the
// original refuses methods that change a list or a dict), so copies behave like Python references. The exceptions are
// iterators, loops, cyclers, joiners and namespaces, which change in place as they do in Python.
// Containers know how deeply they nest and cannot nest deeper than kMaxNesting: recursion over a value is bounded.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/json.h"

namespace dspark::formats::jinja {

using Int = __int128;

// What goes wrong inside a template, before the line is known. `kind` as in TemplateError::kind().
struct PyError {
  PyError(std::string error_kind, std::string text) : kind(std::move(error_kind)), message(std::move(text)) {}
  std::string kind, message;
  int line = 0;  // of the innermost node, filled in on the way out
};

template <typename... Args>
[[noreturn]] void type_error(fmt::format_string<Args...> format, Args&&... args) {
  throw PyError("TypeError", fmt::format(format, std::forward<Args>(args)...));
}
template <typename... Args>
[[noreturn]] void value_error(fmt::format_string<Args...> format, Args&&... args) {
  throw PyError("ValueError", fmt::format(format, std::forward<Args>(args)...));
}
template <typename... Args>
[[noreturn]] void unsupported(fmt::format_string<Args...> format, Args&&... args) {
  throw PyError("unsupported", fmt::format(format, std::forward<Args>(args)...));
}

inline constexpr int kMaxNesting = 200;

// Bounds what one rendering may do: steps (evaluated nodes, visited elements) and bytes of text made.
class Meter {
 public:
  Meter(uint64_t max_steps, uint64_t max_bytes) : steps_left_(max_steps), bytes_left_(max_bytes) {}
  void step(uint64_t count = 1) {
    if (count > steps_left_) throw PyError("limit", "the template runs too long (step limit)");
    steps_left_ -= count;
  }
  // Call before making `count` bytes.
  void bytes(uint64_t count) {
    if (count > bytes_left_) throw PyError("limit", "the template makes too much text (memory limit)");
    bytes_left_ -= count;
    step(count / 64);
  }
  // Call before making a container of `count` elements.
  void elements(uint64_t count) { bytes(count > kMost ? UINT64_MAX : count * kElementBytes); }
  // Call before looking through `count` bytes.
  void scan(uint64_t count) { step(count / 64); }

 private:
  static constexpr uint64_t kElementBytes = 64, kMost = UINT64_MAX / kElementBytes;
  uint64_t steps_left_, bytes_left_;
};

enum class Type : uint8_t {
  undefined, none, boolean, integer, real, text, list, tuple, dict, view, iterator, range,
  macro, function, method, name_space, loop, cycler, joiner
};

struct Object {
  virtual ~Object() = default;
  int nesting = 0;
};

class Value;
using Values = std::vector<Value>;

struct Text : Object {
  Text(std::string value, bool is_markup);
  std::string text;
  size_t length;  // code points
  bool markup;    // result of `escape` or `safe`
  bool ascii() const { return length == text.size(); }
};

class Value {
 public:
  Value() = default;  // undefined without a name: print nothing
  static Value none() { return Value(Type::none); }
  static Value boolean(bool value);
  static Value integer(Int value);
  static Value real(double value);
  static Value text(std::string value, bool markup = false);
  static Value list(Values items) { return sequence(Type::list, std::move(items)); }
  static Value tuple(Values items) { return sequence(Type::tuple, std::move(items)); }
  static Value dict(std::vector<std::pair<Value, Value>> entries);
  static Value iterator(Values items, const char* type_name = "generator");
  static Value undefined(std::string message, bool security = false);
  static Value object(Type type, std::shared_ptr<Object> object) { return Value(type, std::move(object)); }

  Type type() const { return type_; }
  bool is(Type type) const { return type_ == type; }
  bool is_number() const { return type_ == Type::boolean || type_ == Type::integer || type_ == Type::real; }
  bool is_integral() const { return type_ == Type::boolean || type_ == Type::integer; }
  bool is_markup() const { return type_ == Type::text && as<Text>().markup; }

  bool as_bool() const { return integer_ != 0; }
  Int as_int() const { return integer_; }      // of a boolean too
  double as_double() const;                    // of any number
  const std::string& str() const { return as<Text>().text; }
  const Values& items() const;                 // of a list or tuple
  template <typename T>
  T& as() const { return static_cast<T&>(*object_); }
  template <typename T>
  std::shared_ptr<T> shared() const { return std::static_pointer_cast<T>(object_); }
  const Object* identity() const { return object_.get(); }
  int nesting() const { return object_ ? object_->nesting : 0; }

 private:
  explicit Value(Type type) : type_(type) {}
  Value(Type type, std::shared_ptr<Object> object) : type_(type), object_(std::move(object)) {}
  static Value sequence(Type type, Values items);

  Type type_ = Type::undefined;
  double real_ = 0;
  Int integer_ = 0;
  std::shared_ptr<Object> object_;
};

struct Sequence : Object {
  Values items;
  bool is_group = false;  // an element of `groupby`: a tuple whose items are also called grouper and list
};
struct Dict : Object {
  std::vector<std::pair<Value, Value>> entries;  // in order of insertion
  const Value* find(std::string_view key) const;
};
struct View : Object {  // dict.keys(), values(), items()
  enum Kind { keys, values, items } kind = keys;
  std::shared_ptr<Dict> dict;
};
struct Iterator : Object {
  Values items;
  size_t pos = 0;
  const char* type_name = "generator";
};
struct Range : Object {
  int64_t start = 0, stop = 0, step = 1, size = 0;
};
struct UndefinedInfo : Object {
  std::string message;
  bool security = false;
};
struct Method : Object {  // a method bound to its object, `'a'.upper`
  Value self;
  std::string name;
};
struct Namespace : Object {
  std::vector<std::pair<std::string, Value>> attributes;
};
struct Cycler : Object {
  Values items;
  size_t pos = 0;
};
struct Joiner : Object {
  Value separator;
  bool used = false;
};

// Arguments of a call.
struct Args {
  Values positional;
  std::vector<std::pair<std::string, Value>> keywords;
};

// Raises nesting to one more than `child`'s; throws when that is too deep.
void nest(Object& object, const Value& child);

std::string type_name(const Value& value);         // "str", "NoneType"
std::string object_type_repr(const Value& value);  // "str object", "None"
[[noreturn]] void raise_undefined(const Value& value);
void require_defined(const Value& value);

bool truthy(const Value& value);
std::string to_text(const Value& value, Meter& meter);  // str(value)
std::string repr(const Value& value, Meter& meter);
bool equal(const Value& left, const Value& right, Meter& meter);  // ==
bool same(const Value& left, const Value& right);                 // `is`
// left < right, or <=, >, >= ; TypeError as Python words it.
enum class Order { lt, le, gt, ge };
bool compare(const Value& left, const Value& right, Order order, Meter& meter);
bool contains(const Value& container, const Value& item, Meter& meter);  // item in container

void require_hashable(const Value& key);
const Value* dict_get(const Dict& dict, const Value& key, Meter& meter);
void dict_set(Dict& dict, const Value& key, const Value& value, Meter& meter);

size_t length(const Value& value);  // len(); TypeError when there is none
bool has_length(const Value& value);
bool is_iterable(const Value& value);
// All elements, as iterating gives them. Consumes an iterator. TypeError when not iterable.
Values iterate(const Value& value, Meter& meter);
Values range_items(const Range& range);
Values view_items(const View& view);

Value from_json(const OrderedJson& json, Meter& meter);
struct JsonStyle {
  bool ascii = false, sort_keys = false;
  std::optional<std::string> indent;  // one level of indentation; none: everything on one line
  std::string item_separator = ", ", key_separator = ": ";
};
std::string to_json(const Value& value, const JsonStyle& style, Meter& meter);

}  // namespace dspark::formats::jinja
