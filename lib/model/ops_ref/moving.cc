// copy, fill, gather_rows, scatter_rows, scatter_add_rows
#include <vector>

#include "model/ops_ref/convert.h"
#include "model/ops_ref/scalar.h"

namespace dspark::model::ref {
namespace {

void copy_row(const Tensor& dst, int64_t dst_row, const Tensor& src, int64_t src_row) {
  const Tensor to = dst.row_range(dst_row, 1), from = src.row_range(src_row, 1);
  convert(BackendAccess::raw(to.data), to.dtype, to.stride, BackendAccess::raw(from.data), from.dtype, from.stride, 1,
          to.cols);
}

}  // namespace

template <typename S>
void copy(const Copy& a) {
  for (int64_t i = 0; i < a.src.rows; ++i) copy_row(a.dst, i, a.src, i);
}

template <typename S>
void fill(const Fill& a) {
  const bool integer = a.dst.dtype == DType::i32;
  std::vector<double> row(static_cast<size_t>(a.dst.cols), a.value);
  std::vector<int32_t> integers(static_cast<size_t>(a.dst.cols), integer ? static_cast<int32_t>(a.value) : 0);
  const void* values = integer ? static_cast<const void*>(integers.data()) : row.data();
  convert(BackendAccess::raw(a.dst.data), a.dst.dtype, a.dst.stride, values, integer ? DType::i32 : DType::f64, 0,
          a.dst.rows, a.dst.cols);
}

template <typename S>
void gather_rows(const GatherRows& a) {
  const Ints index(a.index);
  for (int64_t i = 0; i < a.dst.rows; ++i) {
    if (index(i) < 0)
      fill<S>({a.dst.row_range(i, 1), 0});
    else
      copy_row(a.dst, i, a.table, index(i));
  }
}

template <typename S>
void scatter_rows(const ScatterRows& a) {
  const Ints index(a.index);
  for (int64_t i = 0; i < a.src.rows; ++i)
    if (index(i) >= 0) copy_row(a.dst, index(i), a.src, i);
}

template <typename S>
void scatter_add_rows(const ScatterAddRows& a) {
  const Matrix<S> d_table(a.d_table), d_rows(a.d_rows);
  const Ints row_of(a.row_of), begin(a.begin), source(a.source);
  if (a.write == Write::overwrite) fill_zero(d_table);
  for (int64_t j = 0; j < row_of.cols(); ++j)
    for (int64_t i = begin(j); i < begin(j + 1); ++i)
      for (int64_t c = 0; c < d_table.cols(); ++c) d_table(row_of(j), c) += d_rows(source(i), c);
}

DS_REF_INSTANTIATE(copy, Copy)
DS_REF_INSTANTIATE(fill, Fill)
DS_REF_INSTANTIATE(gather_rows, GatherRows)
DS_REF_INSTANTIATE(scatter_rows, ScatterRows)
DS_REF_INSTANTIATE(scatter_add_rows, ScatterAddRows)

}  // namespace dspark::model::ref
