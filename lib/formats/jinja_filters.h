// The table of filters is in three parts: over text, numbers, and sequences.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "formats/jinja_eval.h"

namespace dspark::formats::jinja {

struct FilterEntry {
  std::string_view name;
  Value (*call)(Interp&, const Value&, const Args&);
};

// HTML's special characters as entities.
std::string escape_html(const std::string& text, Meter& meter);

std::span<const FilterEntry> text_filters();
std::span<const FilterEntry> number_filters();
std::span<const FilterEntry> sequence_filters();

}  // namespace dspark::formats::jinja
