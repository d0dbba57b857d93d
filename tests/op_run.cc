#include "op_run.h"

#include <complex>

#include "core/rng.h"

namespace dspark::test {
namespace {

using model::Tensor;

// -8192 is a bf16 number; as an operand it would spoil any result it slips into.
constexpr double kSentinel = -8192;
constexpr int32_t kIntSentinel = -8192;
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

uint64_t hash(const std::string& text) {  // FNV-1a
  uint64_t h = 1469598103934665603ull;
  for (const char c : text) h = (h ^ static_cast<unsigned char>(c)) * 1099511628211ull;
  return h;
}

double round_bf16(double v) { return to_float(to_bf16(static_cast<float>(v))); }

}  // namespace

OpRun::~OpRun() {
  for (const Buffer& b : buffers_) ctx_.free(b.whole);
}

Array OpRun::draw(const std::string& name, int64_t rows, int64_t cols, double scale) const {
  const Rng rng(hash(case_), RngStream::test, hash(name));
  Array a(rows, cols);
  for (size_t i = 0; i < a.values.size(); ++i) a.values[i] = round_bf16(rng.normal(i) * scale);
  return a;
}

Array OpRun::noisy(const std::string& name, Kind kind, const Array& values) const {
  const Rng rng(setup_.noise_seed, RngStream::test, hash(name + " noise"));
  Array a = values;
  for (size_t i = 0; i < a.values.size(); ++i) a.values[i] *= 1 + noise(kind) * (2 * rng.uniform(i) - 1);
  return a;
}

Array OpRun::direction(const std::string& name, int64_t rows, int64_t cols) const {
  const Rng rng(setup_.step_seed, RngStream::test, hash(name + " direction"));
  Array a(rows, cols);
  for (size_t i = 0; i < a.values.size(); ++i) a.values[i] = rng.normal(i);
  return a;
}

Array OpRun::rows_of(const Array& all, int64_t unit_rows) const {
  if (setup_.n_units < 0) return all;
  Array a(setup_.n_units * unit_rows, all.cols);
  for (int64_t i = 0; i < a.rows; ++i)
    for (int64_t j = 0; j < a.cols; ++j) a(i, j) = all(setup_.first_unit * unit_rows + i, j);
  return a;
}

std::vector<int64_t> OpRun::slice(const std::vector<int64_t>& all) const {
  if (setup_.n_units < 0) return all;
  return {all.begin() + setup_.first_unit, all.begin() + setup_.first_unit + setup_.n_units};
}

std::vector<double> OpRun::slice(const std::vector<double>& all) const {
  if (setup_.n_units < 0) return all;
  return {all.begin() + setup_.first_unit, all.begin() + setup_.first_unit + setup_.n_units};
}

// The view inside a larger buffer of sentinels: two guard rows after it; with `strided` one before, three columns to
// the left and four to the right.
Tensor OpRun::make(const std::string& name, DType dtype, const Array& values, bool is_output, bool exact) {
  const int64_t left = setup_.strided ? 3 : 0, right = setup_.strided ? 4 : 0, above = setup_.strided ? 1 : 0;
  const int64_t rows = values.rows + above + 2, cols = values.cols + left + right;
  Buffer b;
  b.name = name;
  b.whole = ctx_.allocate(dtype, rows, cols);
  b.view = b.whole.row_range(above, values.rows).col_range(left, values.cols);
  b.initial = values;
  b.is_output = is_output;
  b.exact = exact;

  const auto fill = [&](auto* data, auto sentinel) {
    std::fill(data, data + rows * cols, sentinel);
    for (int64_t i = 0; i < values.rows; ++i)
      for (int64_t j = 0; j < values.cols; ++j)
        data[(i + above) * cols + left + j] = static_cast<std::decay_t<decltype(sentinel)>>(values(i, j));
  };
  if (dtype == DType::i32) {
    std::vector<int32_t> host(static_cast<size_t>(rows * cols));
    fill(host.data(), kIntSentinel);
    ctx_.upload_now(b.whole, {host.data(), DType::i32, rows, cols, cols});
  } else if (dtype == DType::c128) {
    std::vector<std::complex<double>> host(static_cast<size_t>(rows * cols));
    fill(host.data(), std::complex<double>(kSentinel));
    if (!is_output && name == setup_.step_input) {
      const Array v = direction(name, values.rows, values.cols);
      for (int64_t i = 0; i < values.rows; ++i)
        for (int64_t j = setup_.step_first_col; j < values.cols; ++j)
          host[static_cast<size_t>((i + above) * cols + left + j)].imag(kStep * v(i, j));
    }
    ctx_.upload_now(b.whole, {host.data(), DType::c128, rows, cols, cols});
  } else {
    std::vector<double> host(static_cast<size_t>(rows * cols));
    fill(host.data(), kSentinel);
    ctx_.upload_now(b.whole, {host.data(), DType::f64, rows, cols, cols});
  }
  buffers_.push_back(b);
  return b.view;
}

Tensor OpRun::make_input(const std::string& name, Kind kind, const Array& values) {
  inputs_[name] = values;
  return make(name, dtype(kind), noise(kind) > 0 ? noisy(name, kind, values) : values, false);
}

void OpRun::stored(const std::string& name, Kind kind, const Tensor& t) {
  if (noise(kind) == 0 || t.size() == 0) return;
  Array a(t.rows, t.cols);
  ctx_.download_now({a.values.data(), DType::f64, t.rows, t.cols, t.cols}, t);
  a = noisy(name, kind, a);
  ctx_.upload_now(t, {a.values.data(), DType::f64, t.rows, t.cols, t.cols});
}

Tensor OpRun::input(const std::string& name, Kind kind, int64_t rows, int64_t cols, double scale) {
  return make_input(name, kind, draw(name, rows, cols, scale));
}

Tensor OpRun::row_input(const std::string& name, Kind kind, int64_t n, int64_t unit_rows, int64_t cols, double scale) {
  return make_input(name, kind, rows_of(draw(name, n * unit_rows, cols, scale), unit_rows));
}

Tensor OpRun::given(const std::string& name, Kind kind, int64_t rows, int64_t cols, const std::vector<double>& values) {
  DS_ASSERT(static_cast<int64_t>(values.size()) == rows * cols, "{}: {} values for [{}, {}]", name, values.size(), rows,
            cols);
  return make(name, dtype(kind), Array(rows, cols, values), false);
}

Tensor OpRun::ints(const std::string& name, const std::vector<int64_t>& values) {
  Array a(1, static_cast<int64_t>(values.size()));
  for (size_t i = 0; i < values.size(); ++i) a.values[i] = static_cast<double>(values[i]);
  return make(name, DType::i32, a, false);
}

Tensor OpRun::uniform(const std::string& name, const std::vector<double>& values) {
  return make(name, DType::f64, Array(1, static_cast<int64_t>(values.size()), values), false);
}

model::Weight* OpRun::weight(const std::string& name, int64_t out, int64_t in, double scale,
                             bool needs_input_gradient) {
  weights_.push_back({});
  model::Weight* w = &weights_.back();
  w->value = input(name, Kind::act, out, in, scale);
  w->needs_input_gradient = needs_input_gradient;
  model::refresh(ctx_, {w});
  return w;
}

Tensor OpRun::output(const std::string& name, Kind kind, int64_t rows, int64_t cols, bool exact) {
  Array a(rows, cols);
  for (double& v : a.values) v = kNan;
  return make(name, dtype(kind), a, true, exact);
}

Tensor OpRun::row_output(const std::string& name, Kind kind, int64_t n, int64_t unit_rows, int64_t cols) {
  const Tensor t = output(name, kind, units(n) * unit_rows, cols);
  buffers_.back().unit_rows = unit_rows;
  return t;
}

Tensor OpRun::row_inout(const std::string& name, Kind kind, int64_t n, int64_t unit_rows, int64_t cols) {
  const Array values = rows_of(draw(name, n * unit_rows, cols, 1), unit_rows);
  const Tensor t = make(name, dtype(kind), values, true);
  buffers_.back().unit_rows = unit_rows;
  return t;
}

Tensor OpRun::int_output(const std::string& name, int64_t cols) {
  Array a(1, cols);
  for (double& v : a.values) v = -77777;
  return make(name, DType::i32, a, true, true);
}

Tensor OpRun::inout(const std::string& name, Kind kind, int64_t rows, int64_t cols, double scale, bool exact) {
  return make(name, dtype(kind), draw(name, rows, cols, scale), true, exact);
}

void OpRun::watch(const std::string& output, const std::string& part, int64_t first_col, int64_t cols, bool exact) {
  parts_.push_back({output, part, first_col, cols, exact});
  for (Buffer& b : buffers_)
    if (b.name == output) b.watched = true;
}

Tensor OpRun::cotangent(const std::string& output, Kind kind, int64_t rows, int64_t cols) {
  const Tensor t = input("cotangent of " + output, kind, rows, cols);
  cotangents_[output] = inputs_["cotangent of " + output];
  return t;
}

Tensor OpRun::work(Kind kind, int64_t n) {
  const bool strided = setup_.strided;
  setup_.strided = false;  // scratch memory is what the arena gives: contiguous and aligned
  Array a(1, n);
  for (double& v : a.values) v = kNan;
  const Tensor t = make("work", dtype(kind), a, false);
  setup_.strided = strided;
  return t;
}

Tensor OpRun::work_bytes(int64_t bytes) {
  const int64_t element = dtype_bytes(ctx_.acc_dtype());
  DS_ASSERT(bytes % element == 0, "{} bytes of work for elements of {}", bytes, element);
  const Tensor t = work(Kind::acc, bytes / element);
  return {t.data, DType::u8, 1, bytes, bytes};
}

std::map<std::string, Output> OpRun::outputs() {
  std::map<std::string, Output> result;
  for (const Buffer& b : buffers_) {
    const int64_t rows = b.whole.rows, cols = b.whole.cols;
    std::vector<std::complex<double>> host(static_cast<size_t>(rows * cols));
    if (b.whole.dtype == DType::i32) {
      std::vector<int32_t> raw(host.size());
      ctx_.download_now({raw.data(), DType::i32, rows, cols, cols}, b.whole);
      std::copy(raw.begin(), raw.end(), host.begin());
    } else if (b.whole.dtype == DType::c128) {
      ctx_.download_now({host.data(), DType::c128, rows, cols, cols}, b.whole);
    } else {
      std::vector<double> raw(host.size());
      ctx_.download_now({raw.data(), DType::f64, rows, cols, cols}, b.whole);
      std::copy(raw.begin(), raw.end(), host.begin());
    }
    const bool strided = cols != b.view.cols;
    const int64_t above = strided ? 1 : 0, left = strided ? 3 : 0;
    Output out;
    out.value = Array(b.view.rows, b.view.cols);
    out.imaginary = Array(b.view.rows, b.view.cols);
    out.initial = b.initial;
    out.exact = b.exact;
    out.dtype = b.whole.dtype;
    out.unit_rows = b.unit_rows;
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < cols; ++j) {
        const std::complex<double> v = host[static_cast<size_t>(i * cols + j)];
        const int64_t r = i - above, c = j - left;
        if (r >= 0 && r < b.view.rows && c >= 0 && c < b.view.cols) {
          out.value(r, c) = v.real();
          out.imaginary(r, c) = v.imag();
        } else {
          DS_REQUIRE(v == kSentinel, "{}: '{}' [{}, {}]: the sentinel at ({}, {}) was overwritten by {}", case_, b.name,
                     b.view.rows, b.view.cols, r, c, v.real());
        }
      }
    }
    for (const Part& p : parts_) {
      if (p.output != b.name) continue;
      Output part = out;
      part.exact = p.exact;
      part.compared = true;
      const auto cut = [&](const Array& a) {
        Array columns(a.rows, p.cols);
        for (int64_t i = 0; i < a.rows; ++i)
          for (int64_t j = 0; j < p.cols; ++j) columns(i, j) = a(i, p.first_col + j);
        return columns;
      };
      part.value = cut(out.value);
      part.imaginary = cut(out.imaginary);
      part.initial = cut(out.initial);
      result[p.name] = part;
    }
    out.compared = b.is_output && !b.watched;
    if (b.is_output) result[b.name] = out;
  }
  return result;
}

CaseResult run_case(const OpCase& c, model::Context& ctx, const RunSetup& setup) {
  OpRun run(ctx, c.title(), setup);
  c.run(run);
  CaseResult result;
  result.outputs = run.outputs();
  result.inputs = run.input_values();
  result.cotangents = run.cotangents();
  return result;
}

}  // namespace dspark::test
