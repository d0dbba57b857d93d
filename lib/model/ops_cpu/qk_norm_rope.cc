#include "model/ops_cpu/backend.h"

#include "core/error.h"

namespace dspark::model::cpu {

namespace {

// cos and sin of one row, shared by all its heads.
struct Angles {
  float cos[kMaxHeadDim / 2], sin[kMaxHeadDim / 2];
};

// Rows are cut into at most this many parts for the sum of d_weight; which part a row falls into depends on n only.
constexpr int64_t kParts = 64;

}  // namespace

void CpuOps::qk_norm_rope(Context&, const QkNormRope& a) {
  DS_ASSERT(a.head_dim <= kMaxHeadDim, "head size {}", a.head_dim);
  const int32_t* position = pointer<int32_t>(a.position);
  m_.pool().parallel_for(a.x.rows, row_grain(a.x.cols), [&](int64_t begin, int64_t end, int) {
    Angles t;
    const HeadRow h{a.x.cols / a.head_dim, a.head_dim, a.rope.rot, t.cos, t.sin, pointer<float>(a.weight)};
    for (int64_t r = begin; r < end; ++r) {
      m_.kernels().rope_angles(t.cos, t.sin, pointer<float>(a.rope.inv_freq), a.rope.rot / 2, position[r],
                               a.rope.scale);
      m_.kernels().head_norm_rope(out_row(a.y, r), in_row(a.x, r), h, static_cast<float>(a.eps),
                                  a.inv_rms ? row<float>(a.inv_rms, r) : nullptr);
    }
  });
}

void CpuOps::qk_norm_rope_backward(Context&, const QkNormRopeBackward& a) {
  DS_ASSERT(a.head_dim <= kMaxHeadDim, "head size {}", a.head_dim);
  const int32_t* position = pointer<int32_t>(a.position);
  const int64_t n = a.x.rows, hd = a.head_dim;
  float* partial = m_.scratch<float>(0);  // [kParts, HD]
  static_assert(kParts * kMaxHeadDim * sizeof(float) <= Machine::kScratchBytes);
  m_.pool().parallel_for(
      kParts, row_grain(std::max<int64_t>(a.x.cols * n / kParts, 1)), [&](int64_t begin, int64_t end, int) {
        Angles t;
        const HeadRow h{a.x.cols / hd, hd, a.rope.rot, t.cos, t.sin, pointer<float>(a.weight)};
        for (int64_t part = begin; part < end; ++part) {
          float* dw = a.d_weight ? partial + part * hd : nullptr;
          if (dw != nullptr) std::fill_n(dw, hd, 0.0f);
          for (int64_t r = n * part / kParts; r < n * (part + 1) / kParts; ++r) {
            m_.kernels().rope_angles(t.cos, t.sin, pointer<float>(a.rope.inv_freq), a.rope.rot / 2, position[r],
                                     a.rope.scale);
            m_.kernels().head_norm_rope_backward(out_row(a.d_x, r), dw, in_row(a.dy, r), in_row(a.x, r), h,
                                                 a.inv_rms ? row<float>(a.inv_rms, r) : nullptr);
          }
        }
      });
  if (a.d_weight)
    for (int64_t c = 0; c < hd; c += kColumnBlock)
      m_.kernels().column_sum(pointer<float>(a.d_weight) + c, {partial + c, 0}, hd, nullptr, 0, nullptr, kParts,
                              std::min(kColumnBlock, hd - c), a.write_dw == Write::add);
}

}  // namespace dspark::model::cpu
