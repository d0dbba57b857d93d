#include "page.h"

#include <catch2/catch.hpp>

#include <algorithm>
#include <cctype>
#include <regex>

std::vector<std::string> all_between(const std::string& text, const std::string& before, const std::string& after) {
  std::vector<std::string> out;
  for (size_t at = 0; (at = text.find(before, at)) != std::string::npos;) {
    at += before.size();
    const size_t end = text.find(after, at);
    if (end == std::string::npos) break;
    out.push_back(text.substr(at, end - at));
    at = end;
  }
  return out;
}

void check_page(const std::string& html) {
  std::vector<std::string> open;
  REQUIRE(html.starts_with("<!DOCTYPE html>"));
  size_t at = html.find('>') + 1;
  const std::regex attributes(R"re(^(\s+[a-zA-Z-]+="[^"<]*")*\s*$)re");
  while (at < html.size()) {
    const size_t tag = html.find('<', at);
    const std::string text = html.substr(at, tag == std::string::npos ? tag : tag - at);
    CHECK(text.find('>') == std::string::npos);
    for (size_t amp = 0; (amp = text.find('&', amp)) != std::string::npos; ++amp) {
      INFO(text.substr(amp, 12));
      CHECK(std::regex_search(text.substr(amp, 12), std::regex("^&(amp|lt|gt|quot|#39);")));
    }
    if (tag == std::string::npos) break;
    const size_t end = html.find('>', tag);
    REQUIRE(end != std::string::npos);
    std::string inner = html.substr(tag + 1, end - tag - 1);
    at = end + 1;
    if (inner.starts_with("/")) {
      INFO("closing " << inner << " at " << tag);
      REQUIRE_FALSE(open.empty());
      REQUIRE(open.back() == inner.substr(1));
      open.pop_back();
      continue;
    }
    const bool closed = inner.ends_with("/");
    if (closed) inner.pop_back();
    const size_t name = static_cast<size_t>(std::find_if(inner.begin(), inner.end(), [](unsigned char c) { return !std::isalnum(c); }) - inner.begin());
    INFO("tag " << inner.substr(0, 200));
    CHECK(name > 0);
    // Paths are long, and all numbers.
    std::string rest = inner.substr(name);
    if (const size_t d = rest.find(" d=\""); d != std::string::npos) {
      const size_t quote = rest.find('"', d + 4);
      REQUIRE(quote != std::string::npos);
      CHECK(rest.find_first_not_of("MLHZ0123456789.- ", d + 4) == quote);
      rest.erase(d, quote + 1 - d);
    }
    CHECK(std::regex_match(rest, attributes));
    if (!closed) open.push_back(inner.substr(0, name));
    if (inner == "style") at = html.find("</style>", at);
    REQUIRE(at != std::string::npos);
  }
  CHECK(open.empty());
}

std::vector<std::string> figures(const std::string& html, const std::string& title) {
  std::vector<std::string> out;
  for (const std::string& figure : all_between(html, "<figure>", "</figure>")) {
    const auto titles = all_between(figure, "<h3>", "</h3>");
    if (!titles.empty() && titles.front().find(title) != std::string::npos) out.push_back(figure);
  }
  return out;
}

size_t path_points(const std::string& figure, const std::string& path_class) {
  const auto paths = all_between(figure, "<path class=\"" + path_class + "\" d=\"", "\"");
  if (paths.empty()) return 0;
  return static_cast<size_t>(std::count_if(paths.front().begin(), paths.front().end(), [](char c) { return c == 'M' || c == 'L'; }));
}
