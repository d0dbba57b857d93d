#include "formats/jinja_text.h"

#include <utf8proc.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>

#include "formats/jinja_value.h"

namespace dspark::formats::jinja {

bool is_utf8(std::string_view text) {
  const auto* bytes = reinterpret_cast<const utf8proc_uint8_t*>(text.data());
  for (size_t pos = 0; pos < text.size();) {
    if (bytes[pos] < 0x80) {
      ++pos;
      continue;
    }
    utf8proc_int32_t point = 0;
    const auto left = static_cast<utf8proc_ssize_t>(text.size() - pos);
    const auto used = utf8proc_iterate(bytes + pos, left, &point);
    if (used <= 0) return false;
    pos += static_cast<size_t>(used);
  }
  return true;
}

size_t count_points(std::string_view text) {
  return static_cast<size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; }));
}

char32_t next_point(std::string_view text, size_t& pos) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(i < text.size() ? text[i] : 0); };
  const unsigned first = byte(pos);
  if (first < 0x80) return pos += 1, first;
  const auto tail = [&](size_t i) { return static_cast<char32_t>(byte(pos + i) & 0x3F); };
  char32_t point = 0;
  size_t used = 0;
  if (first < 0xE0) {
    point = (first & 0x1F) << 6 | tail(1), used = 2;
  } else if (first < 0xF0) {
    point = (first & 0x0F) << 12 | tail(1) << 6 | tail(2), used = 3;
  } else {
    point = (first & 0x07) << 18 | tail(1) << 12 | tail(2) << 6 | tail(3), used = 4;
  }
  pos = std::min(pos + used, text.size());
  return point;
}

void append_point(std::string& out, char32_t c) {
  if (c < 0x80) {
    out += static_cast<char>(c);
  } else if (c < 0x800) {
    out += static_cast<char>(0xC0 | c >> 6);
    out += static_cast<char>(0x80 | (c & 0x3F));
  } else if (c < 0x10000) {
    out += static_cast<char>(0xE0 | c >> 12);
    out += static_cast<char>(0x80 | (c >> 6 & 0x3F));
    out += static_cast<char>(0x80 | (c & 0x3F));
  } else {
    out += static_cast<char>(0xF0 | c >> 18);
    out += static_cast<char>(0x80 | (c >> 12 & 0x3F));
    out += static_cast<char>(0x80 | (c >> 6 & 0x3F));
    out += static_cast<char>(0x80 | (c & 0x3F));
  }
}

size_t byte_offset(std::string_view text, size_t index) {
  size_t pos = 0;
  while (index > 0 && pos < text.size()) {
    next_point(text, pos);
    --index;
  }
  return pos;
}

bool is_space(char32_t c) {
  return (c >= 9 && c <= 13) || (c >= 0x1C && c <= 0x20) || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

size_t skip_space(std::string_view text, size_t pos) {
  while (pos < text.size()) {
    size_t next = pos;
    if (!is_space(next_point(text, next))) break;
    pos = next;
  }
  return pos;
}

namespace {

template <typename Test>
std::string_view strip_if(std::string_view text, bool left, bool right, const Test& drop) {
  size_t begin = 0, end = text.size();
  while (left && begin < end) {
    size_t next = begin;
    if (!drop(next_point(text, next))) break;
    begin = next;
  }
  while (right && end > begin) {
    size_t start = end - 1;
    while (start > begin && (static_cast<unsigned char>(text[start]) & 0xC0) == 0x80) --start;
    size_t next = start;
    if (!drop(next_point(text, next))) break;
    end = start;
  }
  return text.substr(begin, end - begin);
}

utf8proc_category_t category(char32_t c) { return utf8proc_category(static_cast<utf8proc_int32_t>(c)); }

[[noreturn]] void no_case_mapping(char32_t c) {
  throw PyError("unsupported", fmt::format("changing the case of U+{:04X}", static_cast<uint32_t>(c)));
}

enum class Case { upper, lower, title };

void append_cased(std::string& out, char32_t c, Case to) {
  if (c < 0x80) {
    const bool is_letter = (c | 0x20) >= 'a' && (c | 0x20) <= 'z';
    out += static_cast<char>(!is_letter ? c : to == Case::lower ? (c | 0x20) : (c & ~0x20u));
    return;
  }
  if (to == Case::lower && c == 0x3A3) no_case_mapping(c);  // final or not: depends on its neighbours
  if (to == Case::lower && c == 0x130) {
    out += "i\xCC\x87";
    return;
  }
  const std::u32string_view longer = to == Case::lower ? std::u32string_view() : long_case(c, to == Case::title);
  if (!longer.empty()) {
    for (const char32_t point : longer) append_point(out, point);
    return;
  }
  const auto point = static_cast<utf8proc_int32_t>(c);
  const auto mapped = to == Case::lower   ? utf8proc_tolower(point)
                      : to == Case::upper ? utf8proc_toupper(point)
                                          : utf8proc_totitle(point);
  append_point(out, static_cast<char32_t>(mapped));
}

std::string map_case(std::string_view text, Case to) {
  std::string out;
  out.reserve(text.size());
  for (size_t pos = 0; pos < text.size();) append_cased(out, next_point(text, pos), to);
  return out;
}

}  // namespace

std::string_view strip(std::string_view text, bool left, bool right) { return strip_if(text, left, right, is_space); }

std::string_view strip_chars(std::string_view text, std::string_view chars, bool left, bool right) {
  std::u32string set;
  for (size_t pos = 0; pos < chars.size();) set += next_point(chars, pos);
  return strip_if(text, left, right, [&](char32_t c) { return set.find(c) != std::u32string::npos; });
}

bool is_alpha(char32_t c) {
  if (c < 0x80) return (c | 0x20) >= 'a' && (c | 0x20) <= 'z';
  const auto kind = category(c);
  return kind >= UTF8PROC_CATEGORY_LU && kind <= UTF8PROC_CATEGORY_LO;
}
bool is_decimal(char32_t c) { return c < 0x80 ? c >= '0' && c <= '9' : category(c) == UTF8PROC_CATEGORY_ND; }
bool is_word(char32_t c) {
  if (c == '_' || is_alpha(c) || is_decimal(c)) return true;
  if (c < 0x80) return false;
  const auto kind = category(c);
  return kind == UTF8PROC_CATEGORY_NL || kind == UTF8PROC_CATEGORY_NO;
}
bool is_upper(char32_t c) { return c < 0x80 ? c >= 'A' && c <= 'Z' : category(c) == UTF8PROC_CATEGORY_LU; }
bool is_lower(char32_t c) {
  return c < 0x80 ? c >= 'a' && c <= 'z' : category(c) == UTF8PROC_CATEGORY_LL || c == 0xAA || c == 0xBA;
}
bool is_printable(char32_t c) {
  if (c < 0x80) return c >= 0x20 && c < 0x7F;
  switch (category(c)) {
    case UTF8PROC_CATEGORY_CC:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_CS:
    case UTF8PROC_CATEGORY_CO:
    case UTF8PROC_CATEGORY_CN:
    case UTF8PROC_CATEGORY_ZL:
    case UTF8PROC_CATEGORY_ZP:
    case UTF8PROC_CATEGORY_ZS: return false;
    default: return true;
  }
}

std::string upper(std::string_view text) { return map_case(text, Case::upper); }
std::string lower(std::string_view text) { return map_case(text, Case::lower); }

std::string capitalize(std::string_view text) {
  std::string out;
  for (size_t pos = 0; pos < text.size();) {
    const bool first = pos == 0;
    append_cased(out, next_point(text, pos), first ? Case::title : Case::lower);
  }
  return out;
}

std::string title(std::string_view text) {
  std::string out;
  bool after_letter = false;
  for (size_t pos = 0; pos < text.size();) {
    const char32_t c = next_point(text, pos);
    append_cased(out, c, after_letter ? Case::lower : Case::title);
    after_letter = is_upper(c) || is_lower(c) || (c >= 0x80 && category(c) == UTF8PROC_CATEGORY_LT);
  }
  return out;
}

std::string swapcase(std::string_view text) {
  std::string out;
  for (size_t pos = 0; pos < text.size();) {
    const char32_t c = next_point(text, pos);
    append_cased(out, c, is_upper(c) ? Case::lower : Case::upper);
  }
  return out;
}

std::string repr_text(std::string_view text) {
  const bool has_single = text.find('\'') != std::string_view::npos;
  const char quote = has_single && text.find('"') == std::string_view::npos ? '"' : '\'';
  std::string out(1, quote);
  for (size_t pos = 0; pos < text.size();) {
    const char32_t c = next_point(text, pos);
    if (c == static_cast<char32_t>(quote) || c == '\\') {
      out += '\\';
      out += static_cast<char>(c);
    } else if (c == '\n') {
      out += "\\n";
    } else if (c == '\r') {
      out += "\\r";
    } else if (c == '\t') {
      out += "\\t";
    } else if (is_printable(c)) {
      append_point(out, c);
    } else {
      const auto value = static_cast<uint32_t>(c);
      out += c < 0x100 ? fmt::format("\\x{:02x}", value)
                       : c < 0x10000 ? fmt::format("\\u{:04x}", value) : fmt::format("\\U{:08x}", value);
    }
  }
  return out + quote;
}

std::string repr_float(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value < 0 ? "-inf" : "inf";
  char buffer[64];
  const auto end = std::to_chars(buffer, buffer + sizeof buffer, value, std::chars_format::scientific).ptr;
  const std::string_view text(buffer, static_cast<size_t>(end - buffer));
  const size_t e = text.find('e');
  const int exponent = std::atoi(std::string(text.substr(e + 1)).c_str());
  std::string digits;
  for (const char c : text.substr(0, e))
    if (c >= '0' && c <= '9') digits += c;
  std::string out = value < 0 || std::signbit(value) ? "-" : "";
  const int n_digits = static_cast<int>(digits.size());
  if (exponent < -4 || exponent >= 16) {
    out += digits[0];
    if (n_digits > 1) out += "." + digits.substr(1);
    return out + fmt::format("e{}{:02d}", exponent < 0 ? '-' : '+', std::abs(exponent));
  }
  if (exponent < 0) return out + "0." + std::string(static_cast<size_t>(-exponent - 1), '0') + digits;
  if (n_digits <= exponent + 1) return out + digits + std::string(static_cast<size_t>(exponent + 1 - n_digits), '0') + ".0";
  const auto point = static_cast<size_t>(exponent + 1);
  return out + digits.substr(0, point) + "." + digits.substr(point);
}

std::string int_text(__int128 value) {
  const bool negative = value < 0;
  auto rest = negative ? -static_cast<unsigned __int128>(value) : static_cast<unsigned __int128>(value);
  std::string out;
  do {
    out += static_cast<char>('0' + static_cast<int>(rest % 10));
    rest /= 10;
  } while (rest != 0);
  if (negative) out += '-';
  std::reverse(out.begin(), out.end());
  return out;
}

}  // namespace dspark::formats::jinja
