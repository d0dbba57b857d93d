// Cases of copy, fill, gather_rows, scatter_rows, scatter_add_rows: exact, but for the sums of the last.
#include <numeric>

#include "op_table.h"

namespace dspark::test {

using namespace model;

void add_moving_cases(OpCases& cases) {
  for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{0, 5}, {1, 1}, {3, 7}, {5, 65}, {2, 129}}) {
    for (const auto& [from, to] :
         {std::pair{Kind::act, Kind::acc}, {Kind::acc, Kind::act}, {Kind::act, Kind::act}, {Kind::acc, Kind::acc}}) {
      cases.push_back({"copy",
                       fmt::format("[{}, {}] {} to {}", rows, cols, from == Kind::act ? "act" : "acc",
                                   to == Kind::act ? "act" : "acc"),
                       [=, r = rows, c = cols, from = from, to = to](OpRun& run) {
                         const Tensor src = run.input("src", from, r, c);
                         copy(run.ctx(), {run.output("dst", to, r, c, true), src});
                       }});
    }
    cases.push_back({"fill", fmt::format("[{}, {}]", rows, cols), [r = rows, c = cols](OpRun& run) {
                       fill(run.ctx(), {run.output("dst", Kind::acc, r, c, true), -1.5});
                       fill(run.ctx(), {run.output("dst_act", Kind::act, r, c, true), 0});
                     }});
  }
  cases.push_back({"copy", "i32", [](OpRun& run) {
                     copy(run.ctx(), {run.int_output("dst", 5), run.ints("src", {3, -1, 0, 2147483647, -2147483647})});
                   }});
  cases.push_back({"fill", "i32", [](OpRun& run) { fill(run.ctx(), {run.int_output("dst", 7), -1}); }});

  for (const int64_t cols : {1, 7, 65}) {
    for (const Kind kind : {Kind::act, Kind::acc}) {
      const std::string name = fmt::format("{} columns of {}", cols, kind == Kind::act ? "act" : "acc");
      cases.push_back({"gather_rows", name,
                       [=](OpRun& run) {
                         const std::vector<int64_t> index = run.slice(std::vector<int64_t>{4, 0, -1, 4, 3, 0});
                         const Tensor dst = run.row_output("dst", kind, 6, 1, cols);
                         gather_rows(run.ctx(), {dst, run.input("table", kind, 5, cols), run.ints("index", index)});
                       },
                       6});
      cases.push_back(
          {"scatter_rows", name, [=](OpRun& run) {
             const Tensor dst = run.inout("dst", kind, 6, cols, 1, true);
             scatter_rows(run.ctx(), {dst, run.input("src", kind, 4, cols), run.ints("index", {5, -1, 0, 2})});
           }});
    }
    for (const Write write : {Write::overwrite, Write::add}) {
      cases.push_back({"scatter_add_rows",
                       fmt::format("{} columns, {}", cols, write == Write::add ? "add" : "overwrite"), [=](OpRun& run) {
                         // gather rows 4 0 4 4 2 with two padding rows; CSR of its inverse, listed out of order
                         const Tensor table = run.input("table", Kind::acc, 6, cols);
                         gather_rows(run.ctx(), {run.output("rows", Kind::act, 7, cols), table,
                                                 run.ints("index", {4, 0, 4, -1, 4, 2, -1})});
                         const Tensor d_rows = run.cotangent("rows", Kind::act, 7, cols);
                         scatter_add_rows(run.ctx(), {run.written("d_table", Kind::acc, 6, cols, write), d_rows,
                                                      run.ints("row_of", {2, 4, 0}), run.ints("begin", {0, 1, 4, 5}),
                                                      run.ints("source", {5, 0, 2, 4, 1}), write});
                       }});
    }
  }
  cases.push_back({"scatter_add_rows", "nothing to add", [](OpRun& run) {
                     scatter_add_rows(run.ctx(), {run.output("d_table", Kind::acc, 3, 5),
                                                  run.input("d_rows", Kind::act, 2, 5), run.ints("row_of", {}),
                                                  run.ints("begin", {0}), run.ints("source", {}), Write::overwrite});
                   }});
  cases.push_back({"gather_rows", "no rows", [](OpRun& run) {
                     gather_rows(run.ctx(), {run.output("dst", Kind::act, 0, 5), run.input("table", Kind::act, 3, 5),
                                             run.ints("index", {})});
                   }});
}

}  // namespace dspark::test
