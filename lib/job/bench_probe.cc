#include "job/bench_probe.h"

#include <algorithm>

#include "core/log.h"
#include "core/rng.h"
#include "core/stop.h"

namespace dspark::job {

using namespace model;

Probe::Probe(Context& ctx) : ctx(ctx), planned_(ctx.device().name() == "plan") {}

Probe::~Probe() {
  for (const Tensor& t : owned_) ctx.free(t);
}

Tensor Probe::empty(DType type, int64_t rows, int64_t cols) {
  owned_.push_back(ctx.allocate(type, rows, cols));
  return owned_.back();
}

Tensor Probe::random(DType type, int64_t rows, int64_t cols, float scale) {
  const Tensor t = empty(type, rows, cols);
  if (planned_) return t;
  const Rng rng(owned_.size(), RngStream::noise);
  std::vector<float> twice(static_cast<size_t>(2 * cols));
  for (int64_t c = 0; c < cols; ++c)
    twice[static_cast<size_t>(c)] = twice[static_cast<size_t>(c + cols)] = scale * static_cast<float>(rng.normal(static_cast<uint64_t>(c)));
  // Rows one column apart, as many at once as are left before the row comes round, and as may be staged.
  for (int64_t r = 0; r < rows;) {
    const int64_t n = std::min({rows - r, cols - r % cols, std::max<int64_t>(1, (int64_t{1} << 24) / cols)});
    ctx.upload_now(t.row_range(r, n), {twice.data() + r % cols, DType::f32, n, cols, 1});
    r += n;
  }
  return t;
}

Tensor Probe::ints(int64_t n, const std::function<int32_t(int64_t)>& value) {
  std::vector<int32_t> v;
  for (int64_t i = 0; i < n; ++i) v.push_back(value(i));
  const Tensor t = empty(DType::i32, 1, n);
  ctx.upload_now(t, {v.data(), DType::i32, 1, n, n});
  return t;
}

Weight* Probe::weight(int64_t out, int64_t in) { return weight(act(out, in, 0.05f), true); }

Weight* Probe::weight(const Tensor& value, bool input_gradient) {
  weights_.push_back(std::make_unique<Weight>());
  weights_.back()->value = value;
  weights_.back()->needs_input_gradient = input_gradient;
  refresh(ctx, {weights_.back().get()});
  return weights_.back().get();
}

std::vector<double> times(Context& ctx, const std::function<void()>& body, double seconds, int repeats, double least) {
  const auto timed = [&](int calls) {
    stop_point();
    return ctx.device().time([&] {
      for (int i = 0; i < calls; ++i) body();
    }) / calls;
  };
  timed(1);
  int calls = 1;
  if (least > 0) {
    const double start = now_s();  // as long as it takes to wait for it
    timed(1);
    calls = static_cast<int>(std::clamp(least / std::max(now_s() - start, 1e-9), 1.0, 1e4));
  }
  std::vector<double> samples;
  for (const double start = now_s(); now_s() - start < seconds || static_cast<int>(samples.size()) < repeats;) samples.push_back(timed(calls));
  return samples;
}

double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v.size() % 2 == 1 ? v[v.size() / 2] : (v[v.size() / 2 - 1] + v[v.size() / 2]) / 2;
}

}  // namespace dspark::job
