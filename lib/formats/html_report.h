// A report as one HTML file: tiles with the numbers that matter, plots, tables. The page is whole in itself: its style is inside, nothing
// is fetched and nothing is run, so it can be mailed, archived and opened anywhere; light or dark as the reader's system is.
//
//   HtmlReport page("Training of drafter", "60 of 60 steps");
//   page.tiles({{"accepted length", "1.50", "validation"}});
//   page.section("Curves");  page.plot(...);  page.plot(...);   // two beside each other where there is room
//   page.table({"name", "value"}, {{"layers", "5"}});
//   write_text_atomic(path, page.html());
//
// All text given is escaped.
#pragma once

#include <string>
#include <vector>

#include "formats/svg_plot.h"

namespace dspark::formats {

class HtmlReport {
 public:
  HtmlReport(std::string title, std::string subtitle);

  struct Tile {
    std::string name, value, note;
  };
  void tiles(const std::vector<Tile>& tiles);
  void section(const std::string& title);
  void plot(const Plot& plot);
  using Rows = std::vector<std::vector<std::string>>;
  // The first column names the rows; columns whose cells are numbers stand to the right. A long one may be cut into `parts` that stand
  // beside each other where there is room.
  void table(const std::vector<std::string>& header, const Rows& rows, size_t parts = 1);
  void text(const std::string& paragraph);

  std::string html() const;

 private:
  void plots(bool open);
  std::string title_, subtitle_, body_;
  bool in_plots_ = false;
};

}  // namespace dspark::formats
