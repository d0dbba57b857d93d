// qk_norm_rope and its backward: a block takes some heads of a row through shared memory, a warp a head; the row's angles are
// worked out once for all of them.
#include "cuda/matrix.h"

namespace dspark::cuda {
namespace {

// Columns of one block: heads are grouped so that occupancy stays high; a single larger head has a block of its own.
constexpr int kMaxCols = 4096;
// At most this many parts of the rows, each with its own sum of the weight's gradient.
constexpr int64_t kMaxParts = 512;

struct Heads {
  int per_block, groups;
};
Heads group_heads(int64_t cols, int head_dim) {
  const int heads = static_cast<int>(cols / head_dim);
  const int per_block = kMaxCols / head_dim < 1 ? 1 : kMaxCols / head_dim < heads ? kMaxCols / head_dim : heads;
  return {per_block, (heads + per_block - 1) / per_block};
}

// cos and sin of position * inv_freq, times scale, for every pair. The angle is reduced to an eighth of a turn in fp64, so that
// positions of millions keep an fp32's accuracy.
DS_DEVICE void row_angles(Shared<float> cosine, Shared<float> sine, const float* inv_freq, int half, int32_t position, float scale) {
  for (int i = thread(); i < half; i += threads()) {
    const double quarters = static_cast<double>(position) * static_cast<double>(load(inv_freq + i)) * 0.63661977236758134308;
    const double nearest = rint(quarters);
    float s, c;
    sin_cos_pi(0.5f * static_cast<float>(quarters - nearest), s, c);
    const auto turn = static_cast<uint32_t>(static_cast<int64_t>(nearest)) & 3u;
    const float rotated_c = (turn & 1u) != 0 ? s : c, rotated_s = (turn & 1u) != 0 ? c : s;
    cosine.set(i, (turn == 1 || turn == 2 ? -rotated_c : rotated_c) * scale);
    sine.set(i, (turn >= 2 ? -rotated_s : rotated_s) * scale);
  }
}

// A matrix row's columns [first, first + cols) to and from shared memory.
DS_DEVICE void load_part(Shared<float> to, const Matrix& m, int64_t row, int64_t first, int cols) {
  for (int c = thread() * kChunk; c < cols; c += threads() * kChunk) {
    float v[kChunk];
    load_chunk(v, m, row, first + c);
    for (int i = 0; i < kChunk; ++i)
      if (c + i < cols) to.set(c + i, v[i]);
  }
}
DS_DEVICE void store_part(const Matrix& m, int64_t row, int64_t first, Shared<float> from, int cols) {
  Matrix part = m;
  part.cols = first + cols;  // the last chunk ends where the part does
  for (int c = thread() * kChunk; c < cols; c += threads() * kChunk) {
    float v[kChunk];
    for (int i = 0; i < kChunk; ++i) v[i] = c + i < cols ? from[c + i] : 0.0f;
    store_chunk(v, part, row, first + c);
  }
}

DS_KERNEL void DS_THREADS(kBlock) qk_norm_rope_kernel(HeadNormRope a, int heads_per_block) {
  const int hd = a.head_dim, half = a.rot / 2, first_head = static_cast<int>(block_y()) * heads_per_block;
  const int all_heads = static_cast<int>(a.x.cols) / hd, heads = first_head + heads_per_block < all_heads ? heads_per_block : all_heads - first_head;
  const Shared<float> t(0, heads * hd), cosine(heads_per_block * hd * 4, half), sine((heads_per_block * hd + half) * 4, half);
  const int64_t row = block_x(), first = int64_t{first_head} * hd;
  row_angles(cosine, sine, a.inv_freq, half, load(a.position + row), a.scale);
  load_part(t, a.x, row, first, heads * hd);
  sync_block();
  for (int h = warp(); h < heads; h += warps()) {
    const int base = h * hd;
    if (a.weight) {
      float squares = 0;
      for (int i = lane(); i < hd; i += kWarp) squares += t[base + i] * t[base + i];
      const float inv = 1.0f / sqrtf(warp_sum(squares) / static_cast<float>(hd) + a.eps);
      for (int i = lane(); i < hd; i += kWarp) t.set(base + i, t[base + i] * inv * load(static_cast<const float*>(a.weight.data) + i));
      if (a.inv_rms && lane() == 0) store(static_cast<float*>(a.inv_rms.data) + row * a.inv_rms.stride + first_head + h, inv);
      sync_warp();
    }
    for (int i = lane(); i < half; i += kWarp) {
      const float low = t[base + i], high = t[base + half + i];
      t.set(base + i, low * cosine[i] - high * sine[i]);
      t.set(base + half + i, high * cosine[i] + low * sine[i]);
    }
  }
  sync_block();
  store_part(a.y, row, first, t, heads * hd);
}

// The rotation's transpose first, then the norm's gradient. A block walks the rows of its part, so that the weight's gradient is
// summed in an order that depends on shapes only: heads, then rows, then (column_sum) parts.
DS_KERNEL void DS_THREADS(kBlock) qk_norm_rope_backward_kernel(HeadNormRopeGradient a, int heads_per_block, float* parts) {
  const int hd = a.head_dim, half = a.rot / 2, first_head = static_cast<int>(block_y()) * heads_per_block;
  const int all_heads = static_cast<int>(a.x.cols) / hd, heads = first_head + heads_per_block < all_heads ? heads_per_block : all_heads - first_head;
  const int block_cols = heads_per_block * hd;
  const Shared<float> g(0, heads * hd), n(block_cols * 4, heads * hd), product(2 * block_cols * 4, heads * hd), cosine(3 * block_cols * 4, half),
      sine((3 * block_cols + half) * 4, half), d_weight((3 * block_cols + 2 * half) * 4, hd);
  const int64_t first = int64_t{first_head} * hd;
  const auto weight = [&](int i) { return load(static_cast<const float*>(a.weight.data) + i); };
  for (int i = thread(); i < hd; i += threads()) d_weight.set(i, 0);
  for (int64_t row = a.x.rows * block_x() / blocks_x(); row < a.x.rows * (block_x() + 1) / blocks_x(); ++row) {
    row_angles(cosine, sine, a.inv_freq, half, load(a.position + row), a.scale);
    load_part(g, a.dy, row, first, heads * hd);
    if (a.weight) load_part(n, a.x, row, first, heads * hd);
    sync_block();
    for (int h = warp(); h < heads; h += warps()) {
      const int base = h * hd;
      for (int i = lane(); i < half; i += kWarp) {
        const float low = g[base + i], high = g[base + half + i];
        g.set(base + i, low * cosine[i] + high * sine[i]);
        g.set(base + half + i, high * cosine[i] - low * sine[i]);
      }
      if (!a.weight) continue;
      sync_warp();
      const float inv = load(static_cast<const float*>(a.inv_rms.data) + row * a.inv_rms.stride + first_head + h);
      float dot = 0;
      for (int i = lane(); i < hd; i += kWarp) dot += g[base + i] * weight(i) * n[base + i] * inv;
      const float mean = warp_sum(dot) / static_cast<float>(hd);
      for (int i = lane(); i < hd; i += kWarp) {
        const float gradient = g[base + i], normalised = n[base + i] * inv;
        product.set(base + i, gradient * normalised);
        g.set(base + i, inv * (gradient * weight(i) - normalised * mean));
      }
    }
    sync_block();
    if (a.d_weight) {
      for (int i = thread(); i < hd; i += threads()) {
        float sum = d_weight[i];
        for (int h = 0; h < heads; ++h) sum += product[h * hd + i];
        d_weight.set(i, sum);
      }
    }
    store_part(a.d_x, row, first, g, heads * hd);
    sync_block();
  }
  if (a.d_weight)
    for (int i = thread(); i < hd; i += threads()) store(parts + (block_x() * blocks_y() + block_y()) * hd + i, d_weight[i]);
}

}  // namespace

void qk_norm_rope(Stream stream, const HeadNormRope& a) {
  if (a.x.rows * a.x.cols == 0) return;
  const Heads heads = group_heads(a.x.cols, a.head_dim);
  const int shared = (heads.per_block * a.head_dim + a.rot) * 4;
  launch(stream, {static_cast<unsigned>(a.x.rows), static_cast<unsigned>(heads.groups)}, {kBlock}, shared, qk_norm_rope_kernel, a, heads.per_block);
}

void qk_norm_rope_backward(Stream stream, const HeadNormRopeGradient& a, Scratch scratch) {
  int64_t parts = 0;
  const Heads heads = group_heads(a.x.cols, a.head_dim);
  if (a.x.rows * a.x.cols > 0) {
    const int64_t fits = scratch.bytes / (int64_t{heads.groups} * a.head_dim * 4);
    parts = a.x.rows < kMaxParts ? a.x.rows : kMaxParts;
    parts = parts < fits ? parts : fits;
    const int shared = (3 * heads.per_block * a.head_dim + a.rot + a.head_dim) * 4;
    launch(stream, {static_cast<unsigned>(parts), static_cast<unsigned>(heads.groups)}, {kBlock}, shared, qk_norm_rope_backward_kernel, a, heads.per_block,
           static_cast<float*>(scratch.data));
  }
  if (a.d_weight) column_sum(stream, a.d_weight, {scratch.data, parts * heads.groups, a.head_dim, a.head_dim, false, a.head_dim % 4 == 0}, {}, nullptr, a.add);
}

}  // namespace dspark::cuda
