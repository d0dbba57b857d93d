#include "model/ops_cpu/backend.h"

#include "core/error.h"

namespace dspark::model::cpu {

void CpuOps::scatter_rows(Context&, const ScatterRows& a) {
  const int32_t* index = pointer<int32_t>(a.index);
  m_.pool().parallel_for(a.src.rows, row_grain(a.src.cols), [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      DS_ASSERT(index[i] >= -1 && index[i] < a.dst.rows, "index {} of {} rows", index[i], a.dst.rows);
      if (index[i] >= 0) m_.kernels().convert(out_row(a.dst, index[i]), in_row(a.src, i), a.src.cols);
    }
  });
}

}  // namespace dspark::model::cpu
