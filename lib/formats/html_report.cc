#include "formats/html_report.h"

#include <fmt/format.h>

#include <cstdlib>

namespace dspark::formats {

namespace {

// Series bring their colours along: --l for light pages, --d for dark ones (svg_plot.cc).
constexpr const char* kStyle = R"(
:root{color-scheme:light dark;--page:#f6f7f9;--card:#fff;--ink:#16202a;--soft:#5c6873;--line:#e1e5ea;--edge:#e6e9ee}
.s{--c:var(--l)}
@media (prefers-color-scheme:dark){
:root{--page:#0f1317;--card:#171c22;--ink:#e8ecf0;--soft:#98a4b0;--line:#2a323b;--edge:#262d35}
.s{--c:var(--d)}
}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;font-variant-numeric:tabular-nums}
main{max-width:1320px;margin:0 auto;padding:36px 24px 64px}
h1{font-size:26px;line-height:1.25;font-weight:650;letter-spacing:-.01em;margin:0;overflow-wrap:anywhere}
h2{font-size:17px;font-weight:650;margin:40px 0 14px}
h3{font-size:14px;font-weight:600;margin:0}
.sub{color:var(--soft);margin:6px 0 0;overflow-wrap:anywhere}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(170px,1fr));gap:14px;margin:26px 0 0}
.tiles div,figure,.table{background:var(--card);border:1px solid var(--edge);border-radius:10px}
.tiles div{padding:14px 16px}
.tiles dt{color:var(--soft);font-size:13px}
.tiles dd{margin:2px 0 0;font-size:24px;font-weight:600;letter-spacing:-.01em;line-height:1.3}
.tiles .small{color:var(--soft);font-size:12.5px;font-weight:400;letter-spacing:0}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,470px),1fr));gap:14px}
figure{margin:0;padding:14px 16px 8px;min-width:0}
figcaption{display:flex;flex-wrap:wrap;justify-content:space-between;gap:2px 18px;margin-bottom:6px}
.legend{display:flex;flex-wrap:wrap;gap:0 14px;margin:0;font-size:12.5px;color:var(--soft)}
.legend i{display:inline-block;width:12px;height:3px;border-radius:2px;background:var(--c);vertical-align:middle;margin-right:6px}
.legend i.round{width:8px;height:8px;border-radius:50%}
.legend b{color:var(--ink);font-weight:600}
svg{display:block;width:100%;height:auto;overflow:visible}
.grid{stroke:var(--line);stroke-width:1;fill:none;shape-rendering:crispEdges}
.tick{font-size:11px;fill:var(--soft)}
.over{paint-order:stroke;stroke:var(--card);stroke-width:4px;stroke-linejoin:round}
.value{font-size:10.5px;fill:var(--soft)}
.level{stroke:var(--soft);stroke-width:1.2;stroke-dasharray:5 4;fill:none;opacity:.8}
.line{stroke:var(--c);stroke-width:1.9;fill:none;stroke-linejoin:round;stroke-linecap:round}
.faint{stroke:var(--c);stroke-width:1;fill:none;opacity:.32;stroke-linejoin:round}
.dash{stroke-width:1.4;stroke-dasharray:4 4;opacity:.75}
.band{fill:var(--c);opacity:.18}
.area{fill:var(--c);opacity:.82}
.bar{fill:var(--c)}
.dot{fill:var(--c);stroke:var(--card);stroke-width:1.2}
.read{fill:transparent}
.read:hover{fill:var(--soft);fill-opacity:.13}
.note{color:var(--soft);font-size:12px;margin:4px 0 2px}
.table{overflow-x:auto;padding:4px 0}
main>.table+.table{margin-top:14px}
table{border-collapse:collapse;width:100%;font-size:13.5px}
th,td{text-align:left;padding:5px 16px;font-weight:400;vertical-align:top;overflow-wrap:anywhere}
th:first-child,td:first-child{white-space:nowrap;color:var(--soft)}
thead th{color:var(--soft);font-weight:600;border-bottom:1px solid var(--edge)}
.n{text-align:right}
@media print{body{background:#fff}main{padding:0}figure,.tiles div,.table{break-inside:avoid}}
)";

bool is_number(const std::string& text) {
  char* end = nullptr;
  std::strtod(text.c_str(), &end);
  return end != text.c_str() && (*end == 0 || *end == ' ' || *end == '%');
}

}  // namespace

HtmlReport::HtmlReport(std::string title, std::string subtitle) : title_(std::move(title)), subtitle_(std::move(subtitle)) {}

void HtmlReport::plots(bool open) {
  if (open != in_plots_) body_ += open ? "<div class=\"plots\">\n" : "</div>\n";
  in_plots_ = open;
}

void HtmlReport::tiles(const std::vector<Tile>& tiles) {
  plots(false);
  body_ += "<dl class=\"tiles\">\n";
  for (const Tile& t : tiles)
    body_ += fmt::format("<div><dt>{}</dt><dd>{}</dd><dd class=\"small\">{}</dd></div>\n", escape_html(t.name), escape_html(t.value), escape_html(t.note));
  body_ += "</dl>\n";
}

void HtmlReport::section(const std::string& title) {
  plots(false);
  body_ += fmt::format("<h2>{}</h2>\n", escape_html(title));
}

void HtmlReport::plot(const Plot& plot) {
  plots(true);
  body_ += plot_html(plot);
}

void HtmlReport::text(const std::string& paragraph) {
  plots(false);
  body_ += fmt::format("<p class=\"sub\">{}</p>\n", escape_html(paragraph));
}

void HtmlReport::table(const std::vector<std::string>& header, const Rows& rows, size_t parts) {
  plots(false);
  // Columns of numbers, but for cells that are empty.
  std::vector<bool> numbers(header.size(), true);
  for (const auto& row : rows)
    for (size_t c = 0; c < row.size() && c < numbers.size(); ++c) numbers[c] = numbers[c] && c > 0 && (row[c].empty() || is_number(row[c]));
  auto cells = [&](const char* tag, const std::vector<std::string>& row) {
    std::string html = "<tr>";
    for (size_t c = 0; c < row.size(); ++c) html += fmt::format("<{}{}>{}</{}>", tag, c < numbers.size() && numbers[c] ? " class=\"n\"" : "", escape_html(row[c]), tag);
    return html + "</tr>\n";
  };
  if (parts > 1) body_ += "<div class=\"plots\">\n";
  for (size_t part = 0; part < parts; ++part) {
    body_ += fmt::format("<div class=\"table\"><table>\n<thead>{}</thead>\n<tbody>\n", cells("th", header));
    for (size_t r = part * rows.size() / parts; r < (part + 1) * rows.size() / parts; ++r) body_ += cells("td", rows[r]);
    body_ += "</tbody></table></div>\n";
  }
  if (parts > 1) body_ += "</div>\n";
}

std::string HtmlReport::html() const {
  return fmt::format(
      "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\"/>\n<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>\n"
      "<title>{}</title>\n<style>{}</style>\n</head>\n<body>\n<main>\n<header><h1>{}</h1><p class=\"sub\">{}</p></header>\n{}{}</main>\n</body>\n</html>\n",
      escape_html(title_), kStyle, escape_html(title_), escape_html(subtitle_), body_, in_plots_ ? "</div>\n" : "");
}

}  // namespace dspark::formats
