#include "formats/plot_axis.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace dspark::formats {

namespace {

// 1, 2 or 5 times a power of ten, at least `rough` (but for rounding).
double nice_step(double rough) {
  const double power = std::pow(10, std::floor(std::log10(rough)));
  for (double m : {1.0, 2.0, 5.0})
    if (m * power >= rough * (1 - 1e-9)) return m * power;
  return 10 * power;
}

// A tick's text, with no more digits than ticks `step` apart need. The largest tick decides how all are written.
std::string tick_label(double v, double step, double largest) {
  if (std::abs(v) < step * 1e-6) return "0";
  if (largest >= 1e9 || largest < 0.0099) {
    const int exponent = static_cast<int>(std::floor(std::log10(std::abs(v)) + 1e-9));
    return fmt::format("{:.3g}e{}", v / std::pow(10, exponent), exponent);
  }
  const char* unit = "";
  if (largest >= 1e4) {
    const bool millions = largest >= 1e6;
    unit = millions ? "M" : "k";
    v /= millions ? 1e6 : 1e3, step /= millions ? 1e6 : 1e3;
  }
  const int decimals = std::max(0, -static_cast<int>(std::floor(std::log10(step) + 1e-9)));
  return fmt::format("{:.{}f}{}", v, decimals, unit);
}

LaidAxis linear_axis(const Axis& axis, double low, double high, int n_ticks) {
  LaidAxis out;
  out.scale.from = axis.from.value_or(low), out.scale.to = axis.to.value_or(high);
  double& from = out.scale.from;
  double& to = out.scale.to;
  if (!(to - from > 1e-12 * std::max(std::abs(from), std::abs(to)))) {
    const double half = from == 0 ? 0.5 : std::abs(from) / 2;
    if (!axis.from) from -= half;
    if (!axis.to) to = std::max(to, from) + half;
    if (!(to > from)) to = from + 1;
  }
  const double step = nice_step((to - from) / n_ticks);
  if (!axis.tight) {
    if (!axis.from) from = std::floor(from / step + 1e-6) * step;
    if (!axis.to) to = std::ceil(to / step - 1e-6) * step;
  }
  for (double i = std::ceil(from / step - 1e-6); i * step <= to + 1e-6 * step; ++i) out.ticks.push_back({i * step, tick_label(i * step, step, std::max(std::abs(from), std::abs(to)))});
  return out;
}

LaidAxis log_axis(const Axis& axis, double low, double high, int n_ticks) {
  LaidAxis out;
  double from = axis.from.value_or(low), to = axis.to.value_or(high);
  if (!(from > 0) || !(to >= from)) from = 1, to = 10;
  // To the next 1, 2 or 5 below and above, so that a narrow range fills the plot.
  auto next = [](double v, bool up) {
    const double power = std::pow(10, std::floor(std::log10(v)));
    double best = up ? 10 * power : power;
    for (double m : {1.0, 2.0, 5.0})
      if (up ? m * power >= v * (1 - 1e-9) && m * power < best : m * power <= v * (1 + 1e-9) && m * power > best) best = m * power;
    return best;
  };
  if (!axis.from) from = next(from, false);
  if (!axis.to) to = next(to, true);
  if (!(to > from)) to = 10 * from;
  out.scale.from = from, out.scale.to = to, out.scale.log = true;
  const int first = static_cast<int>(std::floor(std::log10(from) + 1e-9)), last = static_cast<int>(std::ceil(std::log10(to) - 1e-9));
  const bool between = last - first <= 3;                          // 2 and 5 too
  const int every = std::max(1, (last - first + n_ticks - 1) / n_ticks);  // decades
  for (int e = first; e <= last; e += every)
    for (double m : {1.0, 2.0, 5.0}) {
      const double v = m * std::pow(10, e);
      if ((m > 1 && !between) || v < from * (1 - 1e-9) || v > to * (1 + 1e-9)) continue;
      out.ticks.push_back({v, tick_label(v, std::pow(10, e), v)});
    }
  return out;
}

}  // namespace

double Scale::at(double v) const {
  const double share = log ? std::log(v / from) / std::log(to / from) : (v - from) / (to - from);
  return pixel_from + share * (pixel_to - pixel_from);
}

bool Scale::shows(double v) const {
  const double below = 1e-9 * (log ? from : to - from), above = 1e-9 * (log ? to : to - from);  // rounding
  return std::isfinite(v) && v >= from - below && v <= to + above;
}

LaidAxis lay_axis(const Axis& axis, double low, double high, double pixel_from, double pixel_to, int n_ticks) {
  if (!(low <= high)) low = axis.log ? 1 : 0, high = axis.log ? 10 : 1;
  LaidAxis out;
  if (!axis.names.empty()) {
    out.scale.from = -0.5, out.scale.to = static_cast<double>(axis.names.size()) - 0.5;
    for (size_t i = 0; i < axis.names.size(); ++i) out.ticks.push_back({static_cast<double>(i), axis.names[i]});
  } else {
    out = axis.log ? log_axis(axis, low, high, n_ticks) : linear_axis(axis, low, high, n_ticks);
  }
  out.scale.pixel_from = pixel_from, out.scale.pixel_to = pixel_to;
  return out;
}

}  // namespace dspark::formats
