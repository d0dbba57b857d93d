// The attention kernels (isa/attention.cc): query rows against one tile of at most kTileKeys keys, all in scratch memory. Rows are
// `padded` columns wide: head_dim rounded up to a multiple of kPad, zeros behind.
//
// Operands come in one of two forms, both in units of 32 bits:
//   floats   fp32, for any source: products are chains of multiply-adds
//   pairs    two bf16 that are neighbours along the dimension a product sums over, for bf16 sources on levels that multiply them
//            (attention_pairs): twice the rate; probabilities and score gradients are rounded to bf16 before their products
//
//   rows     [rows, padded / per]          a row's columns, per = 1 or 2 a unit: q, d_out, keys
//   keys_t   [padded / per, kTileKeys]     `rows` transposed
//   stacked  [rows / per, padded]          a unit holds neighbouring rows of one column: values; keys and q for gradients
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
  int pairs;
  int64_t rows, padded;
  int64_t begin, end;       // keys of the tile that some row sees
  float scale;              // of the scores
  const void* q;            // rows
  const void* keys_t;
  const void* values;       // stacked
  const int32_t* low;       // [rows]
  const int32_t* high;      // [rows]
  float* sum;               // [rows, padded]
  float* top;               // [rows] largest score so far
  float* norm;              // [rows] sum of exp(score - top)
  float* score;             // [rows, kTileKeys], work
};

// Gradients of one tile: d_q for the rows (null: not wanted), d_keys and d_values for the keys (both null: not wanted).
// All are added to. d_q and d_keys are still to be multiplied by the scale.
struct AttentionGradient {
  int pairs;
  int64_t rows, padded;
  int64_t begin, end;
  float scale;
  const void* q;            // rows
  const void* d_out;        // rows
  const void* q_stacked;    // for d_keys
  const void* d_out_stacked;  // for d_values
  const float* lse;         // [rows]
  const float* delta;       // [rows] sum of d_out * out
  const void* keys;         // stacked, for d_q
  const void* keys_t;
  const void* values_t;
  const int32_t* low;
  const int32_t* high;
  float* d_q;               // [rows, padded]
  float* d_keys;            // [kTileKeys, padded]
  float* d_values;          // [kTileKeys, padded]
  float* prob;              // [rows, kTileKeys], work
  float* d_score;           // [rows, kTileKeys], work
};

#define DS_ATTENTION_KERNELS(X)                                                                                        \
  /* whether this level multiplies pairs */                                                                            \
  X(int, attention_pairs, ())                                                                                          \
  /* dst = rows of src [rows, cols]; stride in elements. pairs: src is bf16 */                                         \
  X(void, attention_load, (void* dst, In src, int64_t stride, int64_t rows, int64_t cols, int64_t padded, int pairs))  \
  /* dst = stacked src; an odd last row is paired with zeros */                                                        \
  X(void, attention_stack, (void* dst, In src, int64_t stride, int64_t rows, int64_t cols, int64_t padded, int pairs)) \
  /* dst [rows, cols] = factor * src [rows, padded] */                                                                 \
  X(void, attention_store, (Out dst, int64_t stride, const float* src, int64_t rows, int64_t cols, int64_t padded, float factor)) \
  /* dst [units, kTileKeys] = transposed src [keys, units], zeros behind */                                            \
  X(void, attention_transpose, (void* dst, const void* src, int64_t keys, int64_t units))                              \
  X(void, attention_update, (const AttentionUpdate& a))                                                                \
  /* out = sum / norm; returns log-sum-exp of the scores */                                                            \
  X(float, attention_finish, (Out out, const float* sum, float top, float norm, int64_t cols))                         \
  X(void, attention_gradient, (const AttentionGradient& a))                                                            \
  /* sum of a * b */                                                                                                   \
  X(float, attention_dot, (In a, In b, int64_t n))

}  // namespace dspark::model::cpu
