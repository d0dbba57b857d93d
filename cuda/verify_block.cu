// Token-wise rejection sampling of one block, by one block of threads: it is a handful of sweeps over rows of the vocabulary.
#include "cuda/draw.h"

namespace dspark::cuda {
namespace {

DS_KERNEL void DS_THREADS_ALONE(kBlock) verify_kernel(VerifyArgs a) {
  const Shared<double> scratch(kDrawBytes, kBlock / kWarp);
  const auto row = [](const Matrix& m, int64_t r) { return static_cast<const float*>(m.data) + r * m.stride; };
  const int vocab = static_cast<int>(a.target.cols), draft_vocab = static_cast<int>(a.draft.cols);
  int k = 0;
  for (; k < a.drafted; ++k) {
    const int32_t id = load(a.draft_ids + k);
    double draft = 0;  // of one thread at most: a map's ids are distinct
    if (a.map == nullptr) {
      draft = thread() == 0 ? static_cast<double>(load(row(a.draft, k) + id)) : 0.0;
    } else {
      for (int j = thread(); j < draft_vocab; j += threads())
        if (load(a.map + j) == id) draft = static_cast<double>(load(row(a.draft, k) + j));
    }
    draft = block_sum(draft, scratch);
    if (!(load(a.uniform + k) * draft < static_cast<double>(load(row(a.target, k) + id)))) break;
  }
  const float* weights = row(a.target, k);
  if (k < a.drafted) {
    for (int i = thread(); i < vocab; i += threads()) store(a.residual + i, load(weights + i));
    sync_block();
    for (int j = thread(); j < draft_vocab; j += threads()) {
      float* at = a.residual + (a.map != nullptr ? load(a.map + j) : j);
      const float left = load(at) - load(row(a.draft, k) + j);
      store(at, left > 0 ? left : 0.0f);
    }
    sync_block();
    double left = 0;
    for (int i = thread(); i < vocab; i += threads()) left += static_cast<double>(load(a.residual + i));
    // All zero: the distributions are equal up to rounding, and the target's own is right.
    if (block_sum(left, scratch) > 0) weights = a.residual;
  }
  const int next = draw(weights, vocab, load(a.uniform + a.drafted));
  if (thread() != 0) return;
  store(a.result, k);
  store(a.result + 1, next);
}

}  // namespace

void verify_block(Stream stream, const VerifyArgs& a) { launch(stream, {1}, {kBlock}, kDrawBytes + kBlock / kWarp * 8, verify_kernel, a); }

}  // namespace dspark::cuda
