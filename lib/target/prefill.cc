#include "target/prefill.h"

#include <algorithm>

namespace dspark::target {

using namespace model;

namespace {
// Long documents go through in pieces of this many rows: rows do not depend on the cut, and the arena stays small.
constexpr int64_t kRows = 512;
}  // namespace

Prefill::Prefill(TargetModel& target, std::vector<int> taps, int64_t max_length)
    : target_(target), taps_(std::move(taps)), cache_(target.make_cache(max_length)),
      width_((static_cast<int64_t>(taps_.size()) + 1) * target.config().hidden),
      arena_(target.context().device(),
             TargetModel::arena_bytes(target.config(), target.context().act_dtype() == DType::f32, kRows, 0) +
                 kRows * (width_ * dtype_bytes(DType::bf16) + 64) + (1 << 16)) {}

Prefill::~Prefill() { target_.free_cache(cache_); }

std::vector<bf16> Prefill::run(std::span<const int32_t> ids) {
  Context& ctx = target_.context();
  const auto n = static_cast<int64_t>(ids.size());
  std::vector<bf16> out(static_cast<size_t>(n * width_));
  cache_.length = 0;
  for (int64_t begin = 0; begin < n; begin += kRows) {
    const int64_t rows = std::min(kRows, n - begin);
    arena_.release(0);
    const Tensor device_ids = arena_.vector(DType::i32, rows), states = arena_.matrix(DType::bf16, rows, width_);
    ctx.upload_now(device_ids, {ids.data() + begin, DType::i32, 1, rows, rows});
    const Segment segment{&cache_, rows};
    target_.forward(arena_, device_ids, {&segment, 1}, taps_, states);
    ctx.download_now({out.data() + begin * width_, DType::bf16, rows, width_, width_}, states);
  }
  return out;
}

}  // namespace dspark::target
