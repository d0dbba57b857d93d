#include "formats/utf8.h"

#include <utf8proc.h>

#include <algorithm>
#include <cstdlib>
#include <new>

#include "core/error.h"

namespace dspark::formats {

Utf8Step utf8_step(std::string_view text, size_t at) {
  auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t b0 = byte(at);
  if (b0 < 0x80) return {b0, 1, true, false};
  const Utf8Step bad{0xFFFD, 1, false, false};
  uint32_t need, code;
  uint8_t low = 0x80, high = 0xBF;  // range of the second byte: excludes overlong forms, surrogates, beyond U+10FFFF
  if (b0 >= 0xC2 && b0 <= 0xDF) {
    need = 1, code = b0 & 0x1Fu;
  } else if (b0 >= 0xE0 && b0 <= 0xEF) {
    need = 2, code = b0 & 0x0Fu;
    if (b0 == 0xE0) low = 0xA0;
    if (b0 == 0xED) high = 0x9F;
  } else if (b0 >= 0xF0 && b0 <= 0xF4) {
    need = 3, code = b0 & 0x07u;
    if (b0 == 0xF0) low = 0x90;
    if (b0 == 0xF4) high = 0x8F;
  } else {
    return bad;
  }
  for (uint32_t i = 1; i <= need; ++i) {
    if (at + i >= text.size()) return {0xFFFD, i, false, true};
    const uint8_t b = byte(at + i);
    if (b < low || b > high) return {0xFFFD, i, false, false};
    code = code << 6 | (b & 0x3Fu);
    low = 0x80, high = 0xBF;
  }
  return {code, need + 1, true, false};
}

bool utf8_valid(std::string_view text) {
  for (size_t i = 0; i < text.size();) {
    if (static_cast<uint8_t>(text[i]) < 0x80) {
      ++i;
      continue;
    }
    const Utf8Step step = utf8_step(text, i);
    if (!step.ok) return false;
    i += step.bytes;
  }
  return true;
}

std::string utf8_lossy(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (size_t i = 0; i < text.size();) {
    const Utf8Step step = utf8_step(text, i);
    out.append(step.ok ? text.substr(i, step.bytes) : kReplacement);
    i += step.bytes;
  }
  return out;
}

void append_utf8(std::string& out, uint32_t code) {
  utf8proc_uint8_t buffer[4];
  const auto n = utf8proc_encode_char(static_cast<utf8proc_int32_t>(code), buffer);
  out.append(reinterpret_cast<const char*>(buffer), static_cast<size_t>(n));
}

bool is_white_space(uint32_t c) {
  return (c >= 0x09 && c <= 0x0D) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

namespace {

bool is_mark(utf8proc_category_t category) {
  return category == UTF8PROC_CATEGORY_MN || category == UTF8PROC_CATEGORY_MC || category == UTF8PROC_CATEGORY_ME;
}

// Nothing but marks and the vowels and finals of Hangul ever composes with a character before it.
bool starts_chunk(uint32_t code) {
  if (code < 0x300) return true;
  if (code >= 0x1160 && code <= 0x11FF) return false;
  return !is_mark(utf8proc_category(static_cast<utf8proc_int32_t>(code)));
}

}  // namespace

bool is_word(uint32_t c) {
  switch (utf8proc_category(static_cast<utf8proc_int32_t>(c))) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_PC:
      return true;
    default:
      return c == 0x200C || c == 0x200D;
  }
}

std::pair<size_t, size_t> Normalised::source_range(size_t begin, size_t end) const {
  DS_ASSERT(begin < end, "[{}, {})", begin, end);
  if (marks.empty()) return {begin, end};
  auto mark_of = [&](size_t n) {
    return std::prev(
        std::upper_bound(marks.begin(), marks.end(), n, [](size_t v, const Mark& m) { return v < m.normal; }));
  };
  const auto first = mark_of(begin), last = mark_of(end - 1);
  const size_t source_begin = first->changed ? first->source : first->source + (begin - first->normal);
  const size_t source_end = last->changed ? std::next(last)->source : last->source + (end - last->normal);
  return {source_begin, source_end};
}

Normalised normalise_nfc(std::string_view text) {
  Normalised out;
  if (std::all_of(text.begin(), text.end(), [](char c) { return static_cast<uint8_t>(c) < 0x80; })) {
    out.text = text;
    return out;
  }
  bool changed_any = false;
  auto mark = [&](size_t source, bool changed) {
    // Neighbouring unchanged chunks share one mark.
    if (!changed && !out.marks.empty() && !out.marks.back().changed) return;
    out.marks.push_back({out.text.size(), source, changed});
  };
  for (size_t begin = 0; begin < text.size();) {
    size_t end = begin + utf8_step(text, begin).bytes;
    bool ascii = end == begin + 1;
    while (end < text.size()) {
      const Utf8Step step = utf8_step(text, end);
      if (starts_chunk(step.code)) break;
      end += step.bytes;
      ascii = false;
    }
    const std::string_view chunk = text.substr(begin, end - begin);
    if (ascii) {
      mark(begin, false);
      out.text.append(chunk);
    } else {
      utf8proc_uint8_t* normal = nullptr;
      const auto options = static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE);
      const auto n = utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(chunk.data()),
                                  static_cast<utf8proc_ssize_t>(chunk.size()), &normal, options);
      if (n == UTF8PROC_ERROR_NOMEM) throw std::bad_alloc();
      DS_ASSERT(n >= 0, "NFC: {}", utf8proc_errmsg(n));
      const std::string_view form(reinterpret_cast<const char*>(normal), static_cast<size_t>(n));
      const bool changed = form != chunk;
      changed_any |= changed;
      mark(begin, changed);
      out.text.append(form);
      std::free(normal);
    }
    begin = end;
  }
  if (changed_any)
    out.marks.push_back({out.text.size(), text.size(), false});
  else
    out.marks.clear();
  return out;
}

}  // namespace dspark::formats
