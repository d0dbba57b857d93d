// Template source to tokens, lazily: an error further down does not hide one further up.
//
// The rules are those of Jinja 3.1 with trim_blocks and lstrip_blocks on: one trailing newline of the source is dropped,
// line ends become "\n", the newline after a block tag or a comment goes away, white space before a tag that starts a
// line goes away, `-` and `+` beside a tag's braces override both.
#pragma once

#include <deque>
#include <string>
#include <string_view>
#include <vector>

#include "formats/jinja_value.h"

namespace dspark::formats::jinja {

struct Token {
  enum Kind { data, name, string, integer, real, op, variable_begin, variable_end, block_begin, block_end, eof };
  Kind kind = eof;
  std::string text;  // data, name and string: the value; op: its characters
  Int integer_value = 0;
  double real_value = 0;
  int line = 1;

  bool is_op(std::string_view chars) const { return kind == op && text == chars; }
  bool is_name(std::string_view word) const { return kind == name && text == word; }
};

// "end of print statement", an operator's characters, a name: how messages call a token.
std::string describe(const Token& token);

// An error in the template's text, with its line.
struct SyntaxError {
  SyntaxError(std::string text, int at_line, std::string error_kind = "syntax")
      : message(std::move(text)), line(at_line), kind(std::move(error_kind)) {}
  std::string message;
  int line;
  std::string kind;
};

class Lexer {
 public:
  explicit Lexer(std::string_view source);

  const Token& current() { return peek(0); }
  const Token& look() { return peek(1); }
  Token next();

 private:
  enum class State { root, block, variable };

  const Token& peek(size_t index);
  Token read();
  bool read_root(Token& token);         // false: nothing to hand out yet
  void read_comment();
  void read_raw(Token& token);
  bool read_tag_end(Token& token);
  Token read_in_tag();
  Token read_number();
  Token read_string();
  Token read_operator();
  size_t find_tag(size_t from) const;
  size_t match_raw_begin(size_t pos) const;
  std::string text_before_tag(size_t begin, size_t end, char sign, bool is_variable) const;
  void move_to(size_t pos);             // keeps line_ and line_starting_ right
  Token make(Token::Kind kind, std::string text = {}) const;
  std::string unescape(std::string_view body) const;

  std::string source_;
  size_t pos_ = 0;
  int line_ = 1;
  bool line_starting_ = true;
  State state_ = State::root;
  std::vector<char> brackets_;
  std::deque<Token> tokens_, pending_;
};

}  // namespace dspark::formats::jinja
