#include "formats/jinja_parser.h"

#include <algorithm>

#include "formats/jinja_parser_impl.h"
#include "formats/jinja_text.h"

namespace dspark::formats::jinja {

Ast parse_template(std::string_view source) { return Parser(source).parse(); }

Parser::Nest::Nest(Parser& owner, int line) : parser(owner) {
  if (++parser.nesting_ > kMaxParseNesting) {
    --parser.nesting_;
    throw SyntaxError("the template nests too deeply", line, "limit");
  }
}

Ast Parser::parse() {
  ast_.loop_symbol = symbol("loop");
  ast_.caller_symbol = symbol("caller");
  ast_.kwargs_symbol = symbol("kwargs");
  ast_.varargs_symbol = symbol("varargs");
  ast_.body = parse_body({});
  late_.insert(late_.end(), late_loop_.begin(), late_loop_.end());
  if (!late_.empty()) throw SyntaxError(late_[0].message, late_[0].line, late_[0].kind);
  ast_.symbols.resize(symbols_.size());
  for (const auto& [name, number] : symbols_) ast_.symbols[static_cast<size_t>(number)] = name;
  return std::move(ast_);
}

int Parser::symbol(const std::string& name) {
  return symbols_.try_emplace(name, static_cast<int>(symbols_.size())).first->second;
}

void Parser::note_load(const std::string& name) {
  for (Special* special : specials_) {
    Usage* usage = name == "caller"    ? &special->caller
                   : name == "kwargs"  ? &special->kwargs
                   : name == "varargs" ? &special->varargs
                   : name == "loop"    ? &special->loop
                                       : nullptr;
    if (usage != nullptr && !usage->stored) usage->used = true;
  }
}

void Parser::note_store(const std::string& name, int line) {
  if (name == "loop" && loops_ > 0)
    late_.push_back({"Can't assign to special loop variable in for-loop target", line, "syntax"});
  for (Special* special : specials_) {
    Usage* usage = name == "caller"    ? &special->caller
                   : name == "kwargs"  ? &special->kwargs
                   : name == "varargs" ? &special->varargs
                                       : nullptr;
    if (usage != nullptr && !usage->used) usage->stored = true;
  }
}

void Parser::fail_tag(const std::string* tag, int line) {
  std::string message = tag == nullptr ? "Unexpected end of template." : "Encountered unknown tag " + repr_text(*tag) + ".";
  if (!end_words_.empty()) {
    std::string looking;
    bool misplaced = false;
    for (const auto& word : end_words_.back()) looking += (looking.empty() ? "'" : " or '") + std::string(word) + "'";
    for (const auto& words : end_words_)
      misplaced = misplaced || (tag != nullptr && std::find(words.begin(), words.end(), *tag) != words.end());
    message += misplaced ? " You probably made a nesting mistake. Jinja is expecting this tag, but currently looking for " +
                               looking + "."
                         : " Jinja was looking for the following tags: " + looking + ".";
  }
  if (!tags_.empty()) message += " The innermost block that needs to be closed is '" + tags_.back() + "'.";
  fail(message, line);
}

Body Parser::parse_body(const Words& end_words) {
  Nest nest(*this, lexer_.current().line);
  Body body;
  if (!end_words.empty()) end_words_.push_back(end_words);
  while (lexer_.current().kind != Token::eof) {
    const Token token = lexer_.next();
    if (token.kind == Token::data) {
      auto stmt = std::make_unique<Stmt>();
      stmt->kind = Stmt::text_data;
      stmt->line = token.line;
      stmt->text = token.text;
      body.push_back(std::move(stmt));
    } else if (token.kind == Token::variable_begin) {
      auto stmt = std::make_unique<Stmt>();
      stmt->kind = Stmt::output;
      stmt->line = token.line;
      stmt->exprs.push_back(parse_tuple(true, false));
      expect(Token::variable_end);
      body.push_back(std::move(stmt));
    } else {
      const Token& word = lexer_.current();
      if (word.kind == Token::name && std::find(end_words.begin(), end_words.end(), word.text) != end_words.end()) {
        end_words_.pop_back();
        return body;
      }
      body.push_back(parse_statement());
      expect(Token::block_end);
    }
  }
  if (!end_words.empty()) fail_tag(nullptr, lexer_.current().line);
  return body;
}

Body Parser::parse_block(const Words& end_words, bool drop_end) {
  skip_op(":");
  expect(Token::block_end);
  Body body = parse_body(end_words);
  if (drop_end) lexer_.next();
  return body;
}

Parser::StmtPtr Parser::parse_statement() {
  const Token token = lexer_.current();
  if (token.kind != Token::name) fail("tag name expected", token.line);
  const std::string& tag = token.text;
  static const Words kUnsupported = {"block", "extends", "include", "from", "import", "autoescape"};
  if (std::find(kUnsupported.begin(), kUnsupported.end(), tag) != kUnsupported.end())
    throw SyntaxError(fmt::format("the tag '{{% {} %}}'", tag), token.line, "unsupported");
  tags_.push_back(tag);
  StmtPtr stmt;
  if (tag == "if") {
    stmt = parse_if();
  } else if (tag == "for") {
    stmt = parse_for();
  } else if (tag == "set") {
    stmt = parse_set();
  } else if (tag == "with") {
    stmt = parse_with();
  } else if (tag == "macro") {
    stmt = parse_macro();
  } else if (tag == "call") {
    stmt = parse_call_block();
  } else if (tag == "filter") {
    stmt = parse_filter_block();
  } else if (tag == "print") {
    stmt = parse_print();
  } else if (tag == "generation") {
    stmt = parse_generation();
  } else if (tag == "break" || tag == "continue") {
    stmt = parse_loop_control();
  } else {
    tags_.pop_back();
    fail_tag(&tag, token.line);
  }
  tags_.pop_back();
  stmt->line = token.line;
  return stmt;
}

Parser::StmtPtr Parser::parse_if() {
  auto stmt = std::make_unique<Stmt>();
  stmt->kind = Stmt::if_;
  const bool soft = std::exchange(soft_, true);
  lexer_.next();
  while (true) {
    stmt->exprs.push_back(parse_tuple(false, false));
    stmt->bodies.push_back(parse_block({"elif", "else", "endif"}, false));
    const Token end = lexer_.next();
    if (end.text == "elif") continue;
    if (end.text == "else") stmt->bodies.push_back(parse_block({"endif"}, true));
    break;
  }
  soft_ = soft;
  return stmt;
}

Parser::StmtPtr Parser::parse_for() {
  auto stmt = std::make_unique<Stmt>();
  stmt->kind = Stmt::for_;
  lexer_.next();
  const bool soft = soft_;
  ++loops_;
  stmt->targets.push_back(parse_target(false, true));
  --loops_;
  expect_name("in");
  stmt->exprs.push_back(parse_tuple(false, false, "recursive"));
  soft_ = false;
  stmt->exprs.push_back(skip_name("if") ? parse_expression() : nullptr);
  stmt->recursive = skip_name("recursive");
  Special special;
  specials_.push_back(&special);
  ++loops_;
  stmt->bodies.push_back(parse_block({"endfor", "else"}, false));
  specials_.pop_back();
  --loops_;
  stmt->uses_loop = stmt->recursive || special.loop.used;
  stmt->bodies.emplace_back();
  if (lexer_.next().text == "else") stmt->bodies[1] = parse_block({"endfor"}, true);
  soft_ = soft;
  return stmt;
}

Parser::StmtPtr Parser::parse_set() {
  auto stmt = std::make_unique<Stmt>();
  lexer_.next();
  stmt->targets.push_back(parse_target(true, false));
  if (skip_op("=")) {
    stmt->kind = Stmt::set;
    stmt->exprs.push_back(parse_tuple(true, false));
    return stmt;
  }
  stmt->kind = Stmt::set_block;
  const bool soft = std::exchange(soft_, false);
  stmt->exprs.push_back(parse_filter(nullptr, false));
  stmt->bodies.push_back(parse_block({"endset"}, true));
  soft_ = soft;
  return stmt;
}

Parser::StmtPtr Parser::parse_with() {
  auto stmt = std::make_unique<Stmt>();
  stmt->kind = Stmt::with;
  lexer_.next();
  while (lexer_.current().kind != Token::block_end) {
    if (!stmt->targets.empty()) expect_op(",");
    stmt->targets.push_back(parse_target(false, false));
    expect_op("=");
    stmt->exprs.push_back(parse_expression());
  }
  const bool soft = std::exchange(soft_, false);
  stmt->bodies.push_back(parse_block({"endwith"}, true));
  soft_ = soft;
  return stmt;
}

void Parser::parse_signature(MacroInfo& info) {
  expect_op("(");
  while (!lexer_.current().is_op(")")) {
    if (!info.parameters.empty()) expect_op(",");
    const Token name = expect_name();
    if (skip_op("=")) {
      info.defaults.push_back(parse_expression());
    } else if (!info.defaults.empty()) {
      fail("non-default argument follows default argument", lexer_.current().line);
    }
    note_store(name.text, name.line);
    info.parameters.push_back(name.text);
    info.symbols.push_back(symbol(name.text));
  }
  expect_op(")");
}

// The body of a macro or call block: a function of its own, so loops around it do not count inside.
void Parser::parse_macro_body(Stmt& stmt, const char* end_word) {
  MacroInfo& info = *stmt.macro_info;
  const bool soft = std::exchange(soft_, false);
  const int loops = std::exchange(loops_, 0);
  Special special;
  specials_.push_back(&special);
  stmt.bodies.push_back(parse_block({end_word}, true));
  specials_.pop_back();
  loops_ = loops;
  soft_ = soft;
  const auto is_parameter = [&](std::string_view name) {
    return std::find(info.parameters.begin(), info.parameters.end(), name) != info.parameters.end();
  };
  info.uses_caller = special.caller.used;
  info.caller_is_parameter = is_parameter("caller");
  info.uses_kwargs = special.kwargs.used && !is_parameter("kwargs");
  info.uses_varargs = special.varargs.used && !is_parameter("varargs");
  if (info.uses_caller && info.caller_is_parameter) {
    const auto index = std::find(info.parameters.begin(), info.parameters.end(), "caller") - info.parameters.begin();
    if (static_cast<size_t>(index) < info.parameters.size() - info.defaults.size())
      late_.push_back({"When defining macros or call blocks the special \"caller\" argument must be omitted or be given "
                       "a default.", stmt.line, "syntax"});
  }
}

Parser::StmtPtr Parser::parse_macro() {
  auto stmt = std::make_unique<Stmt>();
  stmt->kind = Stmt::macro;
  stmt->line = lexer_.next().line;
  stmt->macro_info = std::make_unique<MacroInfo>();
  const Token name = expect_name();
  note_store(name.text, name.line);
  stmt->macro_info->name = name.text;
  stmt->symbol = symbol(name.text);
  parse_signature(*stmt->macro_info);
  parse_macro_body(*stmt, "endmacro");
  return stmt;
}

Parser::StmtPtr Parser::parse_call_block() {
  auto stmt = std::make_unique<Stmt>();
  stmt->kind = Stmt::call;
  stmt->line = lexer_.next().line;
  stmt->macro_info = std::make_unique<MacroInfo>();
  if (lexer_.current().is_op("(")) parse_signature(*stmt->macro_info);
  stmt->exprs.push_back(parse_expression());
  if (stmt->exprs[0]->kind != Expr::call) fail("expected call", stmt->line);
  parse_macro_body(*stmt, "endcall");
  return stmt;
}

Parser::StmtPtr Parser::parse_generation() {
  auto stmt = std::make_unique<Stmt>();
  stmt->kind = Stmt::generation;
  stmt->line = lexer_.next().line;
  stmt->macro_info = std::make_unique<MacroInfo>();
  parse_macro_body(*stmt, "endgeneration");
  return stmt;
}

Parser::StmtPtr Parser::parse_filter_block() {
  auto stmt = std::make_unique<Stmt>();
  stmt->kind = Stmt::filter_block;
  lexer_.next();
  const bool soft = std::exchange(soft_, false);
  stmt->exprs.push_back(parse_filter(nullptr, true));
  stmt->bodies.push_back(parse_block({"endfilter"}, true));
  soft_ = soft;
  return stmt;
}

Parser::StmtPtr Parser::parse_print() {
  auto stmt = std::make_unique<Stmt>();
  stmt->kind = Stmt::output;
  lexer_.next();
  while (lexer_.current().kind != Token::block_end) {
    if (!stmt->exprs.empty()) expect_op(",");
    stmt->exprs.push_back(parse_expression());
  }
  return stmt;
}

Parser::StmtPtr Parser::parse_loop_control() {
  auto stmt = std::make_unique<Stmt>();
  const Token token = lexer_.next();
  stmt->kind = token.text == "break" ? Stmt::break_ : Stmt::continue_;
  if (loops_ == 0)
    late_loop_.push_back({token.text == "break" ? "'break' outside loop" : "'continue' not properly in loop", token.line,
                          "SyntaxError"});
  return stmt;
}

Target Parser::to_target(const Expr& expr) {
  Target target;
  target.line = expr.line;
  if (expr.kind == Expr::name) {
    target.text = expr.text;
    target.symbol = expr.symbol;
    note_store(expr.text, expr.line);
    return target;
  }
  if (expr.kind == Expr::tuple) {
    target.kind = Target::tuple;
    for (const auto& child : expr.children) target.parts.push_back(to_target(*child));
    return target;
  }
  fail(fmt::format("can't assign to '{}'", expr.kind == Expr::constant ? "const"
                                           : expr.kind == Expr::list   ? "list"
                                           : expr.kind == Expr::dict   ? "dict"
                                                                       : "expression"), expr.line);
}

// Names and tuples of names, as `parse_tuple` reads them but from primaries only.
Target Parser::parse_target(bool with_attribute, bool stop_at_in) {
  Target tuple;
  tuple.kind = Target::tuple;
  tuple.line = lexer_.current().line;
  bool is_tuple = false;
  while (true) {
    if (!tuple.parts.empty()) expect_op(",");
    const Token& token = lexer_.current();
    if (token.kind == Token::variable_end || token.kind == Token::block_end || token.is_op(")") ||
        (stop_at_in && token.is_name("in")))
      break;
    if (with_attribute && token.kind == Token::name && lexer_.look().is_op(".")) {
      Target part;
      part.kind = Target::attribute;
      const Token name = lexer_.next();
      lexer_.next();
      part.line = name.line;
      part.text = name.text;
      part.symbol = symbol(name.text);
      part.attribute_name = expect_name().text;
      note_load(name.text);
      tuple.parts.push_back(std::move(part));
    } else {
      tuple.parts.push_back(to_target(*parse_primary()));
    }
    if (!lexer_.current().is_op(",")) break;
    is_tuple = true;
  }
  if (is_tuple) return tuple;
  if (tuple.parts.empty())
    fail(fmt::format("Expected an expression, got {}", repr_text(describe(lexer_.current()))), lexer_.current().line);
  return std::move(tuple.parts[0]);
}

}  // namespace dspark::formats::jinja
