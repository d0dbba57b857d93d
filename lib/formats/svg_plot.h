// Plots as inline SVG, for a page with html_report.h's style sheet. No script and no reference to anything outside; values are read by
// pointing (an SVG <title> on every mark). Colours are chosen here, each as a pair for light and dark pages, distinct for people who see
// red and green alike; text and lines take the page's.
//
//   Plot p{.title = "Loss", .x = {.label = "step"}, .series = {curve_series("training", curve)}};
//   page.plot(p);
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "formats/plot_axis.h"
#include "formats/plot_curve.h"

namespace dspark::formats {

enum class Mark {
  line,    // faint every value, strong a moving mean, when there are many; a gap where a value is not finite
  points,  // circles, joined by a broken line
  bars,    // side by side with the other bars at the same x
  area,    // stacked upon the areas before it
};

struct Series {
  std::string name;
  std::vector<double> x, y;
  std::vector<double> low, high;  // a band around a line; empty: none
  std::vector<double> weight;     // of points, 0 to 1: the circle's area; empty: all the same
  Mark mark = Mark::line;
  enum class Smooth { with_values, alone, none } smooth = Smooth::with_values;  // the moving mean of a line or area of many values
  int colour = -1;                // another series' number, to share its colour
};

// A line for a curve: with a band when a bucket holds several points.
Series curve_series(std::string name, const Curve& curve, Mark mark = Mark::line);

struct Plot {
  std::string title, note;   // the note says in small print what is drawn how
  Axis x, y;
  std::vector<Series> series;
  bool ordered = false;      // series are steps of one scale (positions in a block): colours of a ramp
  bool diagonal = false;     // a line at y = x
  double height = 250;       // of 600 wide
  struct Level {
    double y;
    std::string name;
  };
  std::vector<Level> levels = {};  // horizontal lines
};

// <figure> with title, legend and the drawing.
std::string plot_html(const Plot& plot);

// &, <, >, quotes as entities; control characters and bytes that are no UTF-8 as U+FFFD.
std::string escape_html(std::string_view text);

}  // namespace dspark::formats
