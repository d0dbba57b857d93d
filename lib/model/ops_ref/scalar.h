// What the reference kernels are made of: S is double or std::complex<double>, and act = acc = S.
//
// Complex step: with inputs x + i h v (h tiny), the imaginary part of a result divided by h is its derivative along v,
// exact to rounding, as long as every step is analytic. So here nothing conjugates or takes an absolute value;
// decisions (max, sign, branches) look at real parts only; and whatever the contract calls "detached" passes through
// real().
#pragma once

#include <cmath>
#include <complex>
#include <cstdint>

#include "core/error.h"
#include "model/backend_access.h"
#include "model/ops.h"

namespace dspark::model::ref {

using Complex = std::complex<double>;

inline double real(double x) { return x; }
inline double real(Complex x) { return x.real(); }

// std::complex's product tests for NaN each time; finite numbers are all the reference multiplies in inner loops.
inline double mul(double a, double b) { return a * b; }
inline Complex mul(Complex a, Complex b) {
  return {a.real() * b.real() - a.imag() * b.imag(), a.real() * b.imag() + a.imag() * b.real()};
}

template <typename S>
constexpr DType dtype_of() {
  return sizeof(S) == 16 ? DType::c128 : DType::f64;
}

// A checked view of a tensor of S: every access is inside. The reference is the place where a wrong index is found.
template <typename T>
class Matrix {
 public:
  explicit Matrix(const Tensor& t) : data_(pointer<T>(t)), rows_(t.rows), cols_(t.cols), stride_(t.stride) {
    DS_ASSERT(!t || static_cast<int64_t>(sizeof(T)) == dtype_bytes(t.dtype), "a {} tensor read as {}-byte elements",
              dtype_name(t.dtype), sizeof(T));
  }
  explicit operator bool() const { return data_ != nullptr; }
  int64_t rows() const { return rows_; }
  int64_t cols() const { return cols_; }
  T& operator()(int64_t i, int64_t j) const {
    DS_ASSERT(i >= 0 && i < rows_ && j >= 0 && j < cols_, "element ({}, {}) of [{}, {}]", i, j, rows_, cols_);
    return data_[i * stride_ + j];
  }
  T& operator()(int64_t j) const { return (*this)(0, j); }  // of a vector

 private:
  T* data_;
  int64_t rows_, cols_, stride_;
};

using Ints = Matrix<int32_t>;

template <typename S>
S sigmoid(S x) {
  if (real(x) >= 0) return S(1) / (S(1) + std::exp(-x));
  const S e = std::exp(x);
  return e / (S(1) + e);
}

template <typename S>
void fill_zero(const Matrix<S>& m) {
  for (int64_t i = 0; i < m.rows(); ++i)
    for (int64_t j = 0; j < m.cols(); ++j) m(i, j) = S(0);
}

// One function an operator; defined in the file of its family, for both scalars.
#define DS_DECLARE(name, Args) \
  template <typename S>        \
  void name(const Args& a);
DS_OPS(DS_DECLARE)
#undef DS_DECLARE

#define DS_REF_INSTANTIATE(name, Args)       \
  template void name<double>(const Args& a); \
  template void name<Complex>(const Args& a);

}  // namespace dspark::model::ref
