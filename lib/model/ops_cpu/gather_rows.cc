#include "model/ops_cpu/backend.h"

#include <cstring>

#include "core/error.h"

namespace dspark::model::cpu {

void CpuOps::gather_rows(Context&, const GatherRows& a) {
  const int32_t* index = pointer<int32_t>(a.index);
  const int64_t cols = a.dst.cols, row_bytes = cols * dtype_bytes(a.dst.dtype);
  m_.pool().parallel_for(a.dst.rows, row_grain(cols), [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      DS_ASSERT(index[i] >= -1 && index[i] < a.table.rows, "index {} of {} rows", index[i], a.table.rows);
      const Out dst = out_row(a.dst, i);
      if (index[i] < 0)
        std::memset(dst.p, 0, static_cast<size_t>(row_bytes));
      else
        m_.kernels().convert(dst, in_row(a.table, index[i]), cols);
    }
  });
}

}  // namespace dspark::model::cpu
