// Plots and pages: ticks, curves in bounded memory, escaping, well-formed output for data of every kind.
#include <catch2/catch.hpp>

#include <cmath>
#include <limits>

#include "core/rng.h"
#include "formats/html_report.h"
#include "page.h"

using namespace dspark;
using namespace dspark::formats;

namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN(), kInf = std::numeric_limits<double>::infinity();

std::string labels(const Axis& axis, double low, double high, int n = 5) {
  std::string out;
  for (const auto& t : lay_axis(axis, low, high, 0, 100, n).ticks) out += (out.empty() ? "" : " ") + t.label;
  return out;
}

}  // namespace

TEST_CASE("axes have few and round ticks", "[formats][report]") {
  CHECK(labels({}, 0, 1) == "0 0.2 0.4 0.6 0.8 1.0");
  CHECK(labels({}, 2.31, 3.58) == "2.0 2.5 3.0 3.5 4.0");
  CHECK(labels({}, 0, 100000) == "0 20k 40k 60k 80k 100k");
  CHECK(labels({}, 0, 3e6) == "0 1M 2M 3M");
  CHECK(labels({}, 0, 30000) == "0 10k 20k 30k");
  CHECK(labels({.tight = true}, 1, 30000, 8) == "5k 10k 15k 20k 25k 30k");
  CHECK(labels({}, 0, 2e-3) == "0 5e-4 1e-3 1.5e-3 2e-3");
  CHECK(labels({}, 0, 6e-4) == "0 2e-4 4e-4 6e-4");
  CHECK(labels({}, -1, 1) == "-1.0 -0.5 0 0.5 1.0");
  CHECK(labels({.tight = true}, 1, 60, 8) == "10 20 30 40 50 60");
  CHECK(labels({.log = true}, 0.3, 37) == "0.2 0.5 1 2 5 10 20 50");
  CHECK(labels({.log = true}, 1e-3, 1e6) == "1e-3 0.1 10 1000 100k");
  CHECK(labels({.names = {"a", "b"}}, 0, 1) == "a b");
  // No data, one value, numbers at the edge of what there is.
  CHECK_FALSE(labels({}, 1, 0).empty());
  CHECK_FALSE(labels({.log = true}, 1, 0).empty());
  CHECK_FALSE(labels({}, 5, 5).empty());
  CHECK_FALSE(labels({}, 1e300, 1.1e300).empty());
  CHECK_FALSE(labels({.from = 0.0}, 0, 0).empty());
  CHECK_FALSE(labels({.from = 0.0, .to = 1.0}, 0.2, 0.3).empty());

  const Rng rng(5, RngStream::test);
  for (uint64_t i = 0; i < 2000; ++i) {
    const double size = std::pow(10.0, 20 * rng.uniform(3 * i) - 10), a = size * (rng.uniform(3 * i + 1) - 0.5), b = a + size * std::pow(10.0, -6 * rng.uniform(3 * i + 2));
    for (const bool log : {false, true}) {
      if (log && a <= 0) continue;
      const LaidAxis axis = lay_axis({.log = log}, a, b, 400, 20, 5);
      INFO("axis " << log << " for " << a << " .. " << b << ": " << axis.scale.from << " .. " << axis.scale.to);
      CHECK(axis.ticks.size() >= 2);
      CHECK(axis.ticks.size() <= 12);
      CHECK(axis.scale.shows(a));
      CHECK(axis.scale.shows(b));
      CHECK(axis.scale.at(a) >= axis.scale.at(b));  // it descends
      CHECK(axis.scale.at(axis.scale.from) == 400);
      for (size_t k = 0; k < axis.ticks.size(); ++k) {
        CHECK(axis.scale.shows(axis.ticks[k].at));
        if (k > 0) CHECK(axis.ticks[k].at > axis.ticks[k - 1].at);
      }
    }
  }
}

TEST_CASE("a curve keeps its mean and its spikes in bounded memory", "[formats][report]") {
  Curve curve;
  double sum = 0;
  constexpr int kPoints = 100000;
  for (int i = 0; i < kPoints; ++i) {
    const double y = i == 77777 ? 1e3 : std::sin(i * 0.001);
    sum += y;
    curve.add(i, y);
  }
  CHECK(curve.buckets().size() <= Curve::kMost);
  CHECK(curve.buckets().size() > Curve::kMost / 2 - 1);
  double total = 0, high = 0, x = -1;
  int64_t points = 0;
  for (const auto& b : curve.buckets()) {
    total += b.y_sum, points += b.points, high = std::max(high, b.high);
    CHECK(b.low <= b.mean());
    CHECK(b.mean() <= b.high);
    CHECK(b.x() > x);
    x = b.x();
  }
  CHECK(points == kPoints);
  CHECK(high == 1e3);
  CHECK(total == Approx(sum).epsilon(1e-12));

  // Few points stay what they are; one that is none is a gap.
  Curve few;
  for (double y : {1.0, kNan, 3.0, kInf}) few.add(static_cast<double>(few.buckets().size()), y);
  REQUIRE(few.buckets().size() == 4);
  CHECK(few.points_per_bucket() == 1);
  CHECK(few.buckets()[2].mean() == 3);
  CHECK(std::isnan(few.buckets()[1].mean()));
  CHECK(std::isnan(few.buckets()[3].mean()));
  Curve gaps;
  for (int i = 0; i < 5000; ++i) gaps.add(i, i % 2 == 0 ? 2.0 : kNan);
  for (const auto& b : gaps.buckets()) CHECK((b.mean() == 2 && b.low == 2 && b.high == 2));
}

TEST_CASE("text on a page is text", "[formats][report]") {
  CHECK(escape_html("a<b>&\"c\"'d'") == "a&lt;b&gt;&amp;&quot;c&quot;&#39;d&#39;");
  CHECK(escape_html("é · 漢字") == "é · 漢字");
  CHECK(escape_html(std::string("a\0b\x1b\x7f\xff", 6)) == "a\xEF\xBF\xBD" "b\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD");
  HtmlReport page("</title><script>alert(1)</script>", "\" onload=\"x");
  page.tiles({{"<dt>", "&", "'"}});
  page.section("<h2>");
  page.plot({.title = "<h3>", .note = "<p>", .x = {.label = "<x>"}, .series = {{.name = "<i>", .x = {1, 2}, .y = {1, 2}}, {.name = "\"", .x = {1}, .y = {2}, .mark = Mark::points}}, .levels = {{1, "<level>"}}});
  page.table({"<a>", "<b>"}, {{"<c>", "<script>"}});
  page.text("<b>");
  const std::string html = page.html();
  check_page(html);
  CHECK(html.find("<script") == std::string::npos);
  CHECK(html.find("onload=\"") == std::string::npos);
}

TEST_CASE("plots of every kind are well-formed and draw what there is", "[formats][report]") {
  HtmlReport page("plots", "");
  const std::vector<double> x{1, 2, 3, 4}, y{1, kNan, 3, 4};
  page.plot({.title = "empty"});
  page.plot({.title = "nothing finite", .series = {{.name = "a", .x = {1, 2}, .y = {kNan, kInf}}}});
  page.plot({.title = "one point", .series = {{.name = "a", .x = {5}, .y = {7}}}});
  page.plot({.title = "gap", .series = {{.name = "a", .x = x, .y = y}}});
  page.plot({.title = "log", .y = {.log = true}, .series = {{.name = "a", .x = x, .y = {-1, 0, 10, 100}}}});
  page.plot({.title = "bars", .x = {.names = {"1", "2"}}, .y = {.from = 0.0}, .series = {{.name = "a", .x = {0, 1}, .y = {0.5, 0.25}, .mark = Mark::bars}, {.name = "b", .x = {0, 1}, .y = {0.1, kNan}, .mark = Mark::bars}}});
  page.plot({.title = "areas", .series = {{.name = "a", .x = x, .y = {1, 1, 1, 1}, .mark = Mark::area}, {.name = "b", .x = x, .y = {2, 2, 2, 2}, .mark = Mark::area}}});
  page.plot({.title = "points", .series = {{.name = "a", .x = {0, 1}, .y = {0, 1}, .weight = {0.9, 0.1}, .mark = Mark::points}}, .diagonal = true});
  Plot many{.title = "many", .ordered = true};
  for (int i = 0; i < 16; ++i) many.series.push_back({.name = std::to_string(i), .x = x, .y = {1.0 * i, 2.0 * i, 3.0 * i, 4.0 * i}});
  page.plot(many);
  Curve curve;
  for (int i = 0; i < 5000; ++i) curve.add(i, i % 7);
  page.plot({.title = "long", .series = {curve_series("a", curve)}});
  const std::string html = page.html();
  check_page(html);
  auto one = [&](const char* title) {
    const auto found = figures(html, title);
    REQUIRE(found.size() == 1);
    return found.front();
  };
  CHECK(path_points(one("gap"), "line") == 3);
  CHECK(all_between(one("gap"), "<path class=\"line\" d=\"", "\"").front().find('M', 1) != std::string::npos);  // in two pieces
  CHECK(path_points(one("nothing finite"), "line") == 0);
  CHECK(path_points(one("log"), "line") == 2);
  CHECK(one("one point").find("<circle") != std::string::npos);
  CHECK(all_between(one("bars"), "<rect class=\"bar\"", "</rect>").size() == 3);
  CHECK(all_between(one("areas"), "<path class=\"area\"", "/>").size() == 2);
  CHECK(all_between(one("points"), "<circle", "</circle>").size() == 2);
  CHECK(path_points(one("long"), "band") > 600);
  // The second area stands on the first: its upper edge is at 3 of 3, the top of the plot.
  CHECK(all_between(one("areas"), "<path class=\"area\" d=\"M", "L").back().ends_with(" 10.0"));
  // Sixteen colours, for light and for dark pages.
  const auto colours = all_between(one("many").substr(one("many").find("<svg")), "style=\"", "\"");
  CHECK(colours.size() == 16);
  for (size_t i = 1; i < colours.size(); ++i) CHECK(colours[i] != colours[i - 1]);
}
