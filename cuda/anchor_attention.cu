// anchor_attention: flash-style, one warp a task of 16 query rows, fp32 softmax.
#include "cuda/anchor_attention.h"

namespace dspark::cuda {
namespace {

template <typename T>
constexpr int kTasks = sizeof(T) == 2 ? 8 : 4;  // warps of a block; fp32 tiles are twice as large

template <typename T, int kHd>
DS_KERNEL void DS_THREADS_ALONE(kTasks<T>* kWarp) anchor_attention_kernel(AnchorArgs a) {
  constexpr int kPitch = kHd + 8, kRows = 16 * kTasks<T>;
  const Shared<T> q(0, kRows * kPitch), k(kRows * kPitch * static_cast<int>(sizeof(T)), kKeys * kPitch),
      v((kRows + kKeys) * kPitch * static_cast<int>(sizeof(T)), kKeys * kPitch);
  const AnchorTasks<kTasks<T>> tasks(a);
  load_tile<T, kHd>(q, kRows, a.q, a.head_dim, [&](int r) { return tasks.query(a, r); });
  Softmax<T, kHd> softmax;
  const int slots[2] = {tasks.row(0) % a.block, tasks.row(1) % a.block};
  tasks.template for_keys<T, kHd>(a, k, v, [&](int key0, const auto& sees) {
    softmax.attend(q, warp() * 16, k, v, key0, a.scale, [&](int half, int key) { return sees(slots[half], key); });
  });
  softmax.finish();
  DS_UNROLL
  for (int half = 0; half < 2; ++half) {
    const Place p = tasks.place(a, half);
    if (p.row < 0) continue;
    const bool padding = tasks.view.row < 0;
    if (lane() % 4 == 0) store(static_cast<float*>(a.lse.data) + p.row * a.lse.stride + tasks.head(a, half), padding ? 0.0f : softmax.top[half] + logf(softmax.sum[half]));
    softmax.store_row(a.out, p, a.head_dim, half, padding);
  }
}

template <typename T>
void run(Stream stream, const AnchorArgs& a) {
  by_head_size(a.head_dim, [&](auto size) {
    constexpr int kHd = decltype(size)::value;
    launch(stream, {task_blocks(a, kTasks<T>), static_cast<unsigned>(a.kv_heads)}, {kTasks<T> * kWarp}, (16 * kTasks<T> + 2 * kKeys) * (kHd + 8) * static_cast<int>(sizeof(T)),
           anchor_attention_kernel<T, kHd>, a);
  });
}

}  // namespace

void anchor_attention(Stream stream, const AnchorArgs& a) {
  if (a.anchors == 0) return;
  if (a.in_bf16) run<bf16>(stream, a);
  else run<float>(stream, a);
}

}  // namespace dspark::cuda
