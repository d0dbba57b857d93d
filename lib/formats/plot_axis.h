// Axes of plots: which range, which ticks, what stands beside them.
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace dspark::formats {

struct Axis {
  std::string label;
  bool log = false;                  // values that are not positive have no place on it
  std::optional<double> from, to;    // what is not said follows from the data, to the next tick
  bool tight = false;                // ends where the data ends
  std::vector<std::string> names;    // categories 0, 1, ... instead of numbers
};

// An axis laid over `pixels_from` .. `pixels_to` (which may descend, as y does).
struct Scale {
  double from = 0, to = 1, pixel_from = 0, pixel_to = 1;
  bool log = false;
  double at(double v) const;  // not clipped
  bool shows(double v) const;  // finite and inside the range
};

struct LaidAxis {
  Scale scale;
  struct Tick {
    double at;
    std::string label;
  };
  std::vector<Tick> ticks;
};

// `low` .. `high`: the data's range (low > high: there is none). About `n_ticks` ticks, at 1, 2 or 5 times a power of ten.
LaidAxis lay_axis(const Axis& axis, double low, double high, double pixel_from, double pixel_to, int n_ticks);

}  // namespace dspark::formats
