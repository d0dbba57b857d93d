// Attention on tiles: two small products with a softmax between, forward and backward, on floats or on pairs of bf16.
#include <stddef.h>

#include "model/ops_cpu/isa/small_product.h"

namespace dspark::model::cpu::DS_ISA {

namespace {

// Units of `per` neighbours.
template <typename Unit>
constexpr int64_t per() {
  return __is_same(Unit, Pair) ? 2 : 1;
}

template <typename T>
DS_INLINE void load_floats(float* dst, const T* src, int64_t stride, int64_t rows, int64_t cols, int64_t padded) {
  for (int64_t r = 0; r < rows; ++r, src += stride, dst += padded) {
    int64_t i = 0;
    for (; i + kWidth <= cols; i += kWidth) store_v(dst + i, load_v(src + i));
    for (; i < cols; ++i) dst[i] = load(src[i]);
    for (; i < padded; ++i) dst[i] = 0.0f;
  }
}

}  // namespace

int attention_pairs() { return DS_HAS_PAIRS; }

void attention_load(void* dst, In src, int64_t stride, int64_t rows, int64_t cols, int64_t padded, int pairs) {
  if (!pairs) {
    with(src, [&](auto* s) { load_floats(static_cast<float*>(dst), s, stride, rows, cols, padded); });
    return;
  }
  auto* d = static_cast<char*>(dst);
  const auto* s = static_cast<const Half*>(src.p);
  for (int64_t r = 0; r < rows; ++r, s += stride, d += padded * 2) {
    __builtin_memcpy(d, s, static_cast<size_t>(cols * 2));
    __builtin_memset(d + cols * 2, 0, static_cast<size_t>((padded - cols) * 2));
  }
}

void attention_stack(void* dst, In src, int64_t stride, int64_t rows, int64_t cols, int64_t padded, int pairs) {
  if (!pairs) return attention_load(dst, src, stride, rows, cols, padded, 0);
  auto* d = static_cast<uint32_t*>(dst);
  const auto* s = static_cast<const Half*>(src.p);
  for (int64_t r = 0; r < rows; r += 2, s += 2 * stride, d += padded) {
    const bool both = r + 1 < rows;
    int64_t i = 0;
    for (; i + kWidth <= cols; i += kWidth) {
      vu unit = __builtin_convertvector(*reinterpret_cast<const vh_mem*>(s + i), vu);
      if (both) unit |= __builtin_convertvector(*reinterpret_cast<const vh_mem*>(s + stride + i), vu) << 16;
      *reinterpret_cast<vu_mem*>(d + i) = unit;
    }
    for (; i < cols; ++i) d[i] = s[i].bits | (both ? static_cast<uint32_t>(s[stride + i].bits) << 16 : 0);
    for (; i < padded; ++i) d[i] = 0;
  }
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

void attention_transpose(void* to, const void* from, int64_t keys, int64_t units) {
  float* dst = static_cast<float*>(to);  // only moved: any bits
  const float* src = static_cast<const float*>(from);
  // 4 x 4 blocks in 128-bit registers: eight shuffles for sixteen elements on every level.
  typedef float v4 __attribute__((vector_size(16)));
  typedef float v4_mem __attribute__((vector_size(16), aligned(4), may_alias));
  const auto get = [](const float* p) -> v4 { return *reinterpret_cast<const v4_mem*>(p); };
  const auto put = [](float* p, v4 v) { *reinterpret_cast<v4_mem*>(p) = v; };
  int64_t key = 0;
  for (; key + 4 <= keys; key += 4)
    for (int64_t i = 0; i < units; i += 4) {
      const float* s = src + key * units + i;
      const v4 r0 = get(s), r1 = get(s + units), r2 = get(s + 2 * units), r3 = get(s + 3 * units);
      const v4 a = __builtin_shufflevector(r0, r1, 0, 4, 1, 5), b = __builtin_shufflevector(r0, r1, 2, 6, 3, 7);
      const v4 c = __builtin_shufflevector(r2, r3, 0, 4, 1, 5), d = __builtin_shufflevector(r2, r3, 2, 6, 3, 7);
      float* t = dst + i * kTileKeys + key;
      put(t, __builtin_shufflevector(a, c, 0, 1, 4, 5));
      put(t + kTileKeys, __builtin_shufflevector(a, c, 2, 3, 6, 7));
      put(t + 2 * kTileKeys, __builtin_shufflevector(b, d, 0, 1, 4, 5));
      put(t + 3 * kTileKeys, __builtin_shufflevector(b, d, 2, 3, 6, 7));
    }
  for (; key < keys; ++key)
    for (int64_t i = 0; i < units; ++i) __builtin_memcpy(dst + i * kTileKeys + key, src + key * units + i, sizeof *dst);
  if (keys < kTileKeys)
    for (int64_t i = 0; i < units; ++i)
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

// The units that hold the keys [begin, end) of a stacked tile. The keys beside them in these units are nobody's here, and have
// probabilities and score gradients of zero.
template <typename Unit>
struct Units {
  int64_t first, count;
  Units(int64_t begin, int64_t end) : first(begin / per<Unit>()), count((end + per<Unit>() - 1) / per<Unit>() - first) {}
};

// score[rows, span] = q keys, over the columns of `span` only.
template <typename Unit>
void scores(int64_t rows, int64_t padded, const void* q, const void* keys_t, Span span, float* score) {
  const int64_t k = padded / per<Unit>();
  small_product<Unit>({.m = rows, .n = span.last - span.first, .k = k, .a = static_cast<const Unit*>(q), .a_row_step = k, .a_k_step = 1,
                       .b = static_cast<const Unit*>(keys_t) + span.first, .b_stride = kTileKeys, .c = score + span.first,
                       .c_stride = kTileKeys, .add = false});
}

// A score row's element `c` as an operand of the next product. The row takes its own place: bf16 fill its front half, behind
// the reading.
template <typename Unit>
DS_INLINE void put(float* row, int64_t c, vf x) {
  if constexpr (per<Unit>() == 1) store_v(row + c, x);
  else store_v(reinterpret_cast<Half*>(row) + c, x);
}

template <typename Unit>
void update(const AttentionUpdate& a) {
  const Span span(a.begin, a.end);
  scores<Unit>(a.rows, a.padded, a.q, a.keys_t, span, a.score);
  for (int64_t r = 0; r < a.rows; ++r) {
    float* s = a.score + r * kTileKeys;
    const int32_t low = a.low[r], high = a.high[r];
    if (low >= high) {  // nothing to see: its probabilities are zeros
      for (int64_t c = span.first; c < span.last; c += kWidth) put<Unit>(s, c, vf{});
      continue;
    }
    vf tops = splat(a.top[r]);
    for (int64_t c = span.first; c < span.last; c += kWidth) {
      const vf v = select(visible(c, low, high), load_v(s + c) * a.scale, splat(-__builtin_inff()));
      tops = max(tops, v);
    }
    const float top = max_of(tops);
    vf norms{};
    // Columns that only other rows see add zeros: the sum is the same without them.
    for (int64_t c = span.first; c < span.last; c += kWidth) {
      const vf p = select(visible(c, low, high), exp_v(load_v(s + c) * a.scale - top), vf{});
      put<Unit>(s, c, p);
      norms += p;
    }
    const float shrink = exp_v(splat(a.top[r] - top))[0];
    a.norm[r] = a.norm[r] * shrink + sum_of(norms);
    a.top[r] = top;
    float* sum = a.sum + r * a.padded;
    if (shrink != 1.0f)
      for (int64_t c = 0; c < a.padded; c += kWidth) store_v(sum + c, load_v(sum + c) * shrink);
  }
  const Units<Unit> keys(a.begin, a.end);
  small_product<Unit>({.m = a.rows, .n = a.padded, .k = keys.count, .a = reinterpret_cast<const Unit*>(a.score) + keys.first,
                       .a_row_step = kTileKeys, .a_k_step = 1, .b = static_cast<const Unit*>(a.values) + keys.first * a.padded,
                       .b_stride = a.padded, .c = a.sum, .c_stride = a.padded, .add = true});
}

// Probabilities and score gradients of one row's vector of keys.
struct Gradients {
  vf prob, d_score;
};
DS_INLINE Gradients gradients_at(const AttentionGradient& a, int64_t r, int64_t c) {
  const vi seen = visible(c, a.low[r], a.high[r]);
  const vf prob = select(seen, exp_v(load_v(a.prob + r * kTileKeys + c) * a.scale - a.lse[r]), vf{});
  return {prob, select(seen, prob * (load_v(a.d_score + r * kTileKeys + c) - a.delta[r]), vf{})};
}

#if DS_HAS_PAIRS
DS_INLINE vu half_bits(vf x) {
  uint16_t bits[kWidth];
  store_v(reinterpret_cast<Half*>(bits), x);
  return __builtin_convertvector(*reinterpret_cast<const vh_mem*>(bits), vu);
}

// Rows 2 i and 2 i + 1 as pairs in row i's place, behind the reading.
void stack_gradients(const AttentionGradient& a, Span span) {
  for (int64_t r = 0; r < a.rows; r += 2)
    for (int64_t c = span.first; c < span.last; c += kWidth) {
      const Gradients even = gradients_at(a, r, c), odd = r + 1 < a.rows ? gradients_at(a, r + 1, c) : Gradients{};
      const int64_t at = r / 2 * kTileKeys + c;
      *reinterpret_cast<vu_mem*>(a.prob + at) = half_bits(even.prob) | half_bits(odd.prob) << 16;
      *reinterpret_cast<vu_mem*>(a.d_score + at) = half_bits(even.d_score) | half_bits(odd.d_score) << 16;
    }
}
#endif

// d_keys and d_values want the rows stacked, d_q wants them as they are: one of the two a call.
template <typename Unit>
void gradient(const AttentionGradient& a) {
  const Span span(a.begin, a.end);
  scores<Unit>(a.rows, a.padded, a.q, a.keys_t, span, a.prob);
  scores<Unit>(a.rows, a.padded, a.d_out, a.values_t, span, a.d_score);
  const bool stacked = per<Unit>() == 2 && a.d_keys != nullptr;
#if DS_HAS_PAIRS
  if (stacked) stack_gradients(a, span);
#endif
  for (int64_t r = 0; r < a.rows && !stacked; ++r)
    for (int64_t c = span.first; c < span.last; c += kWidth) {
      const Gradients g = gradients_at(a, r, c);
      put<Unit>(a.prob + r * kTileKeys, c, g.prob);
      put<Unit>(a.d_score + r * kTileKeys, c, g.d_score);
    }
  if (a.d_q != nullptr) {
    const Units<Unit> keys(a.begin, a.end);
    small_product<Unit>({.m = a.rows, .n = a.padded, .k = keys.count, .a = reinterpret_cast<const Unit*>(a.d_score) + keys.first,
                         .a_row_step = kTileKeys, .a_k_step = 1, .b = static_cast<const Unit*>(a.keys) + keys.first * a.padded,
                         .b_stride = a.padded, .c = a.d_q, .c_stride = a.padded, .add = true});
  }
  if (a.d_keys == nullptr) return;
  const int64_t k = (a.rows + per<Unit>() - 1) / per<Unit>();
  const auto keys_from = [&](const float* gradients, const void* rows, float* out) {
    small_product<Unit>({.m = a.end - a.begin, .n = a.padded, .k = k, .a = reinterpret_cast<const Unit*>(gradients) + a.begin,
                         .a_row_step = 1, .a_k_step = kTileKeys, .b = static_cast<const Unit*>(rows), .b_stride = a.padded,
                         .c = out + a.begin * a.padded, .c_stride = a.padded, .add = true});
  };
  keys_from(a.d_score, a.q_stacked, a.d_keys);
  keys_from(a.prob, a.d_out_stacked, a.d_values);
}

}  // namespace

void attention_update(const AttentionUpdate& a) {
#if DS_HAS_PAIRS
  if (a.pairs) return update<Pair>(a);
#endif
  update<float>(a);
}

void attention_gradient(const AttentionGradient& a) {
#if DS_HAS_PAIRS
  if (a.pairs) return gradient<Pair>(a);
#endif
  gradient<float>(a);
}

float attention_finish(Out out, const float* sum, float top, float norm, int64_t cols) {
  const float inverse = norm > 0.0f ? 1.0f / norm : (norm == 0.0f ? 0.0f : norm);  // NaN stays NaN
  attention_store(out, 0, sum, 1, cols, cols, inverse);
  return norm == 0.0f ? 0.0f : top + log_f(norm);
}

float attention_dot(In a, In b, int64_t n) {
  float result = 0.0f;
  with(a, [&](auto* x) {
    with(b, [&](auto* y) { result = lane_sum(n, [&](int64_t i) { return load(x[i]) * load(y[i]); }); });
  });
  return result;
}

}  // namespace dspark::model::cpu::DS_ISA
