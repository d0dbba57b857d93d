// GPT-2's byte-level spelling: every byte is written as one printable character, so that a vocabulary is plain text
// ("Ġ" is the space, "Ċ" the newline).
#pragma once

#include <string>
#include <string_view>

namespace dspark::formats {

// The bytes that a token's spelling stands for; a spelling with a character that stands for no byte is taken literally.
std::string bytes_of_spelling(std::string_view spelling);
std::string spelling_of_bytes(std::string_view bytes);

}  // namespace dspark::formats
