#include "model/ops_cpu/backend.h"

#include <cstring>

namespace dspark::model::cpu {

void CpuOps::copy(Context&, const Copy& a) {
  for_pieces(m_, a.dst.rows, a.dst.cols, [&](int64_t r, int64_t c, int64_t n) {
    if (a.dst.dtype == a.src.dtype) {
      const size_t element = static_cast<size_t>(dtype_bytes(a.dst.dtype));
      const auto offset = [&](const Tensor& t) { return pointer<std::byte>(t) + (r * t.stride + c) * element; };
      std::memcpy(offset(a.dst), offset(a.src), static_cast<size_t>(n) * element);
    } else {
      m_.kernels().convert(out_row(a.dst, r, c), in_row(a.src, r, c), n);
    }
  });
}

}  // namespace dspark::model::cpu
