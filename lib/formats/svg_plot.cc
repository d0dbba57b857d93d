#include "formats/svg_plot.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <span>

#include "formats/utf8.h"

namespace dspark::formats {

namespace {

constexpr double kWidth = 600, kTop = 10, kRight = 14;

// ---- colours: for light pages, for dark pages

struct Colour {
  int light, dark;  // 0xRRGGBB
};
// Told apart with red-green blindness too, and at 3:1 or more against the page.
constexpr Colour kDistinct[] = {{0x1f6fb5, 0x6cb2f5}, {0xc44f16, 0xff9a66}, {0x0f8566, 0x4fd1a5}, {0x8c4fa0, 0xd39be8},
                                {0x976800, 0xf0c04a}, {0x5f6b76, 0xa9b4be}, {0xb23a6b, 0xf78fb9}};
// From the first to the last of an order.
constexpr Colour kRamp[] = {{0x35217a, 0x8f8bff}, {0x2a62b0, 0x58b4ff}, {0x168a80, 0x45d4b5}, {0x5f9122, 0xa9dc5c}, {0xb07b00, 0xffd257}};

int mix(int a, int b, double share) {
  int out = 0;
  for (int shift : {16, 8, 0}) {
    const double from = (a >> shift) & 255, to = (b >> shift) & 255;
    out |= static_cast<int>(std::lround(from + share * (to - from))) << shift;
  }
  return out;
}

Colour colour_of(size_t i, size_t n, bool ordered) {
  if (!ordered) return kDistinct[i % std::size(kDistinct)];
  const double at = n > 1 ? static_cast<double>(i) / static_cast<double>(n - 1) * (std::size(kRamp) - 1) : 0;
  const size_t k = std::min(static_cast<size_t>(at), std::size(kRamp) - 2);
  const double share = at - static_cast<double>(k);
  return {mix(kRamp[k].light, kRamp[k + 1].light, share), mix(kRamp[k].dark, kRamp[k + 1].dark, share)};
}

// ---- values

double last_finite(std::span<const double> v) {
  for (size_t i = v.size(); i-- > 0;)
    if (std::isfinite(v[i])) return v[i];
  return std::numeric_limits<double>::quiet_NaN();
}

// Means over `half` neighbours on both sides: at the beginning, where curves are steep, as many after as there are before; at the end those
// that there are.
std::vector<double> moving_mean(std::span<const double> y, size_t half) {
  std::vector<double> out(y.size());
  for (size_t i = 0; i < y.size(); ++i) {
    const size_t h = std::min(half, i);
    double sum = 0, n = 0;
    for (size_t k = i - h; k <= std::min(i + h, y.size() - 1); ++k)
      if (std::isfinite(y[k])) sum += y[k], ++n;
    out[i] = std::isfinite(y[i]) ? sum / n : y[i];
  }
  return out;
}
size_t smoothing(const Series& s) {
  const bool curve = s.mark == Mark::line || s.mark == Mark::area;
  return curve && s.smooth != Series::Smooth::none && s.y.size() >= 50 ? s.y.size() / 50 : 0;
}

std::string value_text(double v, int digits = 4) { return std::isfinite(v) ? fmt::format("{:.{}g}", v, digits) : "none"; }

struct Range {
  double low = std::numeric_limits<double>::infinity(), high = -low;
  void add(double v, bool positive = false) {
    if (!std::isfinite(v) || (positive && v <= 0)) return;
    low = std::min(low, v), high = std::max(high, v);
  }
};

// ---- the drawing

class Drawing {
 public:
  explicit Drawing(const Plot& plot) : plot_(plot) {
    for (const Series& s : plot.series) smooth_.push_back(moving_mean(s.y, smoothing(s)));
    stack_areas();
    lay_out();
  }

  std::string svg() {
    add("<svg viewBox=\"0 0 {:.0f} {:.0f}\" role=\"img\" aria-label=\"{}\">", kWidth, plot_.height, escape_html(plot_.title));
    draw_frame();
    for (size_t i = 0; i < plot_.series.size(); ++i) {
      add("<g class=\"s\" style=\"{}\">", colour_style(i));
      switch (plot_.series[i].mark) {
        case Mark::line: draw_line(i); break;
        case Mark::area: draw_area(i); break;
        case Mark::bars: draw_bars(i); break;
        case Mark::points: draw_points(i); break;
      }
      add("</g>");
    }
    draw_readings();
    add("</svg>");
    return std::move(out_);
  }

  std::string legend() {
    for (size_t i = 0; i < plot_.series.size(); ++i) {
      const Series& s = plot_.series[i];
      const bool curve = s.mark == Mark::line || s.mark == Mark::area, dots = s.mark == Mark::points;
      add("<span class=\"s\" style=\"{}\"><i class=\"{}\"></i>{}", colour_style(i), dots ? "round" : "", escape_html(s.name));
      if (curve || (dots && s.weight.empty())) add(" <b>{}</b>", value_text(last_finite(smooth_[i]), plot_.ordered ? 3 : 4));
      add("</span>");
    }
    return std::move(out_);
  }

 private:
  template <typename... Args>
  void add(fmt::format_string<Args...> format, Args&&... args) {
    fmt::format_to(std::back_inserter(out_), format, std::forward<Args>(args)...);
  }
  double px(double x) const { return x_.scale.at(x); }
  double py(double y) const { return y_.scale.at(y); }
  bool long_label() const { return plot_.x.label.size() > 8; }
  bool shows(double x, double y) const { return x_.scale.shows(x) && y_.scale.shows(y); }

  std::string colour_style(size_t i) const {
    const int shared = plot_.series[i].colour;
    const Colour c = colour_of(shared < 0 ? i : static_cast<size_t>(shared), plot_.series.size(), plot_.ordered);
    return fmt::format("--l:#{:06x};--d:#{:06x}", c.light, c.dark);
  }

  // top_[i]: the upper edge of area i; its lower edge is that of the area before.
  void stack_areas() {
    std::vector<double> floor;
    for (size_t i = 0; i < plot_.series.size(); ++i) {
      top_.emplace_back(), floor_.emplace_back();
      if (plot_.series[i].mark != Mark::area) continue;
      floor.resize(smooth_[i].size(), 0);
      floor_[i] = floor;
      for (size_t k = 0; k < floor.size(); ++k) floor[k] += std::isfinite(smooth_[i][k]) ? smooth_[i][k] : 0;
      top_[i] = floor;
    }
  }

  void lay_out() {
    Range x, y;
    for (size_t i = 0; i < plot_.series.size(); ++i) {
      const Series& s = plot_.series[i];
      for (double v : s.x) x.add(v, plot_.x.log);
      for (const auto* values : {s.mark == Mark::area ? &top_[i] : &s.y, &s.low, &s.high})
        for (double v : *values) y.add(v, plot_.y.log);
      if (s.mark == Mark::area || s.mark == Mark::bars) y.add(0, plot_.y.log);
    }
    for (const Plot::Level& level : plot_.levels) y.add(level.y, plot_.y.log);
    bottom_ = plot_.height - (long_label() ? 40 : 24);
    y_ = lay_axis(plot_.y, y.low, y.high, bottom_, kTop, static_cast<int>(plot_.height / 50));
    size_t longest = 1;
    for (const auto& tick : y_.ticks) longest = std::max(longest, tick.label.size());
    x_ = lay_axis(plot_.x, x.low, x.high, 12 + 6.6 * static_cast<double>(longest), kWidth - kRight, 8);
  }

  void draw_frame() {
    add("<path class=\"grid\" d=\"");
    for (const auto& t : y_.ticks) add("M{:.1f} {:.1f}H{:.1f}", x_.scale.pixel_from, py(t.at), x_.scale.pixel_to);
    add("\"/><g class=\"tick\" text-anchor=\"end\">");
    for (const auto& t : y_.ticks) add("<text x=\"{:.1f}\" y=\"{:.1f}\">{}</text>", x_.scale.pixel_from - 7, py(t.at) + 3.8, escape_html(t.label));
    add("</g><g class=\"tick\" text-anchor=\"middle\">");
    // The axis' name stands in the corner, and ticks that would run into it are left out; a long one stands under them.
    const std::string& label = plot_.x.label;
    const double free_to = kWidth - kRight - (label.empty() || long_label() ? -kRight : 14 + 6.2 * static_cast<double>(label.size()));
    for (const auto& t : x_.ticks)
      if (px(t.at) <= free_to) add("<text x=\"{:.1f}\" y=\"{:.1f}\">{}</text>", px(t.at), bottom_ + 17, escape_html(t.label));
    add("</g>");
    if (long_label()) add("<text class=\"tick\" text-anchor=\"middle\" x=\"{:.1f}\" y=\"{:.1f}\">{}</text>", (x_.scale.pixel_from + x_.scale.pixel_to) / 2, bottom_ + 34, escape_html(label));
    else if (!label.empty()) add("<text class=\"tick\" text-anchor=\"end\" x=\"{:.1f}\" y=\"{:.1f}\">{}</text>", kWidth - kRight, bottom_ + 17, escape_html(label));
    if (plot_.diagonal) {
      const double from = std::max(x_.scale.from, y_.scale.from), to = std::min(x_.scale.to, y_.scale.to);
      add("<path class=\"level\" d=\"M{:.1f} {:.1f}L{:.1f} {:.1f}\"/>", px(from), py(from), px(to), py(to));
    }
    for (const Plot::Level& level : plot_.levels) {
      if (!y_.scale.shows(level.y)) continue;
      add("<path class=\"level\" d=\"M{:.1f} {:.1f}H{:.1f}\"/>", x_.scale.pixel_from, py(level.y), x_.scale.pixel_to);
      labels_ += fmt::format("<text class=\"tick over\" text-anchor=\"end\" x=\"{:.1f}\" y=\"{:.1f}\">{}</text>", x_.scale.pixel_to, py(level.y) - 5, escape_html(level.name));
    }
  }

  // A path through the points that are on the plot, broken elsewhere.
  std::string path(std::span<const double> x, std::span<const double> y) const {
    std::string d;
    bool open = false;
    for (size_t k = 0; k < x.size(); ++k) {
      const bool good = shows(x[k], y[k]);
      if (good) fmt::format_to(std::back_inserter(d), "{}{:.1f} {:.1f}", open ? "L" : "M", px(x[k]), py(y[k]));
      open = good;
    }
    return d;
  }
  // The outline of what lies between two curves, in pieces where both are there.
  std::string between(std::span<const double> x, std::span<const double> low, std::span<const double> high) const {
    std::string d;
    for (size_t k = 0; k < x.size();) {
      size_t end = k;
      while (end < x.size() && shows(x[end], low[end]) && shows(x[end], high[end])) ++end;
      for (size_t i = k; i < end; ++i) fmt::format_to(std::back_inserter(d), "{}{:.1f} {:.1f}", i == k ? "M" : "L", px(x[i]), py(high[i]));
      for (size_t i = end; i-- > k;) fmt::format_to(std::back_inserter(d), "L{:.1f} {:.1f}", px(x[i]), py(low[i]));
      if (end > k) d += "Z";
      k = std::max(end, k + 1);
    }
    return d;
  }

  void draw_line(size_t i) {
    const Series& s = plot_.series[i];
    if (s.smooth == Series::Smooth::with_values && !s.low.empty()) add("<path class=\"band\" d=\"{}\"/>", between(s.x, s.low, s.high));
    else if (s.smooth == Series::Smooth::with_values && smoothing(s) > 0) add("<path class=\"faint\" d=\"{}\"/>", path(s.x, s.y));
    add("<path class=\"line\" d=\"{}\"/>", path(s.x, smooth_[i]));
    if (s.x.size() == 1 && shows(s.x[0], s.y[0])) add("<circle class=\"dot\" cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"3\"/>", px(s.x[0]), py(s.y[0]));
  }

  void draw_area(size_t i) { add("<path class=\"area\" d=\"{}\"/>", between(plot_.series[i].x, floor_[i], top_[i])); }

  void draw_bars(size_t i) {
    const Series& s = plot_.series[i];
    double n = 0, before = 0, total = 0;
    for (size_t k = 0; k < plot_.series.size(); ++k)
      if (plot_.series[k].mark == Mark::bars) ++n, before += k < i ? 1 : 0, total += static_cast<double>(plot_.series[k].y.size());
    const double width = 0.8 / n;
    for (size_t k = 0; k < s.x.size(); ++k) {
      if (!shows(s.x[k], s.y[k])) continue;
      const double left = px(s.x[k] - 0.4 + before * width), right = px(s.x[k] - 0.4 + (before + 1) * width) - 1.5, zero = py(y_.scale.from), top = py(s.y[k]);
      add("<rect class=\"bar\" x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\"><title>{}: {}</title></rect>", left, top, right - left, zero - top, escape_html(s.name),
          value_text(s.y[k]));
      if (total <= 20) add("<text class=\"value\" text-anchor=\"middle\" x=\"{:.1f}\" y=\"{:.1f}\">{:.2f}</text>", (left + right) / 2, top - 4, s.y[k]);
    }
  }

  void draw_points(size_t i) {
    const Series& s = plot_.series[i];
    add("<path class=\"line dash\" d=\"{}\"/>", path(s.x, s.y));
    dots_ += fmt::format("<g class=\"s\" style=\"{}\">", colour_style(i));
    for (size_t k = 0; k < s.x.size(); ++k)
      if (shows(s.x[k], s.y[k]))
        dots_ += fmt::format("<circle class=\"dot\" cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"{:.1f}\"><title>{}\n{} {}: {}</title></circle>", px(s.x[k]), py(s.y[k]),
                             s.weight.empty() ? 3.2 : std::max(2.2, 15 * std::sqrt(s.weight[k])), escape_html(s.name), escape_html(plot_.x.label), value_text(s.x[k]), value_text(s.y[k]));
    dots_ += "</g>";
  }

  // Strips over the curves, each with the values there; circles above them.
  void draw_readings() {
    const Series* longest = nullptr;
    for (const Series& s : plot_.series)
      if ((s.mark == Mark::line || s.mark == Mark::area) && (!longest || s.x.size() > longest->x.size())) longest = &s;
    if (longest) {
      const size_t n = longest->x.size(), strips = std::min<size_t>(n, 80);
      for (size_t g = 0; g < strips; ++g) {
        const size_t begin = g * n / strips, end = (g + 1) * n / strips;
        auto edge = [&](size_t k) { return k == 0 ? x_.scale.pixel_from : k == n ? x_.scale.pixel_to : (px(longest->x[k - 1]) + px(longest->x[k])) / 2; };
        const double x = longest->x[(begin + end) / 2], left = edge(begin), right = edge(end);
        add("<rect class=\"read\" x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\"><title>{} {:.7g}", left, kTop, std::max(0.0, right - left), bottom_ - kTop,
            escape_html(plot_.x.label), x);
        for (size_t i = 0; i < plot_.series.size(); ++i) {
          const Series& s = plot_.series[i];
          if (s.mark != Mark::line && s.mark != Mark::area) continue;
          const auto at = static_cast<size_t>(std::lower_bound(s.x.begin(), s.x.end(), x) - s.x.begin());
          if (at < s.x.size()) add("\n{}: {}", escape_html(s.name), value_text(s.y[at]));
        }
        add("</title></rect>");
      }
    }
    out_ += dots_ + labels_;
  }

  const Plot& plot_;
  std::vector<std::vector<double>> smooth_, top_, floor_;
  LaidAxis x_, y_;
  double bottom_ = 0;
  std::string out_, dots_, labels_;
};

}  // namespace

Series curve_series(std::string name, const Curve& curve, Mark mark) {
  Series s;
  s.name = std::move(name);
  s.mark = mark;
  const bool band = mark == Mark::line && curve.points_per_bucket() > 1;
  for (const Curve::Bucket& b : curve.buckets()) {
    s.x.push_back(b.x());
    s.y.push_back(b.mean());
    if (band) s.low.push_back(b.low), s.high.push_back(b.high);
  }
  return s;
}

std::string plot_html(const Plot& plot) {
  Drawing drawing(plot);
  std::string html = fmt::format("<figure><figcaption><h3>{}</h3><p class=\"legend\">{}</p></figcaption>", escape_html(plot.title), drawing.legend());
  html += drawing.svg();
  if (!plot.note.empty()) html += fmt::format("<p class=\"note\">{}</p>", escape_html(plot.note));
  return html + "</figure>\n";
}

std::string escape_html(std::string_view text) {
  std::string out;
  for (size_t at = 0; at < text.size();) {
    const Utf8Step step = utf8_step(text, at);
    const bool control = step.code < 32 && step.code != '\n' && step.code != '\t';
    if (!step.ok || control || step.code == 127) out += kReplacement;
    else if (step.code == '&') out += "&amp;";
    else if (step.code == '<') out += "&lt;";
    else if (step.code == '>') out += "&gt;";
    else if (step.code == '"') out += "&quot;";
    else if (step.code == '\'') out += "&#39;";
    else out += text.substr(at, step.bytes);
    at += step.bytes;
  }
  return out;
}

}  // namespace dspark::formats
