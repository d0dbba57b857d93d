// UTF-8, one step at a time: what is well-formed, what is not, and what is merely cut off.
//
// Ill-formed input is replaced as Unicode recommends (and as Rust and Python do it): each maximal ill-formed part
// becomes one U+FFFD. A part that could still become a character when more bytes arrive is reported as `cut`.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace dspark::formats {

inline constexpr std::string_view kReplacement = "\xEF\xBF\xBD";  // U+FFFD

struct Utf8Step {
  uint32_t code = 0;   // the code point; 0xFFFD when not ok
  uint32_t bytes = 1;  // bytes consumed, at least 1
  bool ok = false;
  bool cut = false;  // not ok only because the text ends here
};

Utf8Step utf8_step(std::string_view text, size_t at);  // at < text.size()
bool utf8_valid(std::string_view text);
std::string utf8_lossy(std::string_view text);
void append_utf8(std::string& out, uint32_t code);

// Unicode White_Space, the meaning of \s in the published tokenizers (PCRE's own \s differs at U+180E).
bool is_white_space(uint32_t code);
// \w: letters, marks, decimal digits, letter numbers, connectors, joiners.
bool is_word(uint32_t code);

// NFC in pieces that can be traced back: a chunk starts at a character that never joins with what stands before it, so
// the normal form of the text is the concatenation of the chunks' normal forms.
struct Normalised {
  // From here on, offset n of the normal form belongs to source offset `source` + (n - normal), or, inside a chunk that
  // changed, to the whole chunk.
  struct Mark {
    size_t normal, source;
    bool changed;
  };
  std::string text;
  std::vector<Mark> marks;  // empty: nothing changed; else ascending, the last one is the end

  // The source range behind [begin, end) of the normal form; begin < end.
  std::pair<size_t, size_t> source_range(size_t begin, size_t end) const;
};
Normalised normalise_nfc(std::string_view text);  // well-formed UTF-8

}  // namespace dspark::formats
