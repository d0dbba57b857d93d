// Expressions, by recursive descent in the order of Jinja's own parser:
//   condition < or < and < not < comparison < + - < ~ < * / // % < ** < unary < postfix < filters and tests
#include <algorithm>

#include "formats/jinja_parser_impl.h"
#include "formats/jinja_text.h"

namespace dspark::formats::jinja {

ExprPtr Parser::parse_expression(bool with_condition) { return with_condition ? parse_condition() : parse_or(); }

ExprPtr Parser::parse_condition() {
  Nest nest(*this, lexer_.current().line);
  const size_t late_before = late_.size();
  auto node = parse_or();
  while (lexer_.current().is_name("if")) {
    const int line = lexer_.next().line;
    const bool soft = std::exchange(soft_, true);
    // What stands before `if` was parsed as certain to run; now it is not.
    late_.erase(std::remove_if(late_.begin() + static_cast<std::ptrdiff_t>(late_before), late_.end(),
                               [](const Late& late) { return late.message.starts_with("No "); }), late_.end());
    auto condition = make(Expr::condition, line);
    adopt(*condition, parse_or());
    adopt(*condition, std::move(node));
    adopt(*condition, skip_name("else") ? parse_condition() : nullptr);
    soft_ = soft;
    node = std::move(condition);
  }
  return node;
}

ExprPtr Parser::parse_or() {
  int line = lexer_.current().line;
  auto left = parse_and();
  while (skip_name("or")) {
    left = binary(Expr::logical_or, std::move(left), parse_and(), line);
    line = lexer_.current().line;
  }
  return left;
}

ExprPtr Parser::parse_and() {
  int line = lexer_.current().line;
  auto left = parse_not();
  while (skip_name("and")) {
    left = binary(Expr::logical_and, std::move(left), parse_not(), line);
    line = lexer_.current().line;
  }
  return left;
}

ExprPtr Parser::parse_not() {
  if (!lexer_.current().is_name("not")) return parse_compare();
  Nest nest(*this, lexer_.current().line);
  auto node = make(Expr::logical_not, lexer_.next().line);
  adopt(*node, parse_not());
  return node;
}

ExprPtr Parser::parse_compare() {
  const int line = lexer_.current().line;
  auto first = parse_sum();
  ExprPtr node;
  while (true) {
    const Token& token = lexer_.current();
    static constexpr std::pair<std::string_view, Expr::Operator> kSigns[] = {
        {"==", Expr::eq}, {"!=", Expr::ne}, {"<", Expr::lt}, {"<=", Expr::le}, {">", Expr::gt}, {">=", Expr::ge}};
    const auto sign = std::find_if(std::begin(kSigns), std::end(kSigns), [&](auto s) { return token.is_op(s.first); });
    Expr::Operator op = Expr::in;
    if (sign != std::end(kSigns)) {
      op = sign->second;
      lexer_.next();
    } else if (skip_name("in")) {
    } else if (token.is_name("not") && lexer_.look().is_name("in")) {
      op = Expr::not_in;
      lexer_.next();
      lexer_.next();
    } else {
      break;
    }
    if (!node) {
      node = make(Expr::compare, line);
      adopt(*node, std::move(first));
    }
    node->operators.push_back(op);
    adopt(*node, parse_sum());
  }
  return node ? std::move(node) : std::move(first);
}

ExprPtr Parser::parse_sum() {
  int line = lexer_.current().line;
  auto left = parse_concat();
  while (lexer_.current().is_op("+") || lexer_.current().is_op("-")) {
    const auto kind = lexer_.next().text == "+" ? Expr::add : Expr::subtract;
    left = binary(kind, std::move(left), parse_concat(), line);
    line = lexer_.current().line;
  }
  return left;
}

ExprPtr Parser::parse_concat() {
  const int line = lexer_.current().line;
  auto first = parse_product();
  if (!lexer_.current().is_op("~")) return first;
  auto node = make(Expr::concat, line);
  adopt(*node, std::move(first));
  while (skip_op("~")) adopt(*node, parse_product());
  return node;
}

ExprPtr Parser::parse_product() {
  int line = lexer_.current().line;
  auto left = parse_power();
  while (true) {
    const Token& token = lexer_.current();
    Expr::Kind kind;
    if (token.is_op("*")) {
      kind = Expr::multiply;
    } else if (token.is_op("/")) {
      kind = Expr::divide;
    } else if (token.is_op("//")) {
      kind = Expr::floor_divide;
    } else if (token.is_op("%")) {
      kind = Expr::modulo;
    } else {
      return left;
    }
    lexer_.next();
    left = binary(kind, std::move(left), parse_power(), line);
    line = lexer_.current().line;
  }
}

ExprPtr Parser::parse_power() {
  int line = lexer_.current().line;
  auto left = parse_unary();
  while (skip_op("**")) {
    left = binary(Expr::power, std::move(left), parse_unary(), line);
    line = lexer_.current().line;
  }
  return left;
}

ExprPtr Parser::parse_unary(bool with_filter) {
  Nest nest(*this, lexer_.current().line);
  ExprPtr node;
  const Token& token = lexer_.current();
  if (token.is_op("-") || token.is_op("+")) {
    const Token sign = lexer_.next();
    node = make(sign.text == "-" ? Expr::negative : Expr::positive, sign.line);
    adopt(*node, parse_unary(false));
  } else {
    node = parse_primary();
  }
  node = parse_postfix(std::move(node));
  return with_filter ? parse_filters_and_tests(std::move(node)) : std::move(node);
}

ExprPtr Parser::parse_primary() {
  const Token& token = lexer_.current();
  const int line = token.line;
  if (token.is_op("(")) {
    lexer_.next();
    auto node = parse_tuple(true, true);
    expect_op(")");
    return node;
  }
  if (token.is_op("[")) return parse_list();
  if (token.is_op("{")) return parse_dict();
  auto node = make(Expr::constant, line);
  if (token.kind == Token::name) {
    const Token next = lexer_.next();
    const std::string& word = next.text;
    if (word == "true" || word == "True" || word == "false" || word == "False") {
      node->value = Value::boolean(word == "true" || word == "True");
    } else if (word == "none" || word == "None") {
      node->value = Value::none();
    } else {
      node->kind = Expr::name;
      node->text = word;
      node->symbol = symbol(word);
      note_load(word);
    }
    return node;
  }
  if (token.kind == Token::string) {
    std::string text = lexer_.next().text;
    while (lexer_.current().kind == Token::string) text += lexer_.next().text;
    node->value = Value::text(std::move(text));
    return node;
  }
  if (token.kind == Token::integer || token.kind == Token::real) {
    const Token number = lexer_.next();
    node->value = number.kind == Token::integer ? Value::integer(number.integer_value) : Value::real(number.real_value);
    return node;
  }
  fail(fmt::format("unexpected {}", repr_text(describe(token))), line);
}

ExprPtr Parser::parse_tuple(bool with_condition, bool explicit_parentheses, std::string_view stop_word) {
  int line = lexer_.current().line;
  std::vector<ExprPtr> items;
  bool is_tuple = false;
  while (true) {
    if (!items.empty()) expect_op(",");
    const Token& token = lexer_.current();
    if (token.kind == Token::variable_end || token.kind == Token::block_end || token.is_op(")") ||
        (!stop_word.empty() && token.is_name(stop_word)))
      break;
    items.push_back(parse_expression(with_condition));
    if (!lexer_.current().is_op(",")) break;
    is_tuple = true;
    line = lexer_.current().line;
  }
  if (!is_tuple && !items.empty()) return std::move(items[0]);
  if (!is_tuple && !explicit_parentheses)
    fail(fmt::format("Expected an expression, got {}", repr_text(describe(lexer_.current()))), lexer_.current().line);
  auto node = make(Expr::tuple, line);
  for (auto& item : items) adopt(*node, std::move(item));
  return node;
}

ExprPtr Parser::parse_list() {
  auto node = make(Expr::list, expect_op("[").line);
  while (!lexer_.current().is_op("]")) {
    if (!node->children.empty()) expect_op(",");
    if (lexer_.current().is_op("]")) break;
    adopt(*node, parse_expression());
  }
  expect_op("]");
  return node;
}

ExprPtr Parser::parse_dict() {
  auto node = make(Expr::dict, expect_op("{").line);
  while (!lexer_.current().is_op("}")) {
    if (!node->children.empty()) expect_op(",");
    if (lexer_.current().is_op("}")) break;
    adopt(*node, parse_expression());
    expect_op(":");
    adopt(*node, parse_expression());
  }
  expect_op("}");
  return node;
}

}  // namespace dspark::formats::jinja
