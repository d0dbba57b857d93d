// Conversion between fp32 and bf16, and sums of rows.
#include "model/ops_cpu/isa/math.h"

namespace dspark::model::cpu::DS_ISA {

void convert(Out dst, In src, int64_t n) {
  with(dst, [&](auto* __restrict d) {
    with(src, [&](auto* __restrict s) {
      for (int64_t i = 0; i < n; ++i) store(d + i, load(s[i]));
    });
  });
}

void accumulate(Out dst, In src, int64_t n) {
  with(dst, [&](auto* __restrict d) {
    with(src, [&](auto* __restrict s) {
      for (int64_t i = 0; i < n; ++i) store(d + i, load(d[i]) + load(s[i]));
    });
  });
}

void column_sum(float* out, In dy, int64_t dy_stride, const float* x, int64_t x_stride, const float* scale,
                int64_t rows, int64_t cols, int add) {
  // Sums of 64 rows first, then of those: a tree of two levels keeps the rounding error of long columns down.
  constexpr int64_t kRows = 64;
  float total[kColumnBlock] = {};
  with(dy, [&](auto* g) {
    for (int64_t r0 = 0; r0 < rows; r0 += kRows) {
      const int64_t r1 = r0 + kRows < rows ? r0 + kRows : rows;
      float part[kColumnBlock] = {};
      for (int64_t r = r0; r < r1; ++r) {
        const auto* gr = g + r * dy_stride;
        if (x == nullptr) {
          for (int64_t c = 0; c < cols; ++c) part[c] += load(gr[c]);
        } else {
          const float* xr = x + r * x_stride;
          const float s = scale[r];
          for (int64_t c = 0; c < cols; ++c) part[c] += load(gr[c]) * (xr[c] * s);
        }
      }
      for (int64_t c = 0; c < cols; ++c) total[c] += part[c];
    }
  });
  if (add)
    for (int64_t c = 0; c < cols; ++c) out[c] += total[c];
  else
    for (int64_t c = 0; c < cols; ++c) out[c] = total[c];
}

}  // namespace dspark::model::cpu::DS_ISA
