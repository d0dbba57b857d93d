#include "model/ops_cpu/backend.h"

#include "core/error.h"

namespace dspark::model::cpu {

void CpuOps::scatter_add_rows(Context& ctx, const ScatterAddRows& a) {
  if (a.write == Write::overwrite) fill(ctx, {.dst = a.d_table, .value = 0});
  const int32_t* row_of = pointer<int32_t>(a.row_of);
  const int32_t* begins = pointer<int32_t>(a.begin);
  const int32_t* source = pointer<int32_t>(a.source);
  // Rows are distinct, so each sum belongs to one thread; its terms come in the order of the CSR.
  m_.pool().parallel_for(a.row_of.cols, row_grain(a.d_table.cols), [&](int64_t begin, int64_t end, int) {
    for (int64_t j = begin; j < end; ++j) {
      DS_ASSERT(row_of[j] >= 0 && row_of[j] < a.d_table.rows, "row {} of {}", row_of[j], a.d_table.rows);
      const Out sum = out_row(a.d_table, row_of[j]);
      for (int32_t i = begins[j]; i < begins[j + 1]; ++i) {
        DS_ASSERT(source[i] >= 0 && source[i] < a.d_rows.rows, "source {} of {}", source[i], a.d_rows.rows);
        m_.kernels().accumulate(sum, in_row(a.d_rows, source[i]), a.d_table.cols);
      }
    }
  });
}

}  // namespace dspark::model::cpu
