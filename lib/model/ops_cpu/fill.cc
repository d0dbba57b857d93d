#include "model/ops_cpu/backend.h"

namespace dspark::model::cpu {

void CpuOps::fill(Context&, const Fill& a) {
  for_pieces(m_, a.dst.rows, a.dst.cols, [&](int64_t r, int64_t c, int64_t n) {
    switch (a.dst.dtype) {
      case DType::f32:
        std::fill_n(row<float>(a.dst, r) + c, n, static_cast<float>(a.value));
        return;
      case DType::f64:
        std::fill_n(row<double>(a.dst, r) + c, n, a.value);
        return;
      case DType::bf16:
        std::fill_n(row<bf16>(a.dst, r) + c, n, to_bf16(static_cast<float>(a.value)));
        return;
      case DType::i32:
        std::fill_n(row<int32_t>(a.dst, r) + c, n, static_cast<int32_t>(a.value));
        return;
      case DType::u8:
        std::fill_n(row<uint8_t>(a.dst, r) + c, n, static_cast<uint8_t>(a.value));
        return;
      default:
        DS_ASSERT(false, "fill of {}", dtype_name(a.dst.dtype));
    }
  });
}

}  // namespace dspark::model::cpu
