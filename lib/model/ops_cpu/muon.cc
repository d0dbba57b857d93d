// muon on CPUs: contract in model/ops.h.
//
// X [m, n], m the smaller side, lives in fp32; products see it rounded to the activations' dtype.
#include <cmath>
#include <utility>

#include "model/ops_cpu/backend.h"

namespace dspark::model::cpu {
namespace {

class Step {
 public:
  Step(const Muon& a, Machine& machine, DType act)
      : a_(a), machine_(machine), act_(act), rows_(a.master.rows), cols_(a.master.cols), m_(std::min(rows_, cols_)),
        n_(std::max(rows_, cols_)), scalars_(pointer<float>(a.scalars)) {
    auto* at = pointer<std::byte>(a.work);
    at += (64 - reinterpret_cast<uintptr_t>(at) % 64) % 64;
    const auto take = [&](int64_t bytes) {
      std::byte* p = at;
      at += (bytes + 63) / 64 * 64;
      return p;
    };
    rounded_ = take(m_ * n_ * dtype_bytes(act));
    poly_ = take(m_ * m_ * dtype_bytes(act));
    x_ = reinterpret_cast<float*>(take(m_ * n_ * 4));
    gram_ = reinterpret_cast<float*>(take(m_ * m_ * 4));
    square_ = reinterpret_cast<float*>(take(m_ * m_ * 4));
    diagonal_ = reinterpret_cast<float*>(take(m_ * 4));
    row_sum_ = reinterpret_cast<double*>(take(rows_ * 8));
  }

  void run() {
    start(momentum());
    for (int i = 0; i < a_.iterations; ++i) iterate();
    apply();
  }

 private:
  template <typename Body>
  void each_row(int64_t rows, int64_t cols, const Body& body) {
    machine_.pool().parallel_for(rows, row_grain(cols), [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) body(i);
    });
  }
  void round(std::byte* to, const float* from, int64_t row, int64_t cols) {
    const bool half = act_ == DType::bf16;
    machine_.kernels().convert({to + row * cols * (half ? 2 : 4), half}, {from + row * cols, 0}, cols);
  }
  float fresh() const { return static_cast<float>(1 - a_.momentum); }
  float keep() const { return static_cast<float>(a_.momentum); }
  float scale() const { return scalars_[kGradScale] * scalars_[kClip]; }
  // Of a gradient element and its buffer, already moved.
  float update(float grad, float buf) const { return fresh() * (grad * scale()) + keep() * buf; }

  // Moves the buffers; returns 1 / the update's norm.
  float momentum() {
    each_row(rows_, cols_, [&](int64_t i) {
      float* buf = row<float>(a_.buf, i);
      const float* grad = row<float>(a_.grad, i);
      double sum = 0;
      for (int64_t j = 0; j < cols_; ++j) {
        buf[j] = keep() * buf[j] + fresh() * (grad[j] * scale());
        const double u = update(grad[j], buf[j]);
        sum += u * u;
      }
      row_sum_[i] = sum;
    });
    double squares = 0;
    for (int64_t i = 0; i < rows_; ++i) squares += row_sum_[i];
    return static_cast<float>(1 / std::max(std::sqrt(squares), 1e-7));
  }

  // X = update / norm, transposed when there are more rows than columns (16 columns at a time, for the caches).
  void start(float inverse) {
    constexpr int64_t kStripe = 16;
    if (rows_ <= cols_) {
      each_row(m_, n_, [&](int64_t i) {
        const float *grad = row<float>(a_.grad, i), *buf = row<float>(a_.buf, i);
        for (int64_t j = 0; j < n_; ++j) x_[i * n_ + j] = inverse * update(grad[j], buf[j]);
      });
      return;
    }
    each_row((m_ + kStripe - 1) / kStripe, kStripe * n_, [&](int64_t stripe) {
      const int64_t begin = stripe * kStripe, end = std::min(m_, begin + kStripe);
      for (int64_t j = 0; j < n_; ++j) {
        const float *grad = row<float>(a_.grad, j), *buf = row<float>(a_.buf, j);
        for (int64_t i = begin; i < end; ++i) x_[i * n_ + j] = inverse * update(grad[i], buf[i]);
      }
    });
  }

  // c = y y^T, y [m, k]: blocks on and above the diagonal, the rest mirrored.
  void symmetric(float* c, const std::byte* y, int64_t k) {
    constexpr int64_t kBlocks = 4;
    const int64_t block = (m_ + kBlocks - 1) / kBlocks;
    for (int64_t r = 0; r < m_; r += block) {
      const MatRef from{y + r * k * dtype_bytes(act_), act_, k};
      gemm_nt(machine_.gemm(), std::min(block, m_ - r), m_ - r, k, from, from, {c + r * m_ + r, DType::f32, m_});
    }
    each_row(m_, m_, [&](int64_t i) {
      for (int64_t j = 0; j < i / block * block; ++j) c[i * m_ + j] = c[j * m_ + i];
    });
  }

  // X = a X + (b G + c G G) X, G = X X^T. G comes close to a multiple of the identity, and rounding its diagonal to bf16 would be
  // most of the error: diagonals are multiplied in fp32, products see what is off them. With G = D + O: G G = D D + D O + O D + O O.
  void iterate() {
    constexpr auto a = static_cast<float>(kMuonA), b = static_cast<float>(kMuonB), c = static_cast<float>(kMuonC);
    each_row(m_, n_, [&](int64_t i) { round(rounded_, x_, i, n_); });
    symmetric(gram_, rounded_, n_);
    for (int64_t i = 0; i < m_; ++i) diagonal_[i] = std::exchange(gram_[i * m_ + i], 0.0f);
    each_row(m_, m_, [&](int64_t i) { round(poly_, gram_, i, m_); });
    symmetric(square_, poly_, m_);
    each_row(m_, m_, [&](int64_t i) {
      const float d = diagonal_[i];
      float *g = gram_ + i * m_, *s = square_ + i * m_;
      const float on_diagonal = b * d + c * (s[i] + d * d);
      for (int64_t j = 0; j < m_; ++j) s[j] = b * g[j] + c * (s[j] + (d + diagonal_[j]) * g[j]);
      s[i] = 0;
      round(poly_, square_, i, m_);
      g[0] = a + on_diagonal;  // this row of G is done with
    });
    each_row(m_, n_, [&](int64_t i) {
      const float factor = gram_[i * m_];
      for (int64_t j = i * n_; j < (i + 1) * n_; ++j) x_[j] *= factor;
    });
    gemm_nn(machine_.gemm(), m_, n_, m_, {poly_, act_, m_}, {rounded_, act_, n_}, {x_, DType::f32, n_}, true);
  }

  void apply() {
    const double lr = static_cast<double>(scalars_[kLr]) * a_.lr_factor;
    const auto shrink = static_cast<float>(1 - lr * a_.weight_decay);
    const auto size = static_cast<float>(lr * a_.size);
    const int64_t step = rows_ <= cols_ ? 1 : n_;  // in x_, from column to column
    each_row(rows_, cols_, [&](int64_t i) {
      float* master = row<float>(a_.master, i);
      const float* x = x_ + (rows_ <= cols_ ? i * n_ : i);
      for (int64_t j = 0; j < cols_; ++j) master[j] = master[j] * shrink - size * x[j * step];
      if (a_.value) machine_.kernels().convert(out_row(a_.value, i), {master, 0}, cols_);
    });
  }

  const Muon& a_;
  Machine& machine_;
  const DType act_;
  const int64_t rows_, cols_, m_, n_;
  const float* scalars_;
  std::byte *rounded_, *poly_;
  float *x_, *gram_, *square_, *diagonal_;
  double* row_sum_;
};

}  // namespace

void CpuOps::muon(Context& ctx, const Muon& a) {
  if (pointer<float>(a.scalars)[kFinite] == 0.0f || a.master.size() == 0) return;
  Step(a, m_, ctx.act_dtype()).run();
}

}  // namespace dspark::model::cpu
