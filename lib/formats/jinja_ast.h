// The parsed template: statements holding expressions. Immutable after parsing, so one may be rendered by many threads.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "formats/jinja_value.h"

namespace dspark::formats::jinja {

struct Expr;
using ExprPtr = std::unique_ptr<Expr>;

// One node for all expressions; `children` by kind:
//   constant -, name -, tuple/list/concat items, dict key, value, key, value, ...
//   attribute object; item object, index; slice object, start, stop, step (absent ones are null)
//   call callee, arguments...; filter input (null in a filter block), arguments...; test value, arguments...
//   negative/positive/logical_not operand; binary left, right; logical_and/logical_or left, right
//   compare first, second, ... with an operator each in `operators`; condition test, then, else (may be null)
struct Expr {
  enum Kind {
    constant, name, tuple, list, dict, attribute, item, slice, call, filter, test, negative, positive, logical_not,
    add, subtract, multiply, divide, floor_divide, modulo, power, concat, compare, logical_and, logical_or, condition
  };
  enum Operator { eq, ne, lt, le, gt, ge, in, not_in };

  Kind kind = constant;
  int line = 1;
  int depth = 1;      // of the tree below
  int symbol = -1;    // name
  Value value;        // constant
  std::string text;   // of a name, an attribute, a filter or a test
  std::vector<ExprPtr> children;
  std::vector<Operator> operators;
  std::vector<std::pair<std::string, ExprPtr>> keywords;
  ExprPtr star_args, star_keywords;
};

// What can be assigned to: a name, an attribute of a namespace, a tuple of these.
struct Target {
  enum Kind { name, attribute, tuple } kind = name;
  int line = 1;
  int symbol = -1;
  std::string text, attribute_name;
  std::vector<Target> parts;
};

struct Stmt;
using Body = std::vector<std::unique_ptr<Stmt>>;

// A macro or the body of a call block.
struct MacroInfo {
  std::string name;  // empty: a call block
  std::vector<std::string> parameters;
  std::vector<int> symbols;
  std::vector<ExprPtr> defaults;  // of the last parameters
  bool uses_caller = false, uses_kwargs = false, uses_varargs = false, caller_is_parameter = false;
};

// `exprs` and `bodies` by kind:
//   text; output exprs; if_ a condition per body, then perhaps an else body
//   for_ iterable, filter test (may be null); body, else body
//   set value; set_block filter (may be null), body; with values, body; filter_block filter, body
//   macro body; call the call, body; generation body
struct Stmt {
  enum Kind {
    text_data, output, if_, for_, set, set_block, with, filter_block, macro, call, generation, break_, continue_
  };
  Kind kind = text_data;
  int line = 1;
  std::string text;
  std::vector<Target> targets;
  std::vector<ExprPtr> exprs;
  std::vector<Body> bodies;
  std::unique_ptr<MacroInfo> macro_info;
  int symbol = -1;  // of a macro's name
  bool recursive = false, uses_loop = false;
};

struct Ast {
  Body body;
  std::vector<std::string> symbols;  // names by number
  int loop_symbol = -1, caller_symbol = -1, kwargs_symbol = -1, varargs_symbol = -1;
};

}  // namespace dspark::formats::jinja
