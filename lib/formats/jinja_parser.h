// Template source to a tree. Throws SyntaxError (message and line) for what Jinja calls a syntax error and, with kind
// "unsupported", for tags that Jinja knows and this engine does not.
#pragma once

#include <string_view>

#include "formats/jinja_ast.h"
#include "formats/jinja_lexer.h"

namespace dspark::formats::jinja {

Ast parse_template(std::string_view source);

// Whether there is a filter or test of that name (jinja_filters.cc, jinja_tests.cc).
bool is_filter(std::string_view name);
bool is_test(std::string_view name);

}  // namespace dspark::formats::jinja
