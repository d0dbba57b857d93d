// The element-wise parts of a Muon step; cuda/muon.cc puts them between cuBLASLt's products.
#include "cuda/matrix.h"

namespace dspark::cuda {
namespace {

constexpr int kTile = 32;

// Walks a [rows, cols] matrix in tiles of kTile x kTile through shared memory, so that both sides are read and written along
// their rows: put(i, j, value) at the place get(i, j) belongs to, transposed or not.
template <typename Get, typename Put>
DS_DEVICE void through_tile(int64_t rows, int64_t cols, bool transposed, const Get& get, const Put& put) {
  const Shared<float> tile(0, kTile * (kTile + 1));
  const int64_t across = (cols + kTile - 1) / kTile, row0 = block_x() / across * kTile, col0 = block_x() % across * kTile;
  for (int k = thread(); k < kTile * kTile; k += threads()) {
    const int64_t i = row0 + k / kTile, j = col0 + k % kTile;
    if (i < rows && j < cols) tile.set(k / kTile * (kTile + 1) + k % kTile, get(i, j));
  }
  sync_block();
  for (int k = thread(); k < kTile * kTile; k += threads()) {
    const int r = transposed ? k % kTile : k / kTile, c = transposed ? k / kTile : k % kTile;
    if (row0 + r < rows && col0 + c < cols) put(row0 + r, col0 + c, tile[r * (kTile + 1) + c]);
  }
}

DS_DEVICE float* element(const Matrix& m, int64_t i, int64_t j) { return static_cast<float*>(m.data) + i * m.stride + j; }

// Moves the momentum and writes the update to x, which is [m, n] with m the smaller side. Nothing when the norm was not finite: x
// is then whatever it was, and muon_apply does nothing either.
DS_KERNEL void DS_THREADS(kBlock) muon_momentum_kernel(MuonStep a) {
  if (load(a.scalars + kStepFinite) == 0.0f) return;
  const float scale = load(a.scalars + kStepGradScale) * load(a.scalars + kStepClip);
  const bool transposed = a.master.rows > a.master.cols;
  through_tile(
      a.master.rows, a.master.cols, transposed,
      [&](int64_t i, int64_t j) {
        const float g = load(element(a.grad, i, j)) * scale, buf = a.keep * load(element(a.buf, i, j)) + a.fresh * g;
        store(element(a.buf, i, j), buf);
        return a.fresh * g + a.keep * buf;
      },
      [&](int64_t i, int64_t j, float u) { store(transposed ? element(a.x, j, i) : element(a.x, i, j), u); });
}

// x /= max(sqrt(squares), 1e-7) when `squares` is given; rounded = x.
DS_KERNEL void DS_THREADS(kBlock) muon_round_kernel(Matrix rounded, Matrix x, const float* squares) {
  const float scale = squares == nullptr ? 1.0f : 1.0f / fmaxf(sqrtf(load(squares)), 1e-7f);
  for_chunks(x.rows, x.cols, [&](int64_t row, int64_t col) {
    float v[kChunk];
    load_chunk(v, x, row, col);
    DS_UNROLL
    for (int i = 0; i < kChunk; ++i) v[i] *= scale;
    if (squares != nullptr) store_chunk(v, x, row, col);
    store_chunk(v, rounded, row, col);
  });
}

// diagonal = gram's, which becomes zero in what products see.
DS_KERNEL void DS_THREADS(kBlock) muon_split_kernel(Matrix poly, Matrix gram, float* diagonal) {
  for_chunks(gram.rows, gram.cols, [&](int64_t row, int64_t col) {
    float v[kChunk];
    load_chunk(v, gram, row, col);
    DS_UNROLL
    for (int i = 0; i < kChunk; ++i) {
      if (col + i != row) continue;
      store(diagonal + row, v[i]);
      v[i] = 0;
    }
    store_chunk(v, poly, row, col);
  });
}

// With G = D + O and square = O O: poly = the off-diagonal part of b G + c G G; factor = a + its diagonal.
DS_KERNEL void DS_THREADS(kBlock) muon_poly_kernel(Matrix poly, Matrix gram, Matrix square, const float* diagonal, float* factor, float a, float b, float c) {
  for_chunks(gram.rows, gram.cols, [&](int64_t row, int64_t col) {
    float g[kChunk], s[kChunk];
    load_chunk(g, gram, row, col);
    load_chunk(s, square, row, col);
    const float d = load(diagonal + row);
    DS_UNROLL
    for (int i = 0; i < kChunk; ++i) {
      if (col + i == row) {
        store(factor + row, a + (b * d + c * (s[i] + d * d)));
        s[i] = 0;
      } else {
        s[i] = b * g[i] + c * (s[i] + (d + (col + i < gram.cols ? load(diagonal + col + i) : 0.0f)) * g[i]);
      }
    }
    store_chunk(s, poly, row, col);
  });
}

DS_KERNEL void DS_THREADS(kBlock) scale_rows_kernel(Matrix x, const float* factor) {
  for_chunks(x.rows, x.cols, [&](int64_t row, int64_t col) {
    float v[kChunk];
    load_chunk(v, x, row, col);
    const float f = load(factor + row);
    DS_UNROLL
    for (int i = 0; i < kChunk; ++i) v[i] *= f;
    store_chunk(v, x, row, col);
  });
}

DS_KERNEL void DS_THREADS(kBlock) muon_apply_kernel(MuonStep a) {
  if (load(a.scalars + kStepFinite) == 0.0f) return;
  const double rate = static_cast<double>(load(a.scalars + kStepLr)) * a.lr_factor;
  const auto decay = static_cast<float>(rate * a.weight_decay), size = static_cast<float>(rate * a.size);
  const bool transposed = a.master.rows > a.master.cols;
  through_tile(
      a.x.rows, a.x.cols, transposed, [&](int64_t i, int64_t j) { return load(element(a.x, i, j)); },
      [&](int64_t i, int64_t j, float x) {
        const int64_t r = transposed ? j : i, c = transposed ? i : j;
        const float old = load(element(a.master, r, c)), p = old - (decay * old + size * x);  // rounded once at the weight's size
        store(element(a.master, r, c), p);
        if (!a.value) return;
        if (a.value.half) store(static_cast<bf16*>(a.value.data) + r * a.value.stride + c, narrow(p));
        else store(element(a.value, r, c), p);
      });
}

Dim tiles(const Matrix& m) { return {static_cast<unsigned>((m.rows + kTile - 1) / kTile * ((m.cols + kTile - 1) / kTile))}; }
constexpr int kTileBytes = kTile * (kTile + 1) * 4;

}  // namespace

void muon_momentum(Stream stream, const MuonStep& a) { launch(stream, tiles(a.master), {kBlock}, kTileBytes, muon_momentum_kernel, a); }
void muon_round(Stream stream, Matrix rounded, Matrix x, const float* squares) { launch(stream, chunk_grid(x.rows, x.cols), {kBlock}, 0, muon_round_kernel, rounded, x, squares); }
void muon_split(Stream stream, Matrix poly, Matrix gram, float* diagonal) { launch(stream, chunk_grid(gram.rows, gram.cols), {kBlock}, 0, muon_split_kernel, poly, gram, diagonal); }
void muon_poly(Stream stream, Matrix poly, Matrix gram, Matrix square, const float* diagonal, float* factor, float a, float b, float c) {
  launch(stream, chunk_grid(gram.rows, gram.cols), {kBlock}, 0, muon_poly_kernel, poly, gram, square, diagonal, factor, a, b, c);
}
void scale_rows(Stream stream, Matrix x, const float* factor) { launch(stream, chunk_grid(x.rows, x.cols), {kBlock}, 0, scale_rows_kernel, x, factor); }
void muon_apply(Stream stream, const MuonStep& a) { launch(stream, tiles(a.x), {kBlock}, kTileBytes, muon_apply_kernel, a); }

}  // namespace dspark::cuda
