// What follows a primary expression: subscripts, calls, filters, tests; and what every rule uses of the tokens.
#include <algorithm>

#include "formats/jinja_parser_impl.h"
#include "formats/jinja_text.h"

namespace dspark::formats::jinja {

void Parser::fail_expected(const std::string& what) {
  const Token& token = lexer_.current();
  if (token.kind == Token::eof) fail(fmt::format("unexpected end of template, expected {}.", repr_text(what)), token.line);
  fail(fmt::format("expected token {}, got {}", repr_text(what), repr_text(describe(token))), token.line);
}

Token Parser::expect_op(std::string_view op) {
  if (!lexer_.current().is_op(op)) fail_expected(std::string(op));
  return lexer_.next();
}
Token Parser::expect_name(std::string_view word) {
  const Token& token = lexer_.current();
  if (token.kind != Token::name || (!word.empty() && token.text != word))
    fail_expected(word.empty() ? "name" : std::string(word));
  return lexer_.next();
}
Token Parser::expect(Token::Kind kind) {
  if (lexer_.current().kind != kind) {
    Token wanted;
    wanted.kind = kind;
    fail_expected(describe(wanted));
  }
  return lexer_.next();
}
bool Parser::skip_op(std::string_view op) {
  if (!lexer_.current().is_op(op)) return false;
  lexer_.next();
  return true;
}
bool Parser::skip_name(std::string_view word) {
  if (!lexer_.current().is_name(word)) return false;
  lexer_.next();
  return true;
}

ExprPtr Parser::make(Expr::Kind kind, int line) {
  auto node = std::make_unique<Expr>();
  node->kind = kind;
  node->line = line;
  return node;
}

void Parser::adopt(Expr& parent, ExprPtr child) {
  if (child) {
    parent.depth = std::max(parent.depth, child->depth + 1);
    if (parent.depth > kMaxTreeDepth) throw SyntaxError("an expression is too long or nests too deeply", parent.line, "limit");
  }
  parent.children.push_back(std::move(child));
}

ExprPtr Parser::binary(Expr::Kind kind, ExprPtr left, ExprPtr right, int line) {
  auto node = make(kind, line);
  adopt(*node, std::move(left));
  adopt(*node, std::move(right));
  return node;
}

void Parser::check_known(bool filter, const std::string& name, int line) {
  if (soft_ || (filter ? is_filter(name) : is_test(name))) return;
  late_.push_back({fmt::format("No {} named {}.", filter ? "filter" : "test", repr_text(name)), line, "syntax"});
}

ExprPtr Parser::parse_postfix(ExprPtr node) {
  while (true) {
    const Token& token = lexer_.current();
    if (token.is_op(".") || token.is_op("[")) {
      node = parse_subscript(std::move(node));
    } else if (token.is_op("(")) {
      node = parse_call(std::move(node));
    } else {
      return node;
    }
  }
}

ExprPtr Parser::parse_filters_and_tests(ExprPtr node) {
  while (true) {
    const Token& token = lexer_.current();
    if (token.is_op("|")) {
      node = parse_filter(std::move(node), false);
    } else if (token.is_name("is")) {
      node = parse_test(std::move(node));
    } else if (token.is_op("(")) {
      node = parse_call(std::move(node));
    } else {
      return node;
    }
  }
}

ExprPtr Parser::parse_subscript(ExprPtr object) {
  const Token token = lexer_.next();
  if (token.text == "[") return parse_subscript_index(std::move(object), token.line);
  const Token attribute = lexer_.next();
  if (attribute.kind == Token::name) {
    auto node = make(Expr::attribute, token.line);
    node->text = attribute.text;
    adopt(*node, std::move(object));
    return node;
  }
  if (attribute.kind != Token::integer) fail("expected name or number", attribute.line);
  auto index = make(Expr::constant, attribute.line);
  index->value = Value::integer(attribute.integer_value);
  return binary(Expr::item, std::move(object), std::move(index), token.line);
}

ExprPtr Parser::parse_subscript_index(ExprPtr object, int line) {
  std::vector<ExprPtr> parts(3);  // start, stop, step of a slice
  std::vector<ExprPtr> indices;
  bool is_slice = false;
  while (!lexer_.current().is_op("]")) {
    if (!indices.empty() || is_slice) expect_op(",");
    if (is_slice) throw SyntaxError("a tuple of slices as an index", line, "unsupported");
    ExprPtr first;
    if (!lexer_.current().is_op(":")) first = parse_expression();
    if (!skip_op(":")) {
      indices.push_back(std::move(first));
      continue;
    }
    if (!indices.empty()) throw SyntaxError("a tuple of slices as an index", line, "unsupported");
    is_slice = true;
    parts[0] = std::move(first);
    const auto at_end = [&] { return lexer_.current().is_op("]") || lexer_.current().is_op(","); };
    if (!at_end() && !lexer_.current().is_op(":")) parts[1] = parse_expression();
    if (skip_op(":") && !at_end()) parts[2] = parse_expression();
  }
  expect_op("]");
  if (is_slice) {
    auto node = make(Expr::slice, line);
    adopt(*node, std::move(object));
    for (auto& part : parts) adopt(*node, std::move(part));
    return node;
  }
  if (indices.size() == 1) return binary(Expr::item, std::move(object), std::move(indices[0]), line);
  auto tuple = make(Expr::tuple, line);
  for (auto& index : indices) adopt(*tuple, std::move(index));
  return binary(Expr::item, std::move(object), std::move(tuple), line);
}

ExprPtr Parser::parse_call(ExprPtr callee) {
  auto node = make(Expr::call, lexer_.current().line);
  adopt(*node, std::move(callee));
  parse_arguments(*node);
  return node;
}

void Parser::parse_arguments(Expr& call) {
  const int line = expect_op("(").line;
  const auto ensure = [&](bool right) {
    if (!right) fail("invalid syntax for function call expression", line);
  };
  const auto deepen = [&](const ExprPtr& child) {
    call.depth = std::max(call.depth, child->depth + 1);
    if (call.depth > kMaxTreeDepth) throw SyntaxError("an expression nests too deeply", line, "limit");
  };
  bool require_comma = false;
  while (!lexer_.current().is_op(")")) {
    if (require_comma) {
      expect_op(",");
      if (lexer_.current().is_op(")")) break;
    }
    if (skip_op("*")) {
      ensure(!call.star_args && !call.star_keywords);
      call.star_args = parse_expression();
      deepen(call.star_args);
    } else if (skip_op("**")) {
      ensure(!call.star_keywords);
      call.star_keywords = parse_expression();
      deepen(call.star_keywords);
    } else if (lexer_.current().kind == Token::name && lexer_.look().is_op("=")) {
      ensure(!call.star_keywords);
      const Token name = lexer_.next();
      lexer_.next();
      for (const auto& keyword : call.keywords)
        if (keyword.first == name.text) fail("keyword argument repeated: " + name.text, name.line);
      call.keywords.emplace_back(name.text, parse_expression());
      deepen(call.keywords.back().second);
    } else {
      ensure(!call.star_args && !call.star_keywords && call.keywords.empty());
      adopt(call, parse_expression());
    }
    require_comma = true;
  }
  expect_op(")");
}

ExprPtr Parser::parse_filter(ExprPtr node, bool at_name) {
  while (at_name || lexer_.current().is_op("|")) {
    if (!at_name) lexer_.next();
    at_name = false;
    const Token token = expect_name();
    auto filter = make(Expr::filter, token.line);
    filter->text = token.text;
    while (skip_op(".")) filter->text += "." + expect_name().text;
    adopt(*filter, std::move(node));
    if (lexer_.current().is_op("(")) parse_arguments(*filter);
    check_known(true, filter->text, token.line);
    node = std::move(filter);
  }
  return node;
}

ExprPtr Parser::parse_test(ExprPtr node) {
  const int line = lexer_.next().line;
  const bool negated = skip_name("not");
  auto test = make(Expr::test, line);
  test->text = expect_name().text;
  while (skip_op(".")) test->text += "." + expect_name().text;
  adopt(*test, std::move(node));
  const Token& token = lexer_.current();
  if (token.is_op("(")) {
    parse_arguments(*test);
  } else if ((token.kind == Token::name || token.kind == Token::string || token.kind == Token::integer ||
              token.kind == Token::real || token.is_op("[") || token.is_op("{")) &&
             !token.is_name("else") && !token.is_name("or") && !token.is_name("and")) {
    if (token.is_name("is")) fail("You cannot chain multiple tests with is", token.line);
    adopt(*test, parse_postfix(parse_primary()));
  }
  check_known(false, test->text, line);
  if (!negated) return test;
  auto negation = make(Expr::logical_not, line);
  adopt(*negation, std::move(test));
  return negation;
}

}  // namespace dspark::formats::jinja
