// anchor_attention, anchor_attention_backward
#include <algorithm>
#include <vector>

#include "model/ops_ref/scalar.h"

namespace dspark::model::ref {
namespace {

// One key a slot sees: a context row, or a row of its own block.
struct Key {
  bool in_block;
  int64_t row;
};

std::vector<Key> visible_keys(const AnchorRule& rule, int64_t anchor, int64_t anchor_row, int64_t doc_start,
                              int64_t slot) {
  std::vector<Key> keys;
  for (int64_t t = doc_start; t < anchor_row; ++t) {
    const bool inside = rule.window == 0 ||
                        (rule.window_by_anchor ? t >= anchor_row - rule.window : t > anchor_row + slot - rule.window);
    if (inside) keys.push_back({false, t});
  }
  for (int64_t j = 0; j < rule.block; ++j) {
    const bool causal = j <= slot && (rule.window == 0 || slot - j < rule.window);
    if (!rule.causal_in_block || causal) keys.push_back({true, anchor * rule.block + j});
  }
  return keys;
}

// Calls visit(row, head, kv column, keys) for every query row and head of every anchor that is not padding.
template <typename A, typename Visit>
void for_each_query(const A& a, const Visit& visit) {
  const Ints anchor_row(a.anchor_row), doc_start(a.doc_start);
  const int64_t heads = a.q.cols / a.head_dim, group = heads / (a.k_ctx.cols / a.head_dim);
  for (int64_t n = 0; n < anchor_row.cols(); ++n) {
    if (anchor_row(n) < 0) continue;
    for (int64_t slot = 0; slot < a.rule.block; ++slot) {
      const std::vector<Key> keys = visible_keys(a.rule, n, anchor_row(n), doc_start(n), slot);
      for (int64_t h = 0; h < heads; ++h) visit(n * a.rule.block + slot, h, h / group * a.head_dim, keys);
    }
  }
}

template <typename S>
S dot(const Matrix<S>& x, int64_t x_row, int64_t x_col, const Matrix<S>& y, int64_t y_row, int64_t y_col, int64_t n) {
  S sum = 0;
  for (int64_t c = 0; c < n; ++c) sum += mul(x(x_row, x_col + c), y(y_row, y_col + c));
  return sum;
}

}  // namespace

template <typename S>
void anchor_attention(const AnchorAttention& a) {
  const Matrix<S> out(a.out), lse(a.lse), q(a.q), k_ctx(a.k_ctx), v_ctx(a.v_ctx), k_block(a.k_block),
      v_block(a.v_block);
  fill_zero(out);
  fill_zero(lse);
  for_each_query(a, [&](int64_t row, int64_t h, int64_t kv, const std::vector<Key>& keys) {
    const int64_t first = h * a.head_dim;
    std::vector<S> scores;
    double top = -INFINITY;
    for (const Key& key : keys) {
      scores.push_back(a.scale * dot(q, row, first, key.in_block ? k_block : k_ctx, key.row, kv, a.head_dim));
      top = std::max(top, real(scores.back()));
    }
    S sum = 0;
    for (const S& s : scores) sum += std::exp(s - top);
    lse(row, h) = std::log(sum) + top;
    for (size_t i = 0; i < keys.size(); ++i) {
      const S prob = std::exp(scores[i] - lse(row, h));
      const Matrix<S>& v = keys[i].in_block ? v_block : v_ctx;
      for (int64_t c = 0; c < a.head_dim; ++c) out(row, first + c) += mul(prob, v(keys[i].row, kv + c));
    }
  });
}

// With p = exp(s - lse) and delta = sum(d_out out): ds = p (d_out v - delta), d_q = scale ds k, d_k = scale ds q, d_v =
// p d_out.
template <typename S>
void anchor_attention_backward(const AnchorAttentionBackward& a) {
  const Matrix<S> out(a.out), lse(a.lse), q(a.q), k_ctx(a.k_ctx), v_ctx(a.v_ctx), k_block(a.k_block),
      v_block(a.v_block), d_out(a.d_out);
  const Matrix<S> d_q(a.d_q), d_k_ctx(a.d_k_ctx), d_v_ctx(a.d_v_ctx), d_k_block(a.d_k_block), d_v_block(a.d_v_block);
  for (const Matrix<S>& gradient : {d_q, d_k_ctx, d_v_ctx, d_k_block, d_v_block}) fill_zero(gradient);
  for_each_query(a, [&](int64_t row, int64_t h, int64_t kv, const std::vector<Key>& keys) {
    const int64_t first = h * a.head_dim;
    const S delta = dot(d_out, row, first, out, row, first, a.head_dim);
    for (const Key& key : keys) {
      const Matrix<S>&k = key.in_block ? k_block : k_ctx, &v = key.in_block ? v_block : v_ctx;
      const Matrix<S>&d_k = key.in_block ? d_k_block : d_k_ctx, &d_v = key.in_block ? d_v_block : d_v_ctx;
      const S prob = std::exp(a.scale * dot(q, row, first, k, key.row, kv, a.head_dim) - lse(row, h));
      const S d_score = a.scale * prob * (dot(d_out, row, first, v, key.row, kv, a.head_dim) - delta);
      for (int64_t c = 0; c < a.head_dim; ++c) {
        d_q(row, first + c) += mul(d_score, k(key.row, kv + c));
        d_k(key.row, kv + c) += mul(d_score, q(row, first + c));
        d_v(key.row, kv + c) += mul(prob, d_out(row, first + c));
      }
    }
  });
}

DS_REF_INSTANTIATE(anchor_attention, AnchorAttention)
DS_REF_INSTANTIATE(anchor_attention_backward, AnchorAttentionBackward)

}  // namespace dspark::model::ref
