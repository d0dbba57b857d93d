// Cases of add_rmsnorm, rmsnorm_backward, qk_norm_rope, qk_norm_rope_backward, swiglu, swiglu_backward.
#include "op_table.h"

namespace dspark::test {

using namespace model;

namespace {

std::string kind_name(Kind k) { return k == Kind::act ? "act" : "acc"; }

void norm_all(OpRun& run, int64_t n, int64_t d, Kind kind, bool unit_offset, Write write) {
  const Tensor x = run.input("x", Kind::acc, n, d), weight = run.input("w", Kind::acc, 1, d),
               inv_rms = run.output("inv_rms", Kind::acc, 1, n);
  add_rmsnorm(run.ctx(), {.y = run.output("y", kind, n, d),
                          .x_out = {},
                          .x = x,
                          .delta = {},
                          .weight = weight,
                          .inv_rms = inv_rms,
                          .eps = 1e-6,
                          .unit_offset = unit_offset});
  run.stored("inv_rms", Kind::acc, inv_rms);
  const Tensor dy = run.cotangent("y", kind, n, d);
  rmsnorm_backward(run.ctx(), {.d_x = run.written("d_x", Kind::acc, n, d, write),
                               .d_weight = run.written("d_w", Kind::acc, 1, d, write),
                               .dy = dy,
                               .x = x,
                               .weight = weight,
                               .inv_rms = inv_rms,
                               .write_dx = write,
                               .write_dw = write,
                               .unit_offset = unit_offset});
}

struct Heads {
  int64_t n, heads, head_dim, rot;
  bool norm = true;
  double scale = 1;
};

void qk_all(OpRun& run, const Heads& h, Kind kind, bool in_place) {
  const int64_t cols = h.heads * h.head_dim;
  std::vector<int64_t> positions;
  std::vector<double> frequencies;
  for (int64_t i = 0; i < h.n; ++i) positions.push_back(i * 37 % 1000);
  for (int64_t i = 0; i < h.rot / 2; ++i)
    frequencies.push_back(static_cast<double>(
        static_cast<float>(std::pow(10000.0, -2.0 * static_cast<double>(i) / static_cast<double>(h.rot)))));
  const Tensor position = run.ints("position", positions);
  const Rope rope{h.rot > 0 ? run.given("inv_freq", Kind::acc, 1, h.rot / 2, frequencies) : Tensor{}, h.rot, h.scale};
  const Tensor weight = h.norm ? run.input("w", Kind::acc, 1, h.head_dim) : Tensor{};
  const Tensor inv_rms = h.norm ? run.output("inv_rms", Kind::acc, h.n, h.heads) : Tensor{};
  const Tensor x = run.input("x", kind, h.n, cols), y = run.output("y", kind, h.n, cols);
  if (in_place) copy(run.ctx(), {y, x});
  qk_norm_rope(run.ctx(), {.y = y,
                           .x = in_place ? y : x,
                           .weight = weight,
                           .position = position,
                           .inv_rms = inv_rms,
                           .rope = rope,
                           .head_dim = h.head_dim,
                           .eps = 1e-6});
  const Tensor dy = run.cotangent("y", kind, h.n, cols), d_x = run.output("d_x", kind, h.n, cols);
  if (in_place) copy(run.ctx(), {d_x, dy});
  qk_norm_rope_backward(run.ctx(), {.d_x = d_x,
                                    .d_weight = h.norm ? run.output("d_w", Kind::acc, 1, h.head_dim) : Tensor{},
                                    .dy = in_place ? d_x : dy,
                                    .x = x,
                                    .weight = weight,
                                    .position = position,
                                    .inv_rms = inv_rms,
                                    .rope = rope,
                                    .head_dim = h.head_dim,
                                    .write_dw = Write::overwrite});
}

void swiglu_all(OpRun& run, int64_t n, int64_t f, Kind kind) {
  const Tensor gate_up = run.input("gate_up", kind, n, 2 * f, 2);
  swiglu(run.ctx(), {run.output("y", kind, n, f), gate_up});
  const Tensor dy = run.cotangent("y", kind, n, f);
  swiglu_backward(run.ctx(), {run.output("d_gate_up", kind, n, 2 * f), dy, gate_up});
}

}  // namespace

void add_norm_cases(OpCases& cases) {
  for (const Kind kind : {Kind::act, Kind::acc}) {
    for (const auto& [n, d] : {std::pair<int64_t, int64_t>{0, 5}, {1, 1}, {3, 7}, {5, 65}, {33, 129}}) {
      const std::string name = fmt::format("[{}, {}] {}", n, d, kind_name(kind));
      cases.push_back(
          {"rmsnorm", name, [=, n = n, d = d](OpRun& run) { norm_all(run, n, d, kind, false, Write::overwrite); }});
      cases.push_back({"rmsnorm", name + " unit offset, add",
                       [=, n = n, d = d](OpRun& run) { norm_all(run, n, d, kind, true, Write::add); }});
      cases.push_back({"swiglu", name, [=, n = n, d = d](OpRun& run) { swiglu_all(run, n, d, kind); }});
    }
    cases.push_back({"add_rmsnorm", "delta, x_out apart, " + kind_name(kind), [=](OpRun& run) {
                       const Tensor x = run.input("x", Kind::acc, 4, 37), delta = run.input("delta", kind, 4, 37),
                                    w = run.input("w", Kind::acc, 1, 37);
                       add_rmsnorm(run.ctx(), {.y = run.output("y", kind, 4, 37),
                                               .x_out = run.output("x_out", Kind::acc, 4, 37),
                                               .x = x,
                                               .delta = delta,
                                               .weight = w,
                                               .inv_rms = {},
                                               .eps = 1e-5});
                     }});
    cases.push_back({"add_rmsnorm", "delta, in place, " + kind_name(kind),
                     [=](OpRun& run) {
                       const Tensor x = run.row_inout("x", Kind::acc, 9, 1, 65),
                                    delta = run.row_input("delta", kind, 9, 1, 65),
                                    w = run.input("w", Kind::acc, 1, 65);
                       add_rmsnorm(run.ctx(), {.y = run.row_output("y", kind, 9, 1, 65),
                                               .x_out = x,
                                               .x = x,
                                               .delta = delta,
                                               .weight = w,
                                               .inv_rms = {},
                                               .eps = 1e-5});
                     },
                     9});
    for (const Heads& h : {Heads{0, 2, 8, 8},
                           {1, 1, 2, 2},
                           {5, 3, 16, 16},
                           {9, 2, 24, 24, true, 1.25},
                           {4, 2, 16, 6},
                           {4, 2, 80, 80},
                           {3, 2, 64, 0},
                           {6, 2, 16, 16, false},
                           {2, 1, 6, 6},
                           {3, 1, 200, 64}}) {
      const std::string name = fmt::format("{} rows, {} heads of {}, rot {}{}, {}", h.n, h.heads, h.head_dim, h.rot,
                                           h.norm ? "" : ", no norm", kind_name(kind));
      cases.push_back({"qk_norm_rope", name, [=](OpRun& run) { qk_all(run, h, kind, false); }});
      cases.push_back({"qk_norm_rope", name + ", in place", [=](OpRun& run) { qk_all(run, h, kind, true); }});
    }
  }
  cases.push_back(
      {"qk_norm_rope", "rows",
       [](OpRun& run) {
         const Rope rope{run.given("inv_freq", Kind::acc, 1, 4, {1, 0.25, 0.0625, 0.015625}), 8, 1};
         const Tensor position = run.ints("position", run.slice(std::vector<int64_t>{0, 4, 9, 9, 100000, 3, 2}));
         qk_norm_rope(run.ctx(), {.y = run.row_output("y", Kind::act, 7, 1, 24),
                                  .x = run.row_input("x", Kind::act, 7, 1, 24),
                                  .weight = run.input("w", Kind::acc, 1, 8),
                                  .position = position,
                                  .inv_rms = {},
                                  .rope = rope,
                                  .head_dim = 8,
                                  .eps = 1e-6});
       },
       7});
  cases.push_back(
      {"swiglu", "rows",
       [](OpRun& run) {
         swiglu(run.ctx(), {run.row_output("y", Kind::act, 5, 1, 33), run.row_input("gate_up", Kind::act, 5, 1, 66)});
       },
       5});
  cases.push_back({"swiglu", "large gates stay finite", [](OpRun& run) {
                     const Tensor gate_up = run.given("gate_up", Kind::acc, 1, 8, {-200, -90, 90, 200, 1, -1, 2, -2});
                     swiglu(run.ctx(), {run.output("y", Kind::acc, 1, 4), gate_up});
                     const Tensor dy = run.given("dy", Kind::acc, 1, 4, {1, 1, 1, 1});
                     swiglu_backward(run.ctx(), {run.output("d_gate_up", Kind::acc, 1, 8), dy, gate_up});
                   }});
}

}  // namespace dspark::test
