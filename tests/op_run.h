// OpRun: one run of one operator case on one backend.
//
// A case is a lambda over an OpRun: it asks for named inputs, outputs and weights, and calls operators. It never says
// which backend it runs on. What the runner can then do with any case:
//   - run it on `ref` in fp64 and on another backend, and compare the outputs;
//   - run it on `ref` with relative noise on the inputs: how far the outputs move is the yardstick of the tolerance;
//   - run it on `ref` in complex128 with input x at x + i h v: every output called "d_x" is taken for the gradient of
//     sum(cotangent * output) with respect to the input "x" and checked (complex step);
//   - run a slice of its rows alone, or on another number of threads: the same bits.
// Inputs are drawn by (case, name) only and are bf16 numbers, so every backend starts from the same values. Outputs
// begin as NaN and stand between sentinels. `strided` gives every matrix an odd row stride and an odd first column.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "compare.h"
#include "model/ops.h"

namespace dspark::test {

enum class Kind { act, acc };

struct RunSetup {
  bool strided = false;
  double noise_act = 0, noise_acc = 0;  // relative noise on random inputs of that kind
  uint64_t noise_seed = 0;
  std::string step_input;  // complex step: this input moves by h along a direction drawn from step_seed
  uint64_t step_seed = 0;
  int64_t step_first_col = 0;            // the columns before it stay
  int64_t first_unit = 0, n_units = -1;  // the slice of row units to run; -1: all
};

constexpr double kStep = 1e-30;

// What came back from the device for one output.
struct Output {
  Array value, imaginary;  // imaginary: of complex128 runs, else empty
  Array initial;           // what an in-out tensor held before
  bool exact = false;      // no rounding is allowed: copies, indices
  bool compared = true;    // false where parts of it are compared instead
  DType dtype = DType::f32;
  int64_t unit_rows = 0;  // > 0: rows belong to row units of this size
};

class OpRun {
 public:
  OpRun(model::Context& ctx, const std::string& case_name, const RunSetup& setup)
      : ctx_(ctx), case_(case_name), setup_(setup) {}
  ~OpRun();
  OpRun(const OpRun&) = delete;
  OpRun& operator=(const OpRun&) = delete;

  model::Context& ctx() { return ctx_; }

  // Random N(0, scale^2) values.
  model::Tensor input(const std::string& name, Kind kind, int64_t rows, int64_t cols, double scale = 1);
  // The given values: no noise, no step.
  model::Tensor given(const std::string& name, Kind kind, int64_t rows, int64_t cols,
                      const std::vector<double>& values);
  model::Tensor ints(const std::string& name, const std::vector<int64_t>& values);
  model::Tensor uniform(const std::string& name, const std::vector<double>& values);  // f64 [1, n]
  model::Weight* weight(const std::string& name, int64_t out, int64_t in, double scale = 1,
                        bool needs_input_gradient = true);

  model::Tensor output(const std::string& name, Kind kind, int64_t rows, int64_t cols, bool exact = false);
  model::Tensor int_output(const std::string& name, int64_t cols);
  model::Tensor inout(const std::string& name, Kind kind, int64_t rows, int64_t cols, double scale = 1,
                      bool exact = false);
  // An output by Write: NaN before an overwrite, random values before an add.
  model::Tensor written(const std::string& name, Kind kind, int64_t rows, int64_t cols, model::Write write) {
    return write == model::Write::add ? inout(name, kind, rows, cols) : output(name, kind, rows, cols);
  }
  // Compares a part of an output under a name of its own; the whole is then no longer compared.
  void watch(const std::string& output, const std::string& part, int64_t first_col, int64_t cols, bool exact = false);

  // Gradients: the loss is sum(cotangent * output).
  model::Tensor cotangent(const std::string& output, Kind kind, int64_t rows,
                          int64_t cols);  // drawn, an input of the backward
  void cotangent_values(const std::string& output, const Array& values) { cotangents_[output] = values; }

  // An intermediate that a backend stores between two operators: rounding it to its dtype is a rounding of an operand, so
  // noise runs move it too (which matters where terms cancel).
  void stored(const std::string& name, Kind kind, const model::Tensor& t);

  // Row units: cases that can run a slice of their rows draw these for all n units and use only the slice.
  int64_t units(int64_t n) const { return setup_.n_units < 0 ? n : setup_.n_units; }
  int64_t first_unit() const { return setup_.n_units < 0 ? 0 : setup_.first_unit; }
  model::Tensor row_input(const std::string& name, Kind kind, int64_t n, int64_t unit_rows, int64_t cols,
                          double scale = 1);
  model::Tensor row_output(const std::string& name, Kind kind, int64_t n, int64_t unit_rows, int64_t cols);
  model::Tensor row_inout(const std::string& name, Kind kind, int64_t n, int64_t unit_rows, int64_t cols);
  std::vector<int64_t> slice(const std::vector<int64_t>& all) const;
  std::vector<double> slice(const std::vector<double>& all) const;

  model::Tensor work(Kind kind, int64_t n);  // acc or act [1, n], NaN inside, guarded
  model::Tensor work_bytes(int64_t bytes);   // u8 [1, bytes], 64-byte aligned, guarded

  // After the case: reads every output back; throws when a sentinel was overwritten.
  std::map<std::string, Output> outputs();
  const std::map<std::string, Array>& input_values() const { return inputs_; }
  const std::map<std::string, Array>& cotangents() const { return cotangents_; }
  // The direction along which `step_input` moved.
  Array direction(const std::string& name, int64_t rows, int64_t cols) const;

 private:
  struct Buffer {
    std::string name;
    model::Tensor whole, view;
    Array initial;
    bool is_output = false, watched = false, exact = false;
    int64_t unit_rows = 0;
  };
  struct Part {
    std::string output, name;
    int64_t first_col, cols;
    bool exact;
  };

  DType dtype(Kind kind) const { return kind == Kind::act ? ctx_.act_dtype() : ctx_.acc_dtype(); }
  double noise(Kind kind) const { return kind == Kind::act ? setup_.noise_act : setup_.noise_acc; }
  Array draw(const std::string& name, int64_t rows, int64_t cols, double scale) const;
  Array noisy(const std::string& name, Kind kind, const Array& values) const;
  Array rows_of(const Array& all, int64_t unit_rows) const;
  model::Tensor make(const std::string& name, DType dtype, const Array& values, bool is_output, bool exact = false);
  model::Tensor make_input(const std::string& name, Kind kind, const Array& values);

  model::Context& ctx_;
  std::string case_;
  RunSetup setup_;
  std::deque<Buffer> buffers_;
  std::deque<model::Weight> weights_;
  std::vector<Part> parts_;
  std::map<std::string, Array> inputs_, cotangents_;
};

struct OpCase {
  std::string op, name;
  std::function<void(OpRun&)> run;
  int64_t row_units = 0;  // > 0: every slice of row units computes the same bits alone
  std::string title() const { return op + ": " + name; }
};

struct CaseResult {
  std::map<std::string, Output> outputs;
  std::map<std::string, Array> inputs, cotangents;
};
CaseResult run_case(const OpCase& c, model::Context& ctx, const RunSetup& setup);

}  // namespace dspark::test
