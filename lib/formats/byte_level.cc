#include "formats/byte_level.h"

#include <array>
#include <cstdint>

#include "formats/utf8.h"

namespace dspark::formats {

namespace {

// Printable Latin-1 bytes stand for themselves; the other 68 are numbered from U+0100 on.
constexpr bool printable(int b) {
  return (b >= 0x21 && b <= 0x7E) || (b >= 0xA1 && b <= 0xAC) || (b >= 0xAE && b <= 0xFF);
}

struct Tables {
  std::array<uint16_t, 256> code_of{};
  std::array<int16_t, 0x144> byte_of{};
};

constexpr Tables make_tables() {
  Tables t;
  t.byte_of.fill(-1);
  int next = 0x100;
  for (int b = 0; b < 256; ++b) {
    const int code = printable(b) ? b : next++;
    t.code_of[static_cast<size_t>(b)] = static_cast<uint16_t>(code);
    t.byte_of[static_cast<size_t>(code)] = static_cast<int16_t>(b);
  }
  return t;
}
constexpr Tables kTables = make_tables();

}  // namespace

std::string bytes_of_spelling(std::string_view spelling) {
  std::string out;
  for (size_t i = 0; i < spelling.size();) {
    const Utf8Step step = utf8_step(spelling, i);
    if (!step.ok || step.code >= kTables.byte_of.size() || kTables.byte_of[step.code] < 0) return std::string(spelling);
    out += static_cast<char>(kTables.byte_of[step.code]);
    i += step.bytes;
  }
  return out;
}

std::string spelling_of_bytes(std::string_view bytes) {
  std::string out;
  for (char c : bytes) append_utf8(out, kTables.code_of[static_cast<uint8_t>(c)]);
  return out;
}

}  // namespace dspark::formats
