// Comparing arrays of numbers in tests. NaN-safe: a value that is not finite never passes as "close"; an infinite
// reference wants the same infinity; a NaN reference is an error, since it would prove nothing.
#pragma once

#include <fmt/format.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace dspark::test {

// [rows, cols], row-major.
struct Array {
  int64_t rows = 0, cols = 0;
  std::vector<double> values;

  Array() = default;
  Array(int64_t r, int64_t c) : rows(r), cols(c), values(static_cast<size_t>(r * c), 0.0) {}
  Array(int64_t r, int64_t c, std::vector<double> v) : rows(r), cols(c), values(std::move(v)) {}
  double& operator()(int64_t i, int64_t j) { return values[static_cast<size_t>(i * cols + j)]; }
  double operator()(int64_t i, int64_t j) const { return values[static_cast<size_t>(i * cols + j)]; }
};

struct Comparison {
  bool ok = true;
  double worst = 0;  // largest error / tolerance; infinite where a value is not finite
  std::string text;  // where and how much, for the failure message
};

// |got - want| <= tolerance, element by element; `tolerance` has want's shape.
inline Comparison compare(const Array& got, const Array& want, const Array& tolerance) {
  if (got.rows != want.rows || got.cols != want.cols) {
    return {false, std::numeric_limits<double>::infinity(),
            fmt::format("shape [{}, {}], expected [{}, {}]", got.rows, got.cols, want.rows, want.cols)};
  }
  Comparison result;
  int64_t bad = 0;
  for (int64_t i = 0; i < want.rows; ++i) {
    for (int64_t j = 0; j < want.cols; ++j) {
      const double g = got(i, j), w = want(i, j), tol = tolerance(i, j);
      const bool same = g == w;  // equal infinities too; never true for NaN
      const double error = same ? 0.0 : std::fabs(g - w);
      const bool finite = std::isfinite(g) && std::isfinite(w);
      const bool passes = same || (finite && error <= tol);
      const double ratio = same ? 0.0 : finite && tol > 0 ? error / tol : std::numeric_limits<double>::infinity();
      if (!passes) ++bad;
      if (!passes && (result.ok || ratio > result.worst)) {
        result.text =
            fmt::format("({}, {}): got {:.9g}, want {:.9g}, error {:.3g}, tolerance {:.3g}", i, j, g, w, g - w, tol);
      }
      result.ok = result.ok && passes;
      if (!(ratio <= result.worst)) result.worst = ratio;
    }
  }
  if (bad > 0) result.text = fmt::format("{} of {} elements differ, worst {}", bad, want.values.size(), result.text);
  return result;
}

// The same tolerance for every element.
inline Comparison compare(const Array& got, const Array& want, double tolerance) {
  Array t(want.rows, want.cols);
  for (double& v : t.values) v = tolerance;
  return compare(got, want, t);
}

// |got - want|_2 / |want|_2 (|got|_2 where want is all zero); infinite when shapes differ or a value is not finite.
inline double relative_error(const Array& got, const Array& want) {
  if (got.rows != want.rows || got.cols != want.cols) return std::numeric_limits<double>::infinity();
  double difference = 0, norm = 0;
  for (size_t i = 0; i < want.values.size(); ++i) {
    difference += (got.values[i] - want.values[i]) * (got.values[i] - want.values[i]);
    norm += want.values[i] * want.values[i];
  }
  const double error = std::sqrt(difference) / (norm > 0 ? std::sqrt(norm) : 1.0);
  return std::isfinite(error) ? error : std::numeric_limits<double>::infinity();
}

}  // namespace dspark::test
