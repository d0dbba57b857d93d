// The attention kernels (isa/attention.cc). They see query rows against one tile of at most kTileKeys keys, all in fp32
// scratch memory; rows are `padded` columns wide: head_dim rounded up to a multiple of kPad, zeros behind.
//
//   [rows, padded] q, d_out, sums ...      x      tile: keys [kTileKeys, padded] and transposed [padded, kTileKeys]
//
// Which keys a row sees is a range [low, high) inside the tile. A row's bits depend on its own values and on the tile
// boundaries only, which the operators draw at fixed distances from the row's first possible key.
#pragma once

#include "model/ops_cpu/kernel_types.h"

namespace dspark::model::cpu {

inline constexpr int kTileKeys = 64;
inline constexpr int kPad = 16;

// One step of the online softmax: sums, maxima and normalisers take one tile more.
struct AttentionUpdate {
  int64_t rows, padded;
  int64_t begin, end;       // keys of the tile that some row sees
  const float* q;           // [rows, padded], scaled
  const float* keys_t;      // [padded, kTileKeys]
  const float* values;      // [kTileKeys, padded]
  const int32_t* low;       // [rows]
  const int32_t* high;      // [rows]
  float* sum;               // [rows, padded]
  float* top;               // [rows] largest score so far
  float* norm;              // [rows] sum of exp(score - top)
  float* score;             // [rows, kTileKeys], work
};

// Gradients of one tile: d_q for the rows (null: not wanted), d_keys and d_values for the keys (both null: not wanted).
// All are added to. d_q is still to be multiplied by the scale.
struct AttentionGradient {
  int64_t rows, padded;
  int64_t begin, end;
  const float* q;           // [rows, padded], scaled
  const float* d_out;       // [rows, padded]
  const float* lse;         // [rows]
  const float* delta;       // [rows] sum of d_out * out
  const float* keys;        // [kTileKeys, padded], for d_q
  const float* keys_t;      // [padded, kTileKeys]
  const float* values_t;    // [padded, kTileKeys]
  const int32_t* low;
  const int32_t* high;
  float* d_q;               // [rows, padded]
  float* d_keys;            // [kTileKeys, padded]
  float* d_values;          // [kTileKeys, padded]
  float* prob;              // [rows, kTileKeys], work
  float* d_score;           // [rows, kTileKeys], work
};

#define DS_ATTENTION_KERNELS(X)                                                                                        \
  /* dst [rows, padded] = scale * src [rows, cols], zeros behind; stride in elements */                                \
  X(void, attention_load, (float* dst, In src, int64_t stride, int64_t rows, int64_t cols, int64_t padded, float scale)) \
  /* dst [rows, cols] = factor * src [rows, padded] */                                                                 \
  X(void, attention_store, (Out dst, int64_t stride, const float* src, int64_t rows, int64_t cols, int64_t padded, float factor)) \
  /* dst [padded, kTileKeys] = transposed src [keys, padded], zeros behind */                                          \
  X(void, attention_transpose, (float* dst, const float* src, int64_t keys, int64_t padded))                           \
  X(void, attention_update, (const AttentionUpdate& a))                                                                \
  /* out = sum / norm; returns log-sum-exp of the scores */                                                            \
  X(float, attention_finish, (Out out, const float* sum, float top, float norm, int64_t cols))                         \
  X(void, attention_gradient, (const AttentionGradient& a))                                                            \
  /* sum of a * b */                                                                                                   \
  X(float, attention_dot, (In a, In b, int64_t n))

}  // namespace dspark::model::cpu
