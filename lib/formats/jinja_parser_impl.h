// The parser's class, shared by its two sources: jinja_parser.cc (statements) and jinja_parser_expr.cc (expressions).
#pragma once

#include <initializer_list>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "formats/jinja_ast.h"
#include "formats/jinja_lexer.h"
#include "formats/jinja_parser.h"

namespace dspark::formats::jinja {

inline constexpr int kMaxParseNesting = 150;  // of blocks, brackets and operators while parsing
inline constexpr int kMaxTreeDepth = 400;     // of one expression, long chains of `+` too

class Parser {
 public:
  explicit Parser(std::string_view source) : lexer_(source) {}
  Ast parse();

 private:
  using Words = std::vector<std::string_view>;
  using StmtPtr = std::unique_ptr<Stmt>;

  // jinja_parser.cc
  Body parse_body(const Words& end_words);  // up to one of the words, which stays the current token
  Body parse_block(const Words& end_words, bool drop_end);
  StmtPtr parse_statement();
  StmtPtr parse_if();
  StmtPtr parse_for();
  StmtPtr parse_set();
  StmtPtr parse_with();
  StmtPtr parse_macro();
  StmtPtr parse_call_block();
  StmtPtr parse_filter_block();
  StmtPtr parse_print();
  StmtPtr parse_generation();
  StmtPtr parse_loop_control();
  void parse_signature(MacroInfo& info);
  void parse_macro_body(Stmt& stmt, const char* end_word);
  Target parse_target(bool with_attribute, bool stop_at_in);
  Target to_target(const Expr& expr);
  [[noreturn]] void fail_tag(const std::string* tag, int line);

  // jinja_parser_expr.cc
  ExprPtr parse_expression(bool with_condition = true);
  ExprPtr parse_tuple(bool with_condition, bool explicit_parentheses, std::string_view stop_word = {});
  ExprPtr parse_condition();
  ExprPtr parse_or();
  ExprPtr parse_and();
  ExprPtr parse_not();
  ExprPtr parse_compare();
  ExprPtr parse_sum();
  ExprPtr parse_concat();
  ExprPtr parse_product();
  ExprPtr parse_power();
  ExprPtr parse_unary(bool with_filter = true);
  ExprPtr parse_primary();
  ExprPtr parse_postfix(ExprPtr node);
  ExprPtr parse_filters_and_tests(ExprPtr node);
  ExprPtr parse_subscript(ExprPtr node);
  ExprPtr parse_subscript_index(ExprPtr object, int line);
  ExprPtr parse_call(ExprPtr node);
  void parse_arguments(Expr& call);
  ExprPtr parse_filter(ExprPtr node, bool at_name);
  ExprPtr parse_test(ExprPtr node);
  ExprPtr parse_list();
  ExprPtr parse_dict();

  // tokens
  Token expect_op(std::string_view op);
  Token expect_name(std::string_view word = {});
  Token expect(Token::Kind kind);
  [[noreturn]] void fail_expected(const std::string& what);
  bool skip_op(std::string_view op);
  bool skip_name(std::string_view word);
  [[noreturn]] void fail(const std::string& message, int line) const { throw SyntaxError(message, line); }

  // nodes
  ExprPtr make(Expr::Kind kind, int line);
  void adopt(Expr& parent, ExprPtr child);  // null stays null
  ExprPtr binary(Expr::Kind kind, ExprPtr left, ExprPtr right, int line);
  int symbol(const std::string& name);
  void note_load(const std::string& name);
  void note_store(const std::string& name, int line);
  void check_known(bool filter, const std::string& name, int line);

  // How a special name is used inside a macro: a use counts only before an assignment to it.
  struct Usage {
    bool used = false, stored = false;
  };
  struct Special {
    Usage caller, kwargs, varargs, loop;
  };
  struct Nest {  // counts the parser's recursion
    Nest(Parser& owner, int line);
    ~Nest() { --parser.nesting_; }
    Parser& parser;
  };
  struct Late {  // what Jinja only finds after parsing
    std::string message;
    int line;
    std::string kind;
  };

  Lexer lexer_;
  Ast ast_;
  std::map<std::string, int, std::less<>> symbols_;
  std::vector<Words> end_words_;
  std::vector<std::string> tags_;
  std::vector<Special*> specials_;
  std::vector<Late> late_, late_loop_;
  int nesting_ = 0;
  int loops_ = 0;     // loops around here, within the macro
  bool soft_ = false; // directly inside an `if`: unknown filters are found when they run
};

}  // namespace dspark::formats::jinja
