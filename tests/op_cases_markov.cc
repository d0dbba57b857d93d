// Cases of sigmoid_gate, rnn_cell and their backward.
#include "op_table.h"

namespace dspark::test {

using namespace model;

namespace {

void gate_all(OpRun& run, int64_t n, int64_t r, Kind kind, Write write) {
  const Tensor pre = run.input("pre", kind, n, r), x = run.input("x", kind, n, r);
  sigmoid_gate(run.ctx(), {run.output("y", kind, n, r), pre, x});
  const Tensor dy = run.cotangent("y", kind, n, r);
  sigmoid_gate_backward(run.ctx(), {run.output("d_pre", kind, n, r), run.written("d_x", Kind::acc, n, r, write), dy, pre, x, write});
}

void cell_all(OpRun& run, int64_t n, int64_t r, Kind kind, bool first) {
  const Tensor pre = run.input("pre", kind, n, 3 * r), state = first ? Tensor{} : run.input("state", Kind::acc, n, r);
  rnn_cell(run.ctx(), {run.output("state_out", Kind::acc, n, r), run.output("out", kind, n, r), pre, state});
  const Tensor d_state_out = run.cotangent("state_out", Kind::acc, n, r), d_out = run.cotangent("out", kind, n, r);
  rnn_cell_backward(run.ctx(), {run.output("d_pre", kind, n, 3 * r), first ? Tensor{} : run.output("d_state", Kind::acc, n, r), d_out, d_state_out, pre, state});
}

}  // namespace

void add_markov_cases(OpCases& cases) {
  for (const auto& [n, r] : {std::pair<int64_t, int64_t>{0, 5}, {1, 1}, {3, 17}, {33, 65}})
    for (const Kind kind : {Kind::act, Kind::acc}) {
      const std::string name = fmt::format("[{}, {}] {}", n, r, kind == Kind::act ? "act" : "acc");
      for (const Write write : {Write::overwrite, Write::add})
        cases.push_back({"sigmoid_gate", name + (write == Write::add ? ", added" : ""), [=, n = n, r = r](OpRun& run) { gate_all(run, n, r, kind, write); }});
      for (const bool first : {true, false})
        cases.push_back({"rnn_cell", name + (first ? ", first" : ""), [=, n = n, r = r](OpRun& run) { cell_all(run, n, r, kind, first); }});
    }
  cases.push_back({"rnn_cell", "the last step: no gradient comes back", [](OpRun& run) {
                     const Tensor pre = run.input("pre", Kind::acc, 2, 9), state = run.input("state", Kind::acc, 2, 3);
                     rnn_cell(run.ctx(), {run.output("state_out", Kind::acc, 2, 3), run.output("out", Kind::acc, 2, 3), pre, state});
                     const Tensor d_out = run.cotangent("out", Kind::acc, 2, 3);
                     rnn_cell_backward(run.ctx(), {run.output("d_pre", Kind::acc, 2, 9), run.output("d_state", Kind::acc, 2, 3), d_out, {}, pre, state});
                   }});
}

}  // namespace dspark::test
