// Runs a parsed template: one Interp per rendering, over an Ast that outlives it. Not thread-safe; many may run at once
// over the same Ast.
//
// Names are looked up through a chain of scopes (loop iteration, macro, block, template), then in the context, then
// among the built-in functions. Only `for`, `macro`, `call`, `with`, `filter` and `set` blocks open a scope; what they
// set is gone after them.
#pragma once

#include <ctime>
#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "formats/jinja_ast.h"
#include "formats/jinja_value.h"

namespace dspark::formats::jinja {

inline constexpr int kMaxDepth = 1000;  // of nested evaluation: bounds the machine's stack

class Interp;

struct Scope {
  std::vector<std::pair<int, Value>> variables;
  std::shared_ptr<Scope> parent;
};
using ScopePtr = std::shared_ptr<Scope>;

struct Function : Object {
  std::string name;
  Value (*call)(Interp&, const Args&) = nullptr;
};

struct Macro : Object {
  const Stmt* stmt = nullptr;
  ScopePtr scope;
};

// A running `for`. It pulls its elements one at a time, since what the body does may change what its filter lets through.
struct Loop : Object {
  const Stmt* stmt = nullptr;
  ScopePtr outer;
  std::shared_ptr<Iterator> source;
  int depth0 = 0;
  int64_t index0 = -1, length = -1;  // -1: not known yet
  bool has_next = false, has_previous = false, has_changed = false;
  bool filtered = false;  // `source` holds only what passed the filter
  Value next, previous, current;
  Value changed;
};

class Interp {
 public:
  Interp(const Ast& ast, Meter meter, const std::tm& now) : meter(meter), now(now), ast_(ast) {}
  ~Interp();

  // The template's text over a context (a dict).
  std::string render(const Value& context);

  // What filters, tests and methods need.
  Value get_attribute(const Value& object, const std::string& name);
  Value get_item(const Value& object, const Value& index);
  Value call(const Value& callee, const Args& args);
  Value call_filter(const std::string& name, const Value& value, const Args& args);
  bool call_test(const std::string& name, const Value& value, const Args& args);
  std::string text(const Value& value) { return to_text(value, meter); }
  std::shared_ptr<Namespace> make_namespace();

  Meter meter;
  const std::tm now;

 private:
  enum class Flow { normal, break_loop, continue_loop };
  struct Depth {
    explicit Depth(int& counter) : depth(counter) {
      if (depth >= kMaxDepth) throw PyError("limit", "the template recurses too deeply");
      ++depth;
    }
    ~Depth() { --depth; }
    int& depth;
  };

  // jinja_eval.cc
  Flow exec(const Body& body, const ScopePtr& scope);
  Flow exec_stmt(const Stmt& stmt, const ScopePtr& scope);
  Flow exec_if(const Stmt& stmt, const ScopePtr& scope);
  Flow exec_with(const Stmt& stmt, const ScopePtr& scope);
  Flow exec_set_block(const Stmt& stmt, const ScopePtr& scope);
  Flow exec_filter_block(const Stmt& stmt, const ScopePtr& scope);
  void exec_call(const Stmt& stmt, const ScopePtr& scope);
  Flow exec_for(const Stmt& stmt, const ScopePtr& scope);
  void run_loop(const Stmt& stmt, const Value& iterable, const ScopePtr& scope, int depth0, Flow& flow);
  bool pull(Loop& loop, Value& out);
  bool peek(Loop& loop);
  void assign(const Target& target, const Value& value, const ScopePtr& scope);
  void check_namespaces(const Target& target, const ScopePtr& scope);
  void emit(const std::string& text);
  void emit_text(const Value& value);
  Value lookup(int symbol, const ScopePtr& scope);
  void capture(const ScopePtr& scope);
  Value make_macro(const Stmt& stmt, const ScopePtr& scope);
  Value call_macro(const Macro& macro, Args args);
  std::string loop_recursion(const Loop& loop, const Args& args);
  Value loop_attribute(const Value& self, const std::string& name, bool& found);
  Value call_loop_method(const std::shared_ptr<Loop>& loop, const std::string& name, const Args& args);

  // jinja_expr.cc
  Value eval(const Expr& expr, const ScopePtr& scope);
  Value eval_node(const Expr& expr, const ScopePtr& scope);
  Value eval_compare(const Expr& expr, const ScopePtr& scope);
  Value eval_concat(const Expr& expr, const ScopePtr& scope);
  Value eval_dict(const Expr& expr, const ScopePtr& scope);
  Value eval_slice(const Expr& expr, const ScopePtr& scope);
  Value eval_condition(const Expr& expr, const ScopePtr& scope);
  Value eval_call(const Expr& expr, const ScopePtr& scope, const Value* caller);
  Value eval_filter(const Expr& expr, const ScopePtr& scope, const Value* input);
  Values eval_items(const Expr& expr, const ScopePtr& scope, size_t first);
  Args eval_arguments(const Expr& expr, const ScopePtr& scope);
  bool compare_once(Expr::Operator op, const Value& left, const Value& right);

  const Ast& ast_;
  std::vector<Value> context_;  // by symbol; functions too
  std::vector<bool> known_;
  std::string* out_ = nullptr;
  int depth_ = 0;
  // Namespaces and closures can form cycles; they are cut when the rendering ends.
  std::vector<std::shared_ptr<Namespace>> namespaces_;
  std::vector<ScopePtr> captured_;
  std::vector<std::shared_ptr<Loop>> changed_loops_;
};

// jinja_operators.cc: arithmetic with Python's rules and messages. `kind` is one of Expr's arithmetic kinds.
Value arithmetic(Expr::Kind kind, const Value& left, const Value& right, Interp& interp);
Value negate(const Value& value, bool minus);
Value slice(const Value& object, const Value* start, const Value* stop, const Value* step, Interp& interp);

// jinja_methods.cc
enum class AttributeKind { none, method, changes_object, other };
AttributeKind attribute_kind(const Value& object, std::string_view name);
Value call_method(Interp& interp, const Value& self, const std::string& name, const Args& args);

// jinja_globals.cc
const Function* find_global(std::string_view name);

// jinja_format.cc
std::string printf_format(Interp& interp, const std::string& format, const Value& args);         // 'a %s' % args
std::string brace_format(Interp& interp, const std::string& format, const Args& args);           // 'a {}'.format(args)
std::string format_time(const std::string& format, const std::tm& time);                         // strftime

// Binds call arguments to named parameters, as Python does. Absent ones are null.
class Params {
 public:
  Params(std::string_view function, const Args& args, std::initializer_list<std::string_view> names, size_t required = 0);
  const Value* operator[](size_t index) const { return values_[index]; }
  bool flag(size_t index, bool otherwise) const { return values_[index] ? truthy(*values_[index]) : otherwise; }
  int64_t integer(size_t index, int64_t otherwise) const;
  const std::string& str(size_t index) const;  // TypeError when it is not a string

 private:
  std::string function_;
  std::vector<std::string_view> names_;
  std::vector<const Value*> values_;
};

// The value as an index: an int that fits 64 bits; TypeError otherwise.
int64_t to_index(const Value& value);

}  // namespace dspark::formats::jinja
