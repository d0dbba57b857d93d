// Text as Python sees it, over UTF-8: code points, white space, letter case, repr. Used by the template engine only.
//
// All functions take valid UTF-8 (the engine checks what comes in) and return valid UTF-8.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace dspark::formats::jinja {

bool is_utf8(std::string_view text);
size_t count_points(std::string_view text);
// The code point at byte `pos` (which starts one); advances pos past it.
char32_t next_point(std::string_view text, size_t& pos);
void append_point(std::string& out, char32_t point);
// Byte offset of code point `index`, text.size() when there are fewer.
size_t byte_offset(std::string_view text, size_t index);

// str.isspace of one character: what strip() and split() remove.
bool is_space(char32_t point);
// The same set as the `\s` of Python's re.
size_t skip_space(std::string_view text, size_t pos);
std::string_view strip(std::string_view text, bool left, bool right);
std::string_view strip_chars(std::string_view text, std::string_view chars, bool left, bool right);

bool is_alpha(char32_t point);   // categories L*
bool is_decimal(char32_t point); // Nd
bool is_word(char32_t point);    // the `\w` of Python's re: alphanumeric or '_'
bool is_upper(char32_t point);
bool is_lower(char32_t point);
bool is_printable(char32_t point);

// Case mappings. The Greek capital sigma's lower case depends on what stands around it: PyError "unsupported".
std::string upper(std::string_view text);
std::string lower(std::string_view text);
std::string capitalize(std::string_view text);  // str.capitalize
std::string title(std::string_view text);       // str.title
std::string swapcase(std::string_view text);

// The upper (or title) case of a character where that is more than one character (jinja_case.cc); empty elsewhere.
std::u32string_view long_case(char32_t point, bool title);

// repr() of a str: quotes chosen as Python does, escapes for what is not printable.
std::string repr_text(std::string_view text);
// repr() of a float: the shortest digits that read back the same.
std::string repr_float(double value);
std::string int_text(__int128 value);

}  // namespace dspark::formats::jinja
