#include "formats/jinja_lexer.h"

#include <algorithm>
#include <array>
#include <charconv>

#include "formats/jinja_text.h"

namespace dspark::formats::jinja {

namespace {

constexpr size_t kNone = std::string::npos;

bool is_digit(char c) { return c >= '0' && c <= '9'; }

std::string normalize_newlines(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\r') {
      out += '\n';
      if (i + 1 < text.size() && text[i + 1] == '\n') ++i;
    } else {
      out += text[i];
    }
  }
  return out;
}

// Digits with single underscores between them: the end of the longest run at `pos`, `pos` when there is none.
template <typename IsDigit>
size_t digits_end(std::string_view text, size_t pos, const IsDigit& digit) {
  size_t end = pos;
  while (end < text.size()) {
    if (digit(text[end])) {
      ++end;
    } else if (end > pos && text[end] == '_' && end + 1 < text.size() && digit(text[end + 1])) {
      ++end;
    } else {
      break;
    }
  }
  return end;
}

}  // namespace

std::string describe(const Token& token) {
  switch (token.kind) {
    case Token::name:
    case Token::op: return token.text;
    case Token::data: return "template data / text";
    case Token::string: return "string";
    case Token::integer: return "integer";
    case Token::real: return "float";
    case Token::variable_begin: return "begin of print statement";
    case Token::variable_end: return "end of print statement";
    case Token::block_begin: return "begin of statement block";
    case Token::block_end: return "end of statement block";
    case Token::eof: return "end of template";
  }
  return "token";
}

Lexer::Lexer(std::string_view source) {
  if (!is_utf8(source)) throw SyntaxError("the template is not valid UTF-8", 1);
  source_ = normalize_newlines(source);
  if (!source_.empty() && source_.back() == '\n') source_.pop_back();
}

const Token& Lexer::peek(size_t index) {
  while (tokens_.size() <= index) tokens_.push_back(read());
  return tokens_[index];
}

Token Lexer::next() {
  peek(0);
  Token token = std::move(tokens_.front());
  tokens_.pop_front();
  return token;
}

Token Lexer::make(Token::Kind kind, std::string text) const {
  Token token;
  token.kind = kind;
  token.text = std::move(text);
  token.line = line_;
  return token;
}

void Lexer::move_to(size_t pos) {
  line_ += static_cast<int>(std::count(source_.begin() + static_cast<std::ptrdiff_t>(pos_),
                                       source_.begin() + static_cast<std::ptrdiff_t>(pos), '\n'));
  if (pos > pos_) line_starting_ = source_[pos - 1] == '\n';
  pos_ = pos;
}

Token Lexer::read() {
  while (true) {
    if (!pending_.empty()) {
      Token token = std::move(pending_.front());
      pending_.pop_front();
      return token;
    }
    if (state_ != State::root) return read_in_tag();
    Token token;
    if (pos_ >= source_.size()) return make(Token::eof);
    if (read_root(token)) return token;
  }
}

size_t Lexer::find_tag(size_t from) const {
  for (size_t pos = source_.find('{', from); pos != kNone; pos = source_.find('{', pos + 1)) {
    const char second = pos + 1 < source_.size() ? source_[pos + 1] : 0;
    if (second == '{' || second == '%' || second == '#') return pos;
  }
  return kNone;
}

// `{%- raw %}` at pos: the end of the tag, else kNone.
size_t Lexer::match_raw_begin(size_t pos) const {
  if (source_.compare(pos, 2, "{%") != 0) return kNone;
  pos += 2;
  if (pos < source_.size() && (source_[pos] == '-' || source_[pos] == '+')) ++pos;
  pos = skip_space(source_, pos);
  if (source_.compare(pos, 3, "raw") != 0) return kNone;
  pos = skip_space(source_, pos + 3);
  if (source_.compare(pos, 3, "-%}") == 0) return skip_space(source_, pos + 3);
  return source_.compare(pos, 2, "%}") == 0 ? pos + 2 : kNone;
}

std::string Lexer::text_before_tag(size_t begin, size_t end, char sign, bool is_variable) const {
  std::string_view text = std::string_view(source_).substr(begin, end - begin);
  if (sign == '-') return std::string(strip(text, false, true));
  if (sign != '+' && !is_variable) {
    const size_t newline = text.rfind('\n');
    const size_t line_begin = newline == kNone ? 0 : newline + 1;
    const bool starts_line = line_begin > 0 || line_starting_;
    if (starts_line && line_begin < text.size() && skip_space(text, line_begin) == text.size())
      text = text.substr(0, line_begin);
  }
  return std::string(text);
}

bool Lexer::read_root(Token& token) {
  const size_t tag = find_tag(pos_);
  if (tag == kNone) {
    token = make(Token::data, source_.substr(pos_));
    move_to(source_.size());
    return true;
  }
  const char kind = source_[tag + 1];
  const char after = tag + 2 < source_.size() ? source_[tag + 2] : 0;
  const char sign = after == '-' || after == '+' ? after : 0;
  Token data = make(Token::data, text_before_tag(pos_, tag, sign, kind == '{'));
  const bool has_data = !data.text.empty();
  const size_t raw_end = match_raw_begin(tag);
  if (raw_end != kNone) {
    move_to(raw_end);
    Token raw;
    read_raw(raw);
    pending_.push_back(std::move(raw));
  } else {
    move_to(tag + 2 + (sign != 0));
    if (kind == '#') {
      read_comment();
    } else {
      state_ = kind == '{' ? State::variable : State::block;
      pending_.push_back(make(kind == '{' ? Token::variable_begin : Token::block_begin));
    }
  }
  token = std::move(data);
  return has_data;
}

void Lexer::read_comment() {
  const size_t close = source_.find("#}", pos_);
  if (close == kNone) throw SyntaxError("Missing end of comment tag", line_);
  const char sign = close > pos_ ? source_[close - 1] : 0;
  size_t end = close + 2;
  if (sign == '-') {
    end = skip_space(source_, end);
  } else if (sign != '+' && end < source_.size() && source_[end] == '\n') {
    ++end;
  }
  move_to(end);
}

void Lexer::read_raw(Token& token) {
  const size_t begin = pos_;
  for (size_t pos = source_.find("{%", begin); pos != kNone; pos = source_.find("{%", pos + 1)) {
    size_t end = pos + 2;
    const char sign = end < source_.size() && (source_[end] == '-' || source_[end] == '+') ? source_[end] : 0;
    end = skip_space(source_, end + (sign != 0));
    if (source_.compare(end, 6, "endraw") != 0) continue;
    end = skip_space(source_, end + 6);
    if (source_.compare(end, 3, "-%}") == 0) {
      end = skip_space(source_, end + 3);
    } else if (source_.compare(end, 3, "+%}") == 0) {
      end += 3;
    } else if (source_.compare(end, 2, "%}") == 0) {
      end += 2;
      if (end < source_.size() && source_[end] == '\n') ++end;
    } else {
      continue;
    }
    token = make(Token::data, text_before_tag(begin, pos, sign, false));
    move_to(end);
    return;
  }
  throw SyntaxError("Missing end of raw directive", line_);
}

bool Lexer::read_tag_end(Token& token) {
  if (!brackets_.empty()) return false;
  const bool is_block = state_ == State::block;
  const std::string_view close = is_block ? "%}" : "}}";
  const char sign = source_[pos_];
  const bool has_sign = sign == '-' || (is_block && sign == '+');
  if (source_.compare(pos_ + has_sign, 2, close) != 0) return false;
  size_t end = pos_ + has_sign + 2;
  if (sign == '-') {
    end = skip_space(source_, end);
  } else if (is_block && !has_sign && end < source_.size() && source_[end] == '\n') {
    ++end;
  }
  token = make(is_block ? Token::block_end : Token::variable_end);
  state_ = State::root;
  move_to(end);
  return true;
}

Token Lexer::read_in_tag() {
  Token token;
  while (pos_ < source_.size()) {
    if (read_tag_end(token)) return token;
    const size_t after_space = skip_space(source_, pos_);
    if (after_space == pos_) break;
    move_to(after_space);
  }
  if (pos_ >= source_.size()) return make(Token::eof);
  const char c = source_[pos_];
  if (is_digit(c)) return read_number();
  if (c == '\'' || c == '"') return read_string();
  size_t end = pos_;
  while (end < source_.size()) {
    size_t next = end;
    if (!is_word(next_point(source_, next))) break;
    end = next;
  }
  if (end > pos_) {
    token = make(Token::name, source_.substr(pos_, end - pos_));
    size_t first = pos_;
    const char32_t start = next_point(source_, first);
    if (start != '_' && !is_alpha(start)) throw SyntaxError("Invalid character in identifier", line_);
    move_to(end);
    return token;
  }
  return read_operator();
}

Token Lexer::read_number() {
  const std::string_view text = source_;
  const size_t whole = digits_end(text, pos_, is_digit);
  // A float: digits, then a fraction or an exponent or both; not right after a '.' (as in `x.0.1`).
  if (pos_ == 0 || text[pos_ - 1] != '.') {
    size_t end = whole;
    if (end < text.size() && text[end] == '.') {
      const size_t fraction = digits_end(text, end + 1, is_digit);
      if (fraction > end + 1) end = fraction;
    }
    if (end < text.size() && (text[end] | 0x20) == 'e') {
      size_t digits = end + 1;
      if (digits < text.size() && (text[digits] == '+' || text[digits] == '-')) ++digits;
      const size_t exponent = digits_end(text, digits, is_digit);
      if (exponent > digits) end = exponent;
    }
    if (end > whole) {
      std::string digits(text.substr(pos_, end - pos_));
      std::erase(digits, '_');
      Token token = make(Token::real);
      const auto result = std::from_chars(digits.data(), digits.data() + digits.size(), token.real_value);
      if (result.ec != std::errc()) throw SyntaxError("the number " + digits + " does not fit a float", line_, "unsupported");
      move_to(end);
      return token;
    }
  }
  int base = 10;
  size_t begin = pos_, end = whole;
  const char mark = begin + 1 < text.size() && text[begin] == '0' ? static_cast<char>(text[begin + 1] | 0x20) : 0;
  const int prefix_base = mark == 'x' ? 16 : mark == 'o' ? 8 : mark == 'b' ? 2 : 0;
  const auto digit_value = [](char c) {
    if (is_digit(c)) return c - '0';
    const char low = static_cast<char>(c | 0x20);
    return low >= 'a' && low <= 'f' ? low - 'a' + 10 : 99;
  };
  if (prefix_base != 0) {
    const size_t start = begin + 2 + (begin + 2 < text.size() && text[begin + 2] == '_');
    const size_t digits = digits_end(text, start, [&](char c) { return digit_value(c) < prefix_base; });
    if (digits > start) base = prefix_base, begin = start, end = digits;
  } else if (text[begin] == '0') {
    end = digits_end(text, begin, [](char c) { return c == '0'; });  // "012" is 0, then 12
  }
  Token token = make(Token::integer);
  for (size_t i = begin; i < end; ++i) {
    if (text[i] == '_') continue;
    if (__builtin_mul_overflow(token.integer_value, Int(base), &token.integer_value) ||
        __builtin_add_overflow(token.integer_value, Int(digit_value(text[i])), &token.integer_value))
      throw SyntaxError("an integer beyond 128 bits", line_, "unsupported");
  }
  move_to(end);
  return token;
}

Token Lexer::read_string() {
  const char quote = source_[pos_];
  size_t end = pos_ + 1;
  while (end < source_.size() && source_[end] != quote) end += source_[end] == '\\' ? 2 : 1;
  if (end >= source_.size()) {
    const size_t index = count_points(std::string_view(source_).substr(0, pos_));
    throw SyntaxError(fmt::format("unexpected char {} at {}", repr_text(std::string(1, quote)), index), line_);
  }
  Token token = make(Token::string, unescape(std::string_view(source_).substr(pos_ + 1, end - pos_ - 1)));
  move_to(end + 1);
  return token;
}

// Python's "unicode-escape".
std::string Lexer::unescape(std::string_view body) const {
  std::string out;
  out.reserve(body.size());
  for (size_t i = 0; i < body.size(); ++i) {
    if (body[i] != '\\' || i + 1 >= body.size()) {
      out += body[i];
      continue;
    }
    const char c = body[++i];
    static constexpr std::string_view kNames = "\\'\"abfnrtv", kValues = "\\'\"\a\b\f\n\r\t\v";
    if (const size_t known = kNames.find(c); known != kNone) {
      out += kValues[known];
    } else if (c == '\n') {
      // a line continued
    } else if (c == 'x' || c == 'u' || c == 'U') {
      const size_t n_digits = c == 'x' ? 2 : c == 'u' ? 4 : 8;
      uint32_t point = 0;
      const auto digits = body.substr(i + 1, n_digits);
      const auto result = std::from_chars(digits.data(), digits.data() + digits.size(), point, 16);
      if (digits.size() < n_digits || result.ptr != digits.data() + digits.size())
        throw SyntaxError(fmt::format("truncated \\{} escape", c), line_);
      if (point > 0x10FFFF) throw SyntaxError("illegal Unicode character", line_);
      if (point >= 0xD800 && point < 0xE000) throw SyntaxError("a lone surrogate in a string", line_, "unsupported");
      append_point(out, point);
      i += n_digits;
    } else if (c == 'N') {
      throw SyntaxError("a named character (\\N{...}) in a string", line_, "unsupported");
    } else if (c >= '0' && c <= '7') {
      char32_t point = 0;
      size_t used = 0;
      for (; used < 3 && i + used < body.size() && body[i + used] >= '0' && body[i + used] <= '7'; ++used)
        point = point * 8 + static_cast<char32_t>(body[i + used] - '0');
      append_point(out, point);
      i += used - 1;
    } else {
      out += '\\';
      out += c;
    }
  }
  return out;
}

Token Lexer::read_operator() {
  static constexpr std::array<std::string_view, 26> kOperators = {
      "//", "**", "==", "!=", ">=", "<=", "+", "-", "/", "*", "%", "~", "[", "]",
      "(",  ")",  "{",  "}",  ">",  "<",  "=", ".", ":", "|", ",", ";"};
  const std::string_view rest = std::string_view(source_).substr(pos_);
  const auto found = std::find_if(kOperators.begin(), kOperators.end(), [&](auto op) { return rest.starts_with(op); });
  if (found == kOperators.end()) {
    size_t end = pos_;
    next_point(source_, end);
    const size_t index = count_points(std::string_view(source_).substr(0, pos_));
    throw SyntaxError(fmt::format("unexpected char {} at {}", repr_text(source_.substr(pos_, end - pos_)), index), line_);
  }
  const std::string op(*found);
  if (op == "(" || op == "[" || op == "{") {
    brackets_.push_back(op == "(" ? ')' : op == "[" ? ']' : '}');
  } else if (op == ")" || op == "]" || op == "}") {
    if (brackets_.empty()) throw SyntaxError(fmt::format("unexpected '{}'", op), line_);
    const char expected = brackets_.back();
    brackets_.pop_back();
    if (op[0] != expected) throw SyntaxError(fmt::format("unexpected '{}', expected '{}'", op, expected), line_);
  }
  Token token = make(Token::op, op);
  move_to(pos_ + op.size());
  return token;
}

}  // namespace dspark::formats::jinja
