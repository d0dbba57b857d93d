// qk_norm_rope, qk_norm_rope_backward
#include <vector>

#include "model/ops_ref/scalar.h"

namespace dspark::model::ref {
namespace {

struct Turn {
  double cosine, sine;
};

template <typename S>
Turn turn(const Rope& rope, int64_t position, int64_t i) {
  const double angle = static_cast<double>(position) * real(Matrix<S>(rope.inv_freq)(i));
  return {std::cos(angle) * rope.scale, std::sin(angle) * rope.scale};
}

}  // namespace

template <typename S>
void qk_norm_rope(const QkNormRope& a) {
  const Matrix<S> y(a.y), x(a.x), weight(a.weight), inv_rms(a.inv_rms);
  const Ints position(a.position);
  const int64_t heads = a.x.cols / a.head_dim, half = a.rope.rot / 2;
  std::vector<S> head(static_cast<size_t>(a.head_dim));
  for (int64_t i = 0; i < x.rows(); ++i)
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t first = h * a.head_dim;
      S squares = 0;
      for (int64_t c = 0; c < a.head_dim; ++c) squares += mul(x(i, first + c), x(i, first + c));
      const S inv = S(1) / std::sqrt(squares / static_cast<double>(a.head_dim) + a.eps);
      if (inv_rms) inv_rms(i, h) = inv;
      for (int64_t c = 0; c < a.head_dim; ++c)
        head[static_cast<size_t>(c)] = weight ? x(i, first + c) * inv * weight(c) : x(i, first + c);
      for (int64_t c = 0; c < half; ++c) {
        const Turn t = turn<S>(a.rope, position(i), c);
        S& low = head[static_cast<size_t>(c)];
        S& high = head[static_cast<size_t>(c + half)];
        const S l = low, u = high;
        low = l * t.cosine - u * t.sine;
        high = u * t.cosine + l * t.sine;
      }
      for (int64_t c = 0; c < a.head_dim; ++c) y(i, first + c) = head[static_cast<size_t>(c)];
    }
}

// The rotation's transpose first, then the norm's gradient as in rmsnorm_backward.
template <typename S>
void qk_norm_rope_backward(const QkNormRopeBackward& a) {
  const Matrix<S> d_x(a.d_x), d_weight(a.d_weight), dy(a.dy), x(a.x), weight(a.weight), inv_rms(a.inv_rms);
  const Ints position(a.position);
  const int64_t heads = a.x.cols / a.head_dim, half = a.rope.rot / 2;
  if (d_weight && a.write_dw == Write::overwrite) fill_zero(d_weight);
  std::vector<S> head(static_cast<size_t>(a.head_dim));
  for (int64_t i = 0; i < x.rows(); ++i)
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t first = h * a.head_dim;
      for (int64_t c = 0; c < a.head_dim; ++c) head[static_cast<size_t>(c)] = dy(i, first + c);
      for (int64_t c = 0; c < half; ++c) {
        const Turn t = turn<S>(a.rope, position(i), c);
        S& low = head[static_cast<size_t>(c)];
        S& high = head[static_cast<size_t>(c + half)];
        const S l = low, u = high;
        low = l * t.cosine + u * t.sine;
        high = u * t.cosine - l * t.sine;
      }
      if (weight) {
        const S inv = inv_rms(i, h);
        S mean = 0;
        for (int64_t c = 0; c < a.head_dim; ++c)
          mean += head[static_cast<size_t>(c)] * weight(c) * x(i, first + c) * inv;
        mean /= static_cast<double>(a.head_dim);
        for (int64_t c = 0; c < a.head_dim; ++c) {
          S& g = head[static_cast<size_t>(c)];
          const S normalised = x(i, first + c) * inv;
          if (d_weight) d_weight(c) += g * normalised;
          g = inv * (g * weight(c) - normalised * mean);
        }
      }
      for (int64_t c = 0; c < a.head_dim; ++c) d_x(i, first + c) = head[static_cast<size_t>(c)];
    }
}

DS_REF_INSTANTIATE(qk_norm_rope, QkNormRope)
DS_REF_INSTANTIATE(qk_norm_rope_backward, QkNormRopeBackward)

}  // namespace dspark::model::ref
