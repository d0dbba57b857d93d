// Cases of linear, linear_dx, linear_dw, refresh, add_bias, bias_grad.
#include "op_table.h"

namespace dspark::test {

using namespace model;

namespace {

struct Shape {
  int64_t n, out, in;
};

// y (+)= x W^T and both gradients in one run; the gradient checks tie them together.
void linear_all(OpRun& run, const Shape& s, Kind y_kind, Write write) {
  const double scale = 1 / std::sqrt(static_cast<double>(std::max<int64_t>(s.in, 1)));
  Weight* w = run.weight("w", s.out, s.in, scale);
  const Tensor x = run.input("x", Kind::act, s.n, s.in);
  linear(run.ctx(), {run.written("y", y_kind, s.n, s.out, write), x, w, write});
  const Tensor dy = run.cotangent("y", Kind::act, s.n, s.out);
  linear_dx(run.ctx(), {run.written("d_x", y_kind, s.n, s.in, write), dy, w, write});
  linear_dw(run.ctx(), {run.written("d_w", Kind::acc, s.out, s.in, write), dy, x, write});
}

}  // namespace

void add_product_cases(OpCases& cases) {
  // 16, 32 and 64 are register tiles, 256 and 512 cache blocks: one over each somewhere.
  for (const Shape& s : {Shape{0, 5, 7},
                         {1, 1, 1},
                         {1, 33, 65},
                         {3, 5, 7},
                         {17, 17, 17},
                         {33, 65, 31},
                         {65, 129, 64},
                         {5, 513, 257},
                         {129, 9, 258},
                         {257, 40, 3}}) {
    const std::string name = fmt::format("{}x{}x{}", s.n, s.out, s.in);
    cases.push_back({"linear", name + " acc", [=](OpRun& run) { linear_all(run, s, Kind::acc, Write::overwrite); }});
    cases.push_back({"linear", name + " act", [=](OpRun& run) { linear_all(run, s, Kind::act, Write::overwrite); }});
    cases.push_back({"linear", name + " add", [=](OpRun& run) { linear_all(run, s, Kind::acc, Write::add); }});
  }
  for (const Shape& s : {Shape{7, 33, 65}, {40, 65, 130}}) {
    cases.push_back({"linear", fmt::format("rows of {}x{}x{}", s.n, s.out, s.in),
                     [=](OpRun& run) {
                       Weight* w = run.weight("w", s.out, s.in);
                       const Tensor x = run.row_input("x", Kind::act, s.n, 1, s.in),
                                    dy = run.row_input("dy", Kind::act, s.n, 1, s.out);
                       linear(run.ctx(), {run.row_output("y", Kind::acc, s.n, 1, s.out), x, w});
                       linear(run.ctx(), {run.row_output("y_act", Kind::act, s.n, 1, s.out), x, w});
                       linear(run.ctx(), {run.row_inout("y_add", Kind::acc, s.n, 1, s.out), x, w, Write::add});
                       linear_dx(run.ctx(), {run.row_output("dx", Kind::acc, s.n, 1, s.in), dy, w});
                     },
                     s.n});
  }
  cases.push_back({"refresh", "after the value changed", [](OpRun& run) {
                     Weight* w = run.weight("w", 19, 21);
                     copy(run.ctx(), {w->value, run.input("new_w", Kind::act, 19, 21)});
                     refresh(run.ctx(), {w});
                     linear(run.ctx(), {run.output("y", Kind::acc, 3, 19), run.input("x", Kind::act, 3, 21), w});
                     linear_dx(run.ctx(), {run.output("dx", Kind::acc, 3, 21), run.input("dy", Kind::act, 3, 19), w});
                   }});
  for (const auto& [n, m] : {std::pair<int64_t, int64_t>{0, 3}, {1, 1}, {5, 33}, {130, 7}}) {
    for (const Write write : {Write::overwrite, Write::add}) {
      cases.push_back({"bias", fmt::format("[{}, {}] {}", n, m, write == Write::add ? "add" : "overwrite"),
                       [=, n = n, m = m](OpRun& run) {
                         const Tensor y = run.inout("y", Kind::act, n, m), z = run.inout("z", Kind::acc, n, m),
                                      bias = run.input("bias", Kind::acc, 1, m);
                         add_bias(run.ctx(), {y, bias});
                         add_bias(run.ctx(), {z, bias});
                         const Tensor dy = run.cotangent("y", Kind::act, n, m);
                         bias_grad(run.ctx(), {run.written("d_bias", Kind::acc, 1, m, write), dy, write});
                       }});
    }
  }
}

}  // namespace dspark::test
