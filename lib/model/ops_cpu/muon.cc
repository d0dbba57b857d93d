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
        n_(std::max(rows_, cols_)), scalars_(pointer<float>(a.scalars)),
        moves_{static_cast<float>(a.momentum), static_cast<float>(1 - a.momentum), scalars_[kGradScale] * scalars_[kClip]} {
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
    k().convert({to + row * cols * (half ? 2 : 4), half}, {from + row * cols, 0}, cols);
  }
  const Kernels& k() const { return machine_.kernels(); }

  // Moves the buffers; returns 1 / the update's norm.
  float momentum() {
    each_row(rows_, cols_, [&](int64_t i) {
      row_sum_[i] = static_cast<double>(k().muon_momentum(row<float>(a_.buf, i), row<float>(a_.grad, i), cols_, moves_));
    });
    double squares = 0;
    for (int64_t i = 0; i < rows_; ++i) squares += row_sum_[i];
    return static_cast<float>(1 / std::max(std::sqrt(squares), 1e-7));
  }

  // X = update / norm, transposed when there are more rows than columns.
  void start(float inverse) {
    if (rows_ <= cols_) {
      each_row(m_, n_, [&](int64_t i) { k().muon_update(x_ + i * n_, row<float>(a_.grad, i), row<float>(a_.buf, i), inverse, n_, moves_); });
      return;
    }
    each_stripe([&](int64_t begin, int64_t end) {
      float stripe[kStripe];
      for (int64_t j = 0; j < n_; ++j) {
        k().muon_update(stripe, row<float>(a_.grad, j) + begin, row<float>(a_.buf, j) + begin, inverse, end - begin, moves_);
        for (int64_t i = begin; i < end; ++i) x_[i * n_ + j] = stripe[i - begin];
      }
    });
  }

  // Rows of the smaller side, so many at a time that a transposition uses whole cache lines.
  static constexpr int64_t kStripe = 16;
  template <typename Body>
  void each_stripe(const Body& body) {
    machine_.pool().parallel_for((m_ + kStripe - 1) / kStripe, 1, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) body(i * kStripe, std::min(m_, (i + 1) * kStripe));
    });
  }

  // c = y y^T, y [m, k]: blocks on and above the diagonal, the rest mirrored.
  void symmetric(float* c, const std::byte* y, int64_t k) {
    constexpr int64_t kBlocks = 4;
    const int64_t block = (m_ + kBlocks * kStripe - 1) / (kBlocks * kStripe) * kStripe;
    for (int64_t r = 0; r < m_; r += block) {
      const MatRef from{y + r * k * dtype_bytes(act_), act_, k};
      gemm_nt(machine_.gemm(), std::min(block, m_ - r), m_ - r, k, from, from, {c + r * m_ + r, DType::f32, m_});
    }
    each_stripe([&](int64_t begin, int64_t end) {
      for (int64_t j = 0; j < begin / block * block; ++j)
        for (int64_t i = begin; i < end; ++i) c[i * m_ + j] = c[j * m_ + i];
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
      k().muon_polynomial(s, g, diagonal_, d, b, c, m_);
      s[i] = 0;
      round(poly_, square_, i, m_);
      g[0] = a + on_diagonal;  // this row of G is done with
    });
    each_row(m_, n_, [&](int64_t i) { k().scale(x_ + i * n_, gram_[i * m_], n_); });
    gemm_nn(machine_.gemm(), m_, n_, m_, {poly_, act_, m_}, {rounded_, act_, n_}, {x_, DType::f32, n_}, true);
  }

  void apply() {
    const double lr = static_cast<double>(scalars_[kLr]) * a_.lr_factor;
    const auto decay = static_cast<float>(lr * a_.weight_decay);
    const auto size = static_cast<float>(lr * a_.size);
    if (rows_ <= cols_) {
      each_row(rows_, cols_, [&](int64_t i) { k().decayed_step(row<float>(a_.master, i), x_ + i * n_, decay, size, cols_); });
    } else {
      each_stripe([&](int64_t begin, int64_t end) {
        float stripe[kStripe];
        for (int64_t j = 0; j < n_; ++j) {
          for (int64_t i = begin; i < end; ++i) stripe[i - begin] = x_[i * n_ + j];
          k().decayed_step(row<float>(a_.master, j) + begin, stripe, decay, size, end - begin);
        }
      });
    }
    if (a_.value) each_row(rows_, cols_, [&](int64_t i) { k().convert(out_row(a_.value, i), {row<float>(a_.master, i), 0}, cols_); });
  }

  const Muon& a_;
  Machine& machine_;
  const DType act_;
  const int64_t rows_, cols_, m_, n_;
  const float* scalars_;
  const MuonMomentum moves_;
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
