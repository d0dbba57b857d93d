// Statements, scopes, loops and macros.
#include "formats/jinja_eval.h"

#include <algorithm>
#include <utility>

namespace dspark::formats::jinja {

namespace {

Value* find_variable(Scope& scope, int symbol) {
  for (auto& [name, value] : scope.variables)
    if (name == symbol) return &value;
  return nullptr;
}

void set_variable(Scope& scope, int symbol, Value value) {
  if (Value* old = find_variable(scope, symbol)) {
    *old = std::move(value);
  } else {
    scope.variables.emplace_back(symbol, std::move(value));
  }
}

ScopePtr open_scope(const ScopePtr& parent) {
  auto scope = std::make_shared<Scope>();
  scope->parent = parent;
  return scope;
}

}  // namespace

Interp::~Interp() {
  for (auto& space : namespaces_) space->attributes.clear();
  for (auto& scope : captured_) scope->variables.clear();
  for (auto& loop : changed_loops_) loop->changed = {};
}

std::shared_ptr<Namespace> Interp::make_namespace() {
  namespaces_.push_back(std::make_shared<Namespace>());
  return namespaces_.back();
}

std::string Interp::render(const Value& context) {
  const Dict& variables = context.as<Dict>();
  const size_t n_symbols = ast_.symbols.size();
  context_.resize(n_symbols);
  known_.resize(n_symbols);
  for (size_t i = 0; i < n_symbols; ++i) {
    const std::string& name = ast_.symbols[i];
    if (const Value* value = variables.find(name)) {
      context_[i] = *value;
      known_[i] = true;
    } else if (const Function* function = find_global(name)) {
      context_[i] = Value::object(Type::function, std::make_shared<Function>(*function));
      known_[i] = true;
    }
  }
  std::string out;
  out_ = &out;
  exec(ast_.body, std::make_shared<Scope>());
  return out;
}

Value Interp::lookup(int symbol, const ScopePtr& scope) {
  for (Scope* at = scope.get(); at != nullptr; at = at->parent.get())
    if (const Value* value = find_variable(*at, symbol)) return *value;
  const auto index = static_cast<size_t>(symbol);
  if (known_[index]) return context_[index];
  return Value::undefined(fmt::format("'{}' is undefined", ast_.symbols[index]));
}

void Interp::emit(const std::string& text) {
  meter.bytes(text.size());
  *out_ += text;
}

// What a filter or call block gives is not converted to text, as a print statement's value is.
void Interp::emit_text(const Value& value) {
  if (!value.is(Type::text)) type_error("sequence item 0: expected str instance, {} found", type_name(value));
  emit(value.str());
}

Interp::Flow Interp::exec(const Body& body, const ScopePtr& scope) {
  const Depth depth(depth_);
  for (const auto& stmt : body) {
    meter.step();
    try {
      const Flow flow = exec_stmt(*stmt, scope);
      if (flow != Flow::normal) return flow;
    } catch (PyError& error) {
      if (error.line == 0) error.line = stmt->line;
      throw;
    }
  }
  return Flow::normal;
}

Interp::Flow Interp::exec_stmt(const Stmt& stmt, const ScopePtr& scope) {
  switch (stmt.kind) {
    case Stmt::text_data: emit(stmt.text); return Flow::normal;
    case Stmt::output:
      for (const auto& expr : stmt.exprs) *out_ += text(eval(*expr, scope));
      return Flow::normal;
    case Stmt::if_: return exec_if(stmt, scope);
    case Stmt::for_: return exec_for(stmt, scope);
    case Stmt::set:
      check_namespaces(stmt.targets[0], scope);
      assign(stmt.targets[0], eval(*stmt.exprs[0], scope), scope);
      return Flow::normal;
    case Stmt::set_block: return exec_set_block(stmt, scope);
    case Stmt::with: return exec_with(stmt, scope);
    case Stmt::filter_block: return exec_filter_block(stmt, scope);
    case Stmt::macro: set_variable(*scope, stmt.symbol, make_macro(stmt, scope)); return Flow::normal;
    case Stmt::call: exec_call(stmt, scope); return Flow::normal;
    case Stmt::generation: emit(call_macro(make_macro(stmt, scope).as<Macro>(), {}).str()); return Flow::normal;
    case Stmt::break_: return Flow::break_loop;
    case Stmt::continue_: return Flow::continue_loop;
  }
  return Flow::normal;
}

Interp::Flow Interp::exec_if(const Stmt& stmt, const ScopePtr& scope) {
  for (size_t i = 0; i < stmt.exprs.size(); ++i)
    if (truthy(eval(*stmt.exprs[i], scope))) return exec(stmt.bodies[i], scope);
  return stmt.bodies.size() > stmt.exprs.size() ? exec(stmt.bodies.back(), scope) : Flow::normal;
}

Interp::Flow Interp::exec_with(const Stmt& stmt, const ScopePtr& scope) {
  const ScopePtr inner = open_scope(scope);
  for (size_t i = 0; i < stmt.targets.size(); ++i) assign(stmt.targets[i], eval(*stmt.exprs[i], scope), inner);
  return exec(stmt.bodies[0], inner);
}

Interp::Flow Interp::exec_set_block(const Stmt& stmt, const ScopePtr& scope) {
  std::string captured;
  std::string* const outer = std::exchange(out_, &captured);
  const Flow flow = exec(stmt.bodies[0], open_scope(scope));
  out_ = outer;
  if (flow != Flow::normal) return flow;
  Value value = Value::text(std::move(captured));
  if (stmt.exprs[0]) value = eval_filter(*stmt.exprs[0], scope, &value);
  assign(stmt.targets[0], value, scope);
  return Flow::normal;
}

Interp::Flow Interp::exec_filter_block(const Stmt& stmt, const ScopePtr& scope) {
  std::string captured;
  std::string* const outer = std::exchange(out_, &captured);
  const Flow flow = exec(stmt.bodies[0], open_scope(scope));
  out_ = outer;
  if (flow != Flow::normal) return flow;
  const Value input = Value::text(std::move(captured));
  emit_text(eval_filter(*stmt.exprs[0], scope, &input));
  return Flow::normal;
}

void Interp::exec_call(const Stmt& stmt, const ScopePtr& scope) {
  const Value caller = make_macro(stmt, scope);
  emit_text(eval_call(*stmt.exprs[0], scope, &caller));
}

void Interp::check_namespaces(const Target& target, const ScopePtr& scope) {
  if (target.kind == Target::attribute && !lookup(target.symbol, scope).is(Type::name_space))
    throw PyError("TemplateRuntimeError", "cannot assign attribute on non-namespace object");
  for (const Target& part : target.parts) check_namespaces(part, scope);
}

void Interp::assign(const Target& target, const Value& value, const ScopePtr& scope) {
  if (target.kind == Target::name) return set_variable(*scope, target.symbol, value);
  if (target.kind == Target::attribute) {
    const Value space = lookup(target.symbol, scope);
    if (!space.is(Type::name_space))
      throw PyError("TemplateRuntimeError", "cannot assign attribute on non-namespace object");
    auto& attributes = space.as<Namespace>().attributes;
    for (auto& [name, old] : attributes)
      if (name == target.attribute_name) {
        old = value;
        return;
      }
    attributes.emplace_back(target.attribute_name, value);
    return;
  }
  if (!is_iterable(value)) type_error("cannot unpack non-iterable {} object", type_name(value));
  const Values items = iterate(value, meter);
  if (items.size() < target.parts.size())
    value_error("not enough values to unpack (expected {}, got {})", target.parts.size(), items.size());
  if (items.size() > target.parts.size()) value_error("too many values to unpack (expected {})", target.parts.size());
  for (size_t i = 0; i < items.size(); ++i) assign(target.parts[i], items[i], scope);
}

// The next element that the loop's own filter lets through.
bool Interp::pull(Loop& loop, Value& out) {
  if (loop.has_next) {
    out = std::move(loop.next);
    loop.has_next = false;
    return true;
  }
  Iterator& source = *loop.source;
  const Expr* test = loop.stmt->exprs[1].get();
  while (source.pos < source.items.size()) {
    meter.step();
    out = source.items[source.pos++];
    if (test == nullptr || loop.filtered) return true;
    const ScopePtr scope = open_scope(loop.outer);
    assign(loop.stmt->targets[0], out, scope);
    if (truthy(eval(*test, scope))) return true;
  }
  return false;
}

bool Interp::peek(Loop& loop) {
  if (!loop.has_next && pull(loop, loop.next)) loop.has_next = true;
  return loop.has_next;
}

Interp::Flow Interp::exec_for(const Stmt& stmt, const ScopePtr& scope) {
  Flow flow = Flow::normal;
  run_loop(stmt, eval(*stmt.exprs[0], scope), scope, 0, flow);
  return flow;
}

void Interp::run_loop(const Stmt& stmt, const Value& iterable, const ScopePtr& scope, int depth0, Flow& flow) {
  const Depth depth(depth_);
  const auto loop = std::make_shared<Loop>();
  loop->stmt = &stmt;
  loop->outer = scope;
  loop->depth0 = depth0;
  nest(*loop, iterable);
  if (iterable.is(Type::iterator)) {
    loop->source = iterable.shared<Iterator>();
  } else {
    loop->source = Value::iterator(iterate(iterable, meter)).shared<Iterator>();
    if (!stmt.exprs[1]) loop->length = static_cast<int64_t>(loop->source->items.size());
  }
  if (stmt.uses_loop) capture(scope);
  bool ran = false;
  ScopePtr inner;
  Value item;
  while (pull(*loop, item)) {
    if (inner == nullptr || inner.use_count() > 1) {
      inner = open_scope(scope);
    } else {
      inner->variables.clear();
    }
    ++loop->index0;
    loop->has_previous = loop->index0 > 0;
    loop->previous = std::move(loop->current);
    loop->current = item;
    assign(stmt.targets[0], item, inner);
    if (stmt.uses_loop) set_variable(*inner, ast_.loop_symbol, Value::object(Type::loop, loop));
    const Flow result = exec(stmt.bodies[0], inner);
    if (result == Flow::break_loop) break;
    if (result == Flow::normal) ran = true;  // as in Jinja, an iteration cut short by `continue` does not count for `else`
  }
  if (!ran && !stmt.bodies[1].empty()) flow = exec(stmt.bodies[1], open_scope(scope));
}

// A scope that a value may keep alive.
void Interp::capture(const ScopePtr& scope) {
  if (!captured_.empty() && captured_.back() == scope) return;
  meter.bytes(64);
  captured_.push_back(scope);
}

Value Interp::make_macro(const Stmt& stmt, const ScopePtr& scope) {
  const auto macro = std::make_shared<Macro>();
  macro->stmt = &stmt;
  macro->scope = scope;
  capture(scope);
  return Value::object(Type::macro, macro);
}

Value Interp::call_macro(const Macro& macro, Args args) {
  const Depth depth(depth_);
  const MacroInfo& info = *macro.stmt->macro_info;
  const std::string name = info.name.empty() ? "None" : "'" + info.name + "'";
  const size_t n_parameters = info.parameters.size();
  const auto take = [&](std::string_view keyword, Value& out) {
    const auto found = std::find_if(args.keywords.begin(), args.keywords.end(),
                                    [&](const auto& entry) { return entry.first == keyword; });
    if (found == args.keywords.end()) return false;
    out = found->second;
    args.keywords.erase(found);
    return true;
  };
  const ScopePtr scope = open_scope(macro.scope);
  bool found_caller = args.positional.size() >= n_parameters && info.caller_is_parameter;
  std::vector<bool> given(n_parameters);
  for (size_t i = 0; i < n_parameters; ++i) {
    Value value;
    if (i < args.positional.size()) {
      value = args.positional[i];
      given[i] = true;
    } else {
      given[i] = take(info.parameters[i], value);
      if (info.parameters[i] == "caller") found_caller = true;
    }
    if (given[i]) set_variable(*scope, info.symbols[i], value);
  }
  if (info.uses_caller && !found_caller) {
    Value caller;
    if (!take("caller", caller)) caller = Value::undefined("No caller defined");
    set_variable(*scope, ast_.caller_symbol, caller);
  }
  if (info.uses_kwargs) {
    std::vector<std::pair<Value, Value>> entries;
    for (auto& [key, value] : args.keywords) entries.emplace_back(Value::text(key), value);
    set_variable(*scope, ast_.kwargs_symbol, Value::dict(std::move(entries)));
  } else if (!args.keywords.empty()) {
    for (const auto& keyword : args.keywords)
      if (keyword.first == "caller" && info.uses_caller)
        type_error("macro {} was invoked with two values for the special caller argument. This is most likely a bug.", name);
    type_error("macro {} takes no keyword argument '{}'", name, args.keywords[0].first);
  }
  if (info.uses_varargs) {
    const auto first = static_cast<std::ptrdiff_t>(std::min(n_parameters, args.positional.size()));
    set_variable(*scope, ast_.varargs_symbol, Value::tuple(Values(args.positional.begin() + first, args.positional.end())));
  } else if (args.positional.size() > n_parameters) {
    type_error("macro {} takes not more than {} argument(s)", name, n_parameters);
  }
  for (size_t i = 0; i < n_parameters; ++i) {
    if (given[i]) continue;
    const size_t first_default = n_parameters - info.defaults.size();
    Value value = i >= first_default ? eval(*info.defaults[i - first_default], scope)
                                     : Value::undefined(fmt::format("parameter '{}' was not provided", info.parameters[i]));
    set_variable(*scope, info.symbols[i], std::move(value));
  }
  std::string captured;
  std::string* const outer = std::exchange(out_, &captured);
  exec(macro.stmt->bodies.back(), scope);
  out_ = outer;
  return Value::text(std::move(captured));
}

std::string Interp::loop_recursion(const Loop& loop, const Args& args) {
  if (!loop.stmt->recursive) type_error("The loop must have the 'recursive' marker to be called recursively.");
  const Params params("loop", args, {"iterable"}, 1);
  std::string captured;
  std::string* const outer = std::exchange(out_, &captured);
  Flow flow = Flow::normal;
  run_loop(*loop.stmt, *params[0], loop.outer, loop.depth0 + 1, flow);
  out_ = outer;
  return captured;
}

Value Interp::loop_attribute(const Value& self, const std::string& name, bool& found) {
  Loop& loop = self.as<Loop>();
  const auto length = [&] {
    if (loop.length < 0) {  // pull everything, keep it for later
      const bool had_next = loop.has_next;
      Value next = std::move(loop.next);
      loop.has_next = false;
      Values rest;
      for (Value item; pull(loop, item);) rest.push_back(item);
      loop.length = static_cast<int64_t>(rest.size()) + loop.index0 + 1 + had_next;
      loop.next = std::move(next);
      loop.has_next = had_next;
      loop.source = Value::iterator(std::move(rest)).shared<Iterator>();
      loop.filtered = true;
    }
    return loop.length;
  };
  found = true;
  if (name == "index") return Value::integer(loop.index0 + 1);
  if (name == "index0") return Value::integer(loop.index0);
  if (name == "first") return Value::boolean(loop.index0 == 0);
  if (name == "last") return Value::boolean(!peek(loop));
  if (name == "length") return Value::integer(length());
  if (name == "revindex") return Value::integer(length() - loop.index0);
  if (name == "revindex0") return Value::integer(length() - loop.index0 - 1);
  if (name == "depth") return Value::integer(loop.depth0 + 1);
  if (name == "depth0") return Value::integer(loop.depth0);
  if (name == "previtem") return loop.has_previous ? loop.previous : Value::undefined("there is no previous item");
  if (name == "nextitem") return peek(loop) ? loop.next : Value::undefined("there is no next item");
  if (name == "cycle" || name == "changed") {
    const auto method = std::make_shared<Method>();
    nest(*method, self);
    method->self = self;
    method->name = name;
    return Value::object(Type::method, method);
  }
  found = false;
  return {};
}

Value Interp::call_loop_method(const std::shared_ptr<Loop>& shared, const std::string& name, const Args& args) {
  Loop& loop = *shared;
  if (!args.keywords.empty()) type_error("loop.{}() takes no keyword arguments", name);
  if (name == "cycle") {
    if (args.positional.empty()) type_error("no items for cycling given");
    return args.positional[static_cast<size_t>(loop.index0) % args.positional.size()];
  }
  const Value now_value = Value::tuple(args.positional);
  if (loop.has_changed && equal(loop.changed, now_value, meter)) return Value::boolean(false);
  if (!loop.has_changed) changed_loops_.push_back(shared);
  loop.has_changed = true;
  loop.changed = now_value;
  return Value::boolean(true);
}

Value Interp::call(const Value& callee, const Args& args) {
  meter.step();
  switch (callee.type()) {
    case Type::undefined: raise_undefined(callee);
    case Type::macro: return call_macro(callee.as<Macro>(), args);
    case Type::function: return callee.as<Function>().call(*this, args);
    case Type::loop: return Value::text(loop_recursion(callee.as<Loop>(), args));
    case Type::method: {
      const auto& method = callee.as<Method>();
      if (method.self.is(Type::loop)) return call_loop_method(method.self.shared<Loop>(), method.name, args);
      return call_method(*this, method.self, method.name, args);
    }
    case Type::joiner: {
      auto& joiner = callee.as<Joiner>();
      return std::exchange(joiner.used, true) ? joiner.separator : Value::text("");
    }
    default: type_error("'{}' object is not callable", type_name(callee));
  }
}

}  // namespace dspark::formats::jinja
