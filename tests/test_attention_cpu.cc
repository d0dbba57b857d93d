// The cpu backend's attention: what the table of operators does not ask. Against plain double sums at shapes that cross
// every tile boundary, and bit by bit: a row must not change with the rows, documents or threads that run beside it.
#include <catch2/catch.hpp>

#include <cmath>
#include <cstring>
#include <vector>

#include "model/backends.h"
#include "model/ops_cpu/gemm.h"

using namespace dspark;
using namespace dspark::model;

namespace {

struct Noise {
  uint32_t state;
  float operator()() {
    state = state * 1664525u + 1013904223u;
    return static_cast<float>(state >> 8) / 16777216.0f - 0.5f;
  }
};

// A matrix on the host and on the device.
struct Pair {
  std::vector<float> host;
  Tensor device;
};

class Fixture {
 public:
  Fixture(Precision precision, int threads)
      : backend_(make_cpu_backend({.device = "cpu", .precision = precision, .threads = threads})) {}
  Context& ctx() { return backend_->context(); }
  Pair random(int64_t rows, int64_t cols, uint32_t seed, float size = 1.0f) {
    Pair p{std::vector<float>(static_cast<size_t>(rows * cols)), ctx().allocate(ctx().act_dtype(), rows, cols)};
    Noise noise{seed};
    for (float& v : p.host) v = to_float(to_bf16(size * noise()));  // the same numbers in both precisions
    ctx().upload_now(p.device, {p.host.data(), DType::f32, rows, cols, cols});
    return p;
  }
  Tensor empty(DType dtype, int64_t rows, int64_t cols) {
    Tensor t = ctx().allocate(dtype, rows, cols);
    std::vector<float> nan(static_cast<size_t>(rows * cols), NAN);
    if (dtype != DType::i32) ctx().upload_now(t, {nan.data(), DType::f32, rows, cols, cols});
    return t;
  }
  Tensor indices(const std::vector<int32_t>& v) {
    const int64_t n = static_cast<int64_t>(v.size());
    Tensor t = ctx().allocate(DType::i32, 1, n);
    ctx().upload_now(t, {v.data(), DType::i32, 1, n, n});
    return t;
  }
  std::vector<float> values(const Tensor& t) {
    std::vector<float> v(static_cast<size_t>(t.size()));
    ctx().download_now({v.data(), DType::f32, t.rows, t.cols, t.cols}, t);
    return v;
  }

 private:
  std::unique_ptr<Backend> backend_;
};

// |got - want|_2 / |want|_2; NaN counts as infinitely wrong.
double error(const std::vector<float>& got, const std::vector<double>& want) {
  double diff = 0, size = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    if (!std::isfinite(got[i])) return INFINITY;
    diff += (got[i] - want[i]) * (got[i] - want[i]);
    size += want[i] * want[i];
  }
  return size > 0 ? std::sqrt(diff / size) : std::sqrt(diff);
}

struct Case {
  int64_t block, heads, kv_heads, head_dim, rows;
  std::vector<int32_t> anchors, docs;
  AnchorRule rule;
};

std::vector<Case> cases() {
  const std::vector<int32_t> anchors{0, 1, 63, 64, 65, 130, 131, 140, 200, 201, 299, -1};
  const std::vector<int32_t> docs{0, 0, 0, 0, 0, 0, 131, 131, 131, 201, 201, 0};
  return {
      {7, 9, 3, 64, 300, anchors, docs, {}},
      {5, 4, 1, 20, 300, anchors, docs, {.window = 70, .causal_in_block = true}},
      {8, 4, 2, 16, 300, anchors, docs, {.window = 3, .causal_in_block = true, .window_by_anchor = true}},
      {3, 2, 2, 6, 300, anchors, docs, {.window = 9}},
      {70, 6, 2, 8, 130, {5, 100}, {0, 0}, {.window = 66, .causal_in_block = true}},  // blocks longer than a tile
      {32, 16, 1, 128, 90, {64, 90}, {0, 0}, {}},                                     // heads of one kv head in two parts
  };
}

struct Problem {
  Pair q, k_ctx, v_ctx, k_block, v_block, d_out;
  Tensor out, lse, d_q, d_k_ctx, d_v_ctx, d_k_block, d_v_block;
};

Problem run(Fixture& f, Case c) {
  c.rule.block = c.block;
  const int64_t n = static_cast<int64_t>(c.anchors.size()) * c.block, wide = c.heads * c.head_dim,
                narrow = c.kv_heads * c.head_dim;
  Problem p{f.random(n, wide, 1, 6), f.random(c.rows, narrow, 2), f.random(c.rows, narrow, 3), f.random(n, narrow, 4),
            f.random(n, narrow, 5), f.random(n, wide, 6), {}, {}, {}, {}, {}, {}, {}};
  const DType act = f.ctx().act_dtype(), acc = f.ctx().acc_dtype();
  p.out = f.empty(act, n, wide), p.lse = f.empty(acc, n, c.heads), p.d_q = f.empty(act, n, wide);
  p.d_k_ctx = f.empty(acc, c.rows, narrow), p.d_v_ctx = f.empty(acc, c.rows, narrow);
  p.d_k_block = f.empty(acc, n, narrow), p.d_v_block = f.empty(acc, n, narrow);
  const Tensor rows = f.indices(c.anchors), docs = f.indices(c.docs);
  const double scale = 1 / std::sqrt(static_cast<double>(c.head_dim));
  f.ctx().ops().anchor_attention(f.ctx(), {p.out, p.lse, p.q.device, p.k_ctx.device, p.v_ctx.device, p.k_block.device,
                                           p.v_block.device, rows, docs, c.rule, c.head_dim, scale});
  const Tensor work = f.empty(acc, 1, anchor_attention_work(n, c.heads));
  f.ctx().ops().anchor_attention_backward(
      f.ctx(), {p.d_q, p.d_k_ctx, p.d_v_ctx, p.d_k_block, p.d_v_block, p.d_out.device, p.out, p.lse, p.q.device,
                p.k_ctx.device, p.v_ctx.device, p.k_block.device, p.v_block.device, rows, docs, work, c.rule, c.head_dim,
                scale});
  return p;
}

struct Expected {
  std::vector<double> out, lse, d_q, d_k_ctx, d_v_ctx, d_k_block, d_v_block;
};

Expected expect(const Case& c, const Problem& p) {
  Expected e;
  const size_t hd = static_cast<size_t>(c.head_dim), group = static_cast<size_t>(c.heads / c.kv_heads);
  const size_t wide = static_cast<size_t>(c.heads) * hd, narrow = static_cast<size_t>(c.kv_heads) * hd;
  const size_t block = static_cast<size_t>(c.block), n = c.anchors.size() * block;
  e.out.resize(n * wide), e.lse.resize(n * static_cast<size_t>(c.heads)), e.d_q.resize(n * wide);
  e.d_k_ctx.resize(static_cast<size_t>(c.rows) * narrow), e.d_v_ctx = e.d_k_ctx;
  e.d_k_block.resize(n * narrow), e.d_v_block = e.d_k_block;
  const double scale = 1 / std::sqrt(static_cast<double>(hd));
  for (size_t r = 0; r < n; ++r) {
    const size_t a = r / block;
    const int64_t slot = static_cast<int64_t>(r % block), at = c.anchors[a];
    if (at < 0) continue;
    for (size_t h = 0; h < static_cast<size_t>(c.heads); ++h) {
      struct Key {
        const float *k, *v;
        double *d_k, *d_v;
      };
      std::vector<Key> keys;
      const size_t col = h / group * hd;
      for (int64_t t = c.docs[a]; t < at; ++t) {
        if (c.rule.window > 0 && (c.rule.window_by_anchor ? t < at - c.rule.window : t <= at + slot - c.rule.window)) continue;
        const size_t o = static_cast<size_t>(t) * narrow + col;
        keys.push_back({&p.k_ctx.host[o], &p.v_ctx.host[o], &e.d_k_ctx[o], &e.d_v_ctx[o]});
      }
      for (int64_t j = 0; j < c.block; ++j) {
        if (c.rule.causal_in_block && (j > slot || (c.rule.window > 0 && slot - j >= c.rule.window))) continue;
        const size_t o = (a * block + static_cast<size_t>(j)) * narrow + col;
        keys.push_back({&p.k_block.host[o], &p.v_block.host[o], &e.d_k_block[o], &e.d_v_block[o]});
      }
      const float* q = &p.q.host[r * wide + h * hd];
      const float* d_out = &p.d_out.host[r * wide + h * hd];
      std::vector<double> prob;
      double sum = 0, delta = 0;
      for (const Key& key : keys) {
        double s = 0;
        for (size_t i = 0; i < hd; ++i) s += static_cast<double>(q[i]) * key.k[i];
        prob.push_back(std::exp(s * scale));
        sum += prob.back();
      }
      e.lse[r * static_cast<size_t>(c.heads) + h] = std::log(sum);
      for (size_t t = 0; t < keys.size(); ++t)
        for (size_t i = 0; i < hd; ++i) {
          e.out[r * wide + h * hd + i] += prob[t] / sum * keys[t].v[i];
          delta += prob[t] / sum * keys[t].v[i] * d_out[i];
        }
      for (size_t t = 0; t < keys.size(); ++t) {
        double d = -delta;
        for (size_t i = 0; i < hd; ++i) d += static_cast<double>(d_out[i]) * keys[t].v[i];
        for (size_t i = 0; i < hd; ++i) {
          e.d_q[r * wide + h * hd + i] += scale * prob[t] / sum * d * keys[t].k[i];
          keys[t].d_k[i] += scale * prob[t] / sum * d * q[i];
          keys[t].d_v[i] += prob[t] / sum * d_out[i];
        }
      }
    }
  }
  return e;
}

}  // namespace

TEST_CASE("anchor attention agrees with plain sums across tile boundaries", "[attention]") {
  // fp32: the fixtures' 5e-6 (outputs) and 2e-5 (gradients). bf16: inputs are exact and sums fp32. An output carries its own
  // rounding, uniform within 2^-8 relative at most: 2^-8 / sqrt(3) rms. Where products take pairs of bf16, so does every
  // probability; with values of both signs that moves the sum by as much again, and the two add up as squares. d_q and d_k see the
  // output's rounding through delta too.
  const Precision precision = GENERATE(Precision::fp32, Precision::bf16);
  const bool half = precision == Precision::bf16;
  const double rounding = std::exp2(-8) / std::sqrt(3.0), roundings = cpu::select_kernel("auto").level() == cpu::Isa::avx512bf16 ? 2 : 1;
  const double tolerance = half ? rounding * std::sqrt(roundings) : 5e-6, gradient = half ? 6e-3 : 2e-5;
  for (const Case& c : cases()) {
    Fixture f(precision, 2);
    const Problem p = run(f, c);
    const Expected e = expect(c, p);
    CAPTURE(c.block, c.heads, c.head_dim, c.rule.window);
    CHECK(error(f.values(p.out), e.out) <= tolerance);
    CHECK(error(f.values(p.lse), e.lse) <= 5e-6);
    CHECK(error(f.values(p.d_q), e.d_q) <= gradient);
    CHECK(error(f.values(p.d_k_ctx), e.d_k_ctx) <= gradient);
    CHECK(error(f.values(p.d_v_ctx), e.d_v_ctx) <= gradient);
    CHECK(error(f.values(p.d_k_block), e.d_k_block) <= gradient);
    CHECK(error(f.values(p.d_v_block), e.d_v_block) <= gradient);
  }
}

TEST_CASE("an anchor's bits do not depend on other anchors, documents or threads", "[attention]") {
  const Case c = cases()[GENERATE(0, 1)];
  Fixture two(Precision::bf16, 2), one(Precision::bf16, 1);
  const Problem all = run(two, c), same = run(one, c);
  for (const auto& [x, y] : {std::pair{all.out, same.out}, {all.d_q, same.d_q}, {all.d_k_ctx, same.d_k_ctx},
                             {all.d_v_ctx, same.d_v_ctx}, {all.d_k_block, same.d_k_block}})
    CHECK(two.values(x) == one.values(y));

  // Every anchor alone, its document moved to row 0 of a context of its own.
  const std::vector<float> out = two.values(all.out), d_q = two.values(all.d_q);
  const double scale = 1 / std::sqrt(static_cast<double>(c.head_dim));
  for (size_t a = 0; a + 1 < c.anchors.size(); ++a) {
    const int64_t n = c.anchors[a] - c.docs[a], first = static_cast<int64_t>(a) * c.block;
    AnchorRule rule = c.rule;
    rule.block = c.block;
    const auto block = [&](const Tensor& t) { return t.row_range(first, c.block); };
    const auto context = [&](const Tensor& t) { return t.row_range(c.docs[a], n); };
    const Tensor rows = two.indices({static_cast<int32_t>(n)}), docs = two.indices({0});
    const Tensor o = two.empty(DType::bf16, c.block, c.heads * c.head_dim), dq = two.empty(DType::bf16, o.rows, o.cols);
    const Tensor lse = two.empty(DType::f32, c.block, c.heads);
    two.ctx().ops().anchor_attention(
        two.ctx(), {o, lse, block(all.q.device), context(all.k_ctx.device), context(all.v_ctx.device),
                    block(all.k_block.device), block(all.v_block.device), rows, docs, rule, c.head_dim, scale});
    const Tensor d_ctx = two.empty(DType::f32, n, c.kv_heads * c.head_dim), d_ctx2 = two.empty(DType::f32, n, d_ctx.cols);
    const Tensor d_b = two.empty(DType::f32, c.block, d_ctx.cols), d_b2 = two.empty(DType::f32, c.block, d_ctx.cols);
    two.ctx().ops().anchor_attention_backward(
        two.ctx(), {dq, d_ctx, d_ctx2, d_b, d_b2, block(all.d_out.device), o, lse, block(all.q.device),
                    context(all.k_ctx.device), context(all.v_ctx.device), block(all.k_block.device),
                    block(all.v_block.device), rows, docs, two.empty(DType::f32, 1, c.block * c.heads), rule, c.head_dim,
                    scale});
    const size_t begin = static_cast<size_t>(first * o.cols), size = static_cast<size_t>(o.size());
    const std::vector<float> alone = two.values(o), dq_alone = two.values(dq);
    CAPTURE(a);
    CHECK(std::memcmp(alone.data(), &out[begin], size * sizeof(float)) == 0);
    CHECK(std::memcmp(dq_alone.data(), &d_q[begin], size * sizeof(float)) == 0);
  }
}

TEST_CASE("cache attention: the same bits row by row and all at once, equal to plain sums", "[attention]") {
  const Precision precision = GENERATE(Precision::fp32, Precision::bf16);
  const int64_t window = GENERATE(0, 5, 64, 100);
  const int64_t heads = 9, kv_heads = 3, hd = 64, n = 150, first = 61;
  Fixture f(precision, 2);
  const Pair q = f.random(n, heads * hd, 1, 6), k = f.random(first + n, kv_heads * hd, 2), v = f.random(first + n, kv_heads * hd, 3);
  const auto attend = [&](int64_t begin, int64_t count) {
    const Tensor out = f.empty(f.ctx().act_dtype(), count, heads * hd);
    f.ctx().ops().cache_attention(f.ctx(), {out, q.device.row_range(begin, count), k.device, v.device, first + begin, window,
                                            hd, 0.125});
    return f.values(out);
  };
  const std::vector<float> all = attend(0, n);
  std::vector<double> want(all.size());
  for (int64_t i = 0; i < n; ++i)
    for (int64_t h = 0; h < heads; ++h) {
      double sum = 0;
      const int64_t low = window == 0 ? 0 : std::max<int64_t>(0, first + i - window + 1);
      double* o = &want[static_cast<size_t>(i * heads * hd + h * hd)];
      for (int64_t t = low; t <= first + i; ++t) {
        double s = 0;
        const size_t row = static_cast<size_t>(t * kv_heads * hd + h / 3 * hd);
        for (int64_t j = 0; j < hd; ++j) s += static_cast<double>(q.host[static_cast<size_t>(i * heads * hd + h * hd + j)]) * k.host[row + static_cast<size_t>(j)];
        const double p = std::exp(0.125 * s);
        sum += p;
        for (int64_t j = 0; j < hd; ++j) o[j] += p * v.host[row + static_cast<size_t>(j)];
      }
      for (int64_t j = 0; j < hd; ++j) o[j] /= sum;
    }
  CHECK(error(all, want) <= (precision == Precision::fp32 ? 5e-6 : 2e-3));
  const size_t row = static_cast<size_t>(heads * hd);
  for (const int64_t step : {1, 7, 64})
    for (int64_t i = 0; i < n; i += step) {
      const std::vector<float> some = attend(i, std::min(step, n - i));
      REQUIRE(std::memcmp(some.data(), &all[static_cast<size_t>(i) * row], some.size() * sizeof(float)) == 0);
    }
}
