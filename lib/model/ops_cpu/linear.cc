#include <cstdlib>

#include "core/error.h"
#include "model/ops_cpu/backend.h"

namespace dspark::model::cpu {

CpuPacking::~CpuPacking() {
  for (void* p : memory_) std::free(p);
}

void* CpuPacking::memory(int which, int64_t bytes) {
  if (memory_[which] == nullptr) memory_[which] = allocate_block(bytes);
  return memory_[which];
}

const CpuPacking& packing(const Weight& w) {
  const auto* p = dynamic_cast<const CpuPacking*>(w.packing.get());
  DS_ASSERT(p != nullptr, "a weight [{}, {}] is used before it was refreshed", w.out(), w.in());
  return *p;
}

void input_gradient(Machine& m, int64_t rows, const Weight& w, MatRef dy, MatOut dx, bool add) {
  DS_ASSERT(w.needs_input_gradient, "a weight [{}, {}] was not packed for input gradients", w.out(), w.in());
  if (const PackedB& b = packing(w).backward; b.data != nullptr)
    gemm_packed(m.gemm(), rows, w.in(), w.out(), dy, b, dx, add);
  else
    gemm_weight_nn(m.gemm(), rows, w.in(), w.out(), dy, mat(w.value), dx, add);  // the same bits
}

void CpuOps::refresh(Context&, const Refresh& a) {
  Weight& w = *a.w;
  if (!w.packing) w.packing = std::make_shared<CpuPacking>();
  auto& p = const_cast<CpuPacking&>(packing(w));
  const DType dtype = w.value.dtype;
  const auto packed = [&](int64_t n, int64_t k) { return packed_b_bytes(m_.gemm().kernel_of_weight(dtype, n, k), dtype, n, k); };
  const PackedB* whole = w.first_columns_of ? &packing(*w.first_columns_of).forward : nullptr;
  if (whole && packed_prefix(*whole, w.in()).data != nullptr)
    p.forward = packed_prefix(*whole, w.in());
  else
    p.forward = pack_b_nt(m_.gemm(), w.out(), w.in(), mat(w.value), p.memory(0, packed(w.out(), w.in())));
  if (w.needs_input_gradient && w.value.size() <= kPackedForGradient)
    p.backward = pack_b_nn(m_.gemm(), w.in(), w.out(), mat(w.value), p.memory(1, packed(w.in(), w.out())));
}

void CpuOps::linear(Context&, const Linear& a) {
  gemm_packed(m_.gemm(), a.x.rows, a.w->out(), a.w->in(), mat(a.x), packing(*a.w).forward, mat_out(a.y),
              a.write == Write::add);
}

void CpuOps::linear_dx(Context&, const LinearDx& a) {
  input_gradient(m_, a.dy.rows, *a.w, mat(a.dy), mat_out(a.dx), a.write == Write::add);
}

void CpuOps::linear_dw(Context&, const LinearDw& a) {
  gemm_tn(m_.gemm(), a.dw.rows, a.dw.cols, a.x.rows, mat(a.dy), mat(a.x), mat_out(a.dw), a.write == Write::add);
}

}  // namespace dspark::model::cpu
