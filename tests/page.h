// What tests ask of an HTML page: that it is well-formed, and what is in it.
#pragma once

#include <string>
#include <vector>

// Fails the test unless every tag is closed in its order, attributes are quoted, and '&' begins an entity.
void check_page(const std::string& html);
// The <figure>s whose title holds `title`.
std::vector<std::string> figures(const std::string& html, const std::string& title);
// Points of the first path of this class in a figure.
size_t path_points(const std::string& figure, const std::string& path_class);
// What stands between two texts, everywhere.
std::vector<std::string> all_between(const std::string& text, const std::string& before, const std::string& after);
