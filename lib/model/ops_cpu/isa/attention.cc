// Attention on tiles: two small products with a softmax between, forward and backward.
#include "model/ops_cpu/isa/small_product.h"

namespace dspark::model::cpu::DS_ISA {

void attention_load(float* dst, In src, int64_t stride, int64_t rows, int64_t cols, int64_t padded, float scale) {
  with(src, [&](auto* s) {
    for (int64_t r = 0; r < rows; ++r, s += stride, dst += padded) {
      int64_t i = 0;
      for (; i + kWidth <= cols; i += kWidth) store_v(dst + i, load_v(s + i) * scale);
      for (; i < cols; ++i) dst[i] = load(s[i]) * scale;
      for (; i < padded; ++i) dst[i] = 0.0f;
    }
  });
}

void attention_store(Out dst, int64_t stride, const float* src, int64_t rows, int64_t cols, int64_t padded, float factor) {
  with(dst, [&](auto* d) {
    for (int64_t r = 0; r < rows; ++r, src += padded, d += stride) {
      int64_t i = 0;
      for (; i + kWidth <= cols; i += kWidth) store_v(d + i, load_v(src + i) * factor);
      for (; i < cols; ++i) store(d + i, src[i] * factor);
    }
  });
}

void attention_transpose(float* dst, const float* src, int64_t keys, int64_t padded) {
  // 4 x 4 blocks in 128-bit registers: eight shuffles for sixteen elements on every level.
  typedef float v4 __attribute__((vector_size(16)));
  typedef float v4_mem __attribute__((vector_size(16), aligned(4), may_alias));
  const auto get = [](const float* p) -> v4 { return *reinterpret_cast<const v4_mem*>(p); };
  const auto put = [](float* p, v4 v) { *reinterpret_cast<v4_mem*>(p) = v; };
  int64_t key = 0;
  for (; key + 4 <= keys; key += 4)
    for (int64_t i = 0; i < padded; i += 4) {
      const float* s = src + key * padded + i;
      const v4 r0 = get(s), r1 = get(s + padded), r2 = get(s + 2 * padded), r3 = get(s + 3 * padded);
      const v4 a = __builtin_shufflevector(r0, r1, 0, 4, 1, 5), b = __builtin_shufflevector(r0, r1, 2, 6, 3, 7);
      const v4 c = __builtin_shufflevector(r2, r3, 0, 4, 1, 5), d = __builtin_shufflevector(r2, r3, 2, 6, 3, 7);
      float* t = dst + i * kTileKeys + key;
      put(t, __builtin_shufflevector(a, c, 0, 1, 4, 5));
      put(t + kTileKeys, __builtin_shufflevector(a, c, 2, 3, 6, 7));
      put(t + 2 * kTileKeys, __builtin_shufflevector(b, d, 0, 1, 4, 5));
      put(t + 3 * kTileKeys, __builtin_shufflevector(b, d, 2, 3, 6, 7));
    }
  for (; key < keys; ++key)
    for (int64_t i = 0; i < padded; ++i) dst[i * kTileKeys + key] = src[key * padded + i];
  if (keys < kTileKeys)
    for (int64_t i = 0; i < padded; ++i)
      for (int64_t k = keys; k < kTileKeys; ++k) dst[i * kTileKeys + k] = 0.0f;
}

namespace {

// Vectors of a tile that cover the keys [begin, end).
struct Span {
  int64_t first, last;  // columns, multiples of kWidth
  Span(int64_t begin, int64_t end)
      : first(begin / kWidth * kWidth), last((end + kWidth - 1) / kWidth * kWidth) {}
};

DS_INLINE vi visible(int64_t col, int32_t low, int32_t high) {
  const vi key = iota() + static_cast<int32_t>(col);
  return (key >= splat(low)) & (key < splat(high));
}

// score[rows, span] = q keys, over the columns of `span` only.
void scores(int64_t rows, int64_t padded, const float* q, const float* keys_t, Span span, float* score) {
  small_product({.m = rows, .n = span.last - span.first, .k = padded, .a = q, .a_row_step = padded, .a_k_step = 1,
                 .b = keys_t + span.first, .b_stride = kTileKeys, .c = score + span.first, .c_stride = kTileKeys,
                 .add = false});
}

}  // namespace

void attention_update(const AttentionUpdate& a) {
  const Span span(a.begin, a.end);
  scores(a.rows, a.padded, a.q, a.keys_t, span, a.score);
  for (int64_t r = 0; r < a.rows; ++r) {
    float* s = a.score + r * kTileKeys;
    const int32_t low = a.low[r], high = a.high[r];
    if (low >= high) {  // nothing to see: its probabilities are zeros
      for (int64_t c = span.first; c < span.last; c += kWidth) store_v(s + c, vf{});
      continue;
    }
    vf tops = splat(a.top[r]);
    for (int64_t c = span.first; c < span.last; c += kWidth) {
      const vf v = select(visible(c, low, high), load_v(s + c), splat(-__builtin_inff()));
      tops = max(tops, v);
    }
    const float top = max_of(tops);
    vf norms{};
    // Columns that only other rows see add zeros: the sum is the same without them.
    for (int64_t c = span.first; c < span.last; c += kWidth) {
      const vf p = select(visible(c, low, high), exp_v(load_v(s + c) - top), vf{});
      store_v(s + c, p);
      norms += p;
    }
    const float shrink = exp_v(splat(a.top[r] - top))[0];
    a.norm[r] = a.norm[r] * shrink + sum_of(norms);
    a.top[r] = top;
    float* sum = a.sum + r * a.padded;
    if (shrink != 1.0f)
      for (int64_t c = 0; c < a.padded; c += kWidth) store_v(sum + c, load_v(sum + c) * shrink);
  }
  small_product({.m = a.rows, .n = a.padded, .k = a.end - a.begin, .a = a.score + a.begin, .a_row_step = kTileKeys,
                 .a_k_step = 1, .b = a.values + a.begin * a.padded, .b_stride = a.padded, .c = a.sum,
                 .c_stride = a.padded, .add = true});
}

float attention_finish(Out out, const float* sum, float top, float norm, int64_t cols) {
  const float inverse = norm > 0.0f ? 1.0f / norm : (norm == 0.0f ? 0.0f : norm);  // NaN stays NaN
  attention_store(out, 0, sum, 1, cols, cols, inverse);
  return norm == 0.0f ? 0.0f : top + log_f(norm);
}

void attention_gradient(const AttentionGradient& a) {
  const Span span(a.begin, a.end);
  scores(a.rows, a.padded, a.q, a.keys_t, span, a.prob);
  scores(a.rows, a.padded, a.d_out, a.values_t, span, a.d_score);
  for (int64_t r = 0; r < a.rows; ++r) {
    float* p = a.prob + r * kTileKeys;
    float* d = a.d_score + r * kTileKeys;
    for (int64_t c = span.first; c < span.last; c += kWidth) {
      const vi seen = visible(c, a.low[r], a.high[r]);
      const vf prob = select(seen, exp_v(load_v(p + c) - a.lse[r]), vf{});
      store_v(p + c, prob);
      store_v(d + c, select(seen, prob * (load_v(d + c) - a.delta[r]), vf{}));
    }
  }
  const int64_t keys = a.end - a.begin;
  if (a.d_q != nullptr)
    small_product({.m = a.rows, .n = a.padded, .k = keys, .a = a.d_score + a.begin, .a_row_step = kTileKeys, .a_k_step = 1,
                   .b = a.keys + a.begin * a.padded, .b_stride = a.padded, .c = a.d_q, .c_stride = a.padded, .add = true});
  if (a.d_keys == nullptr) return;
  small_product({.m = keys, .n = a.padded, .k = a.rows, .a = a.d_score + a.begin, .a_row_step = 1, .a_k_step = kTileKeys,
                 .b = a.q, .b_stride = a.padded, .c = a.d_keys + a.begin * a.padded, .c_stride = a.padded, .add = true});
  small_product({.m = keys, .n = a.padded, .k = a.rows, .a = a.prob + a.begin, .a_row_step = 1, .a_k_step = kTileKeys,
                 .b = a.d_out, .b_stride = a.padded, .c = a.d_values + a.begin * a.padded, .c_stride = a.padded,
                 .add = true});
}

float attention_dot(In a, In b, int64_t n) {
  float result = 0.0f;
  with(a, [&](auto* x) {
    with(b, [&](auto* y) { result = lane_sum(n, [&](int64_t i) { return load(x[i]) * load(y[i]); }); });
  });
  return result;
}

}  // namespace dspark::model::cpu::DS_ISA
