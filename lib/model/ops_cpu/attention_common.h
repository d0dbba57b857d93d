// What the attention operators share: how rows are grouped, where they lie, and the memory of one thread.
#pragma once

#include <algorithm>
#include <initializer_list>

#include "model/ops_cpu/backend.h"

namespace dspark::model::cpu {

inline int64_t padded_head(int64_t head_dim) { return (head_dim + kPad - 1) / kPad * kPad; }

// Query rows that one thread holds at a time: as many as share a tile well and leave room in its scratch memory.
inline int64_t max_query_rows(int64_t padded) { return std::min<int64_t>(192, 24576 / padded); }

// Whether the products may take pairs: all of their sources are bf16 and the kernels multiply them.
inline bool takes_pairs(const Kernels& k, std::initializer_list<const Tensor*> sources) {
  for (const Tensor* t : sources)
    if (t->dtype != DType::bf16) return false;
  return k.attention_pairs() != 0;
}

// Hands out pieces of a thread's scratch memory, 64-byte aligned.
class Pieces {
 public:
  explicit Pieces(void* memory) : at_(static_cast<std::byte*>(memory)), end_(at_ + Machine::kScratchBytes) {}
  template <typename T = float>
  T* take(int64_t n) {
    T* p = reinterpret_cast<T*>(at_);
    at_ += (n * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
    DS_ASSERT(at_ <= end_, "attention needs more than {} bytes of scratch memory a thread", Machine::kScratchBytes);
    return p;
  }

 private:
  std::byte* at_;
  std::byte* end_;
};

// Item `i` of `n` so that every contiguous share of items gets early (cheap) and late (long) ones alike.
inline int64_t balanced(int64_t i, int64_t n) { return i % 2 == 0 ? i / 2 : n - 1 - i / 2; }

// One head's columns of row `r`.
inline In head_in(const Tensor& t, int64_t r, int64_t head, int64_t head_dim) {
  return in_row(t.col_range(head * head_dim, head_dim), r);
}
inline Out head_out(const Tensor& t, int64_t r, int64_t head, int64_t head_dim) {
  return out_row(t.col_range(head * head_dim, head_dim), r);
}

// Asks for some heads' columns of rows [first, first + count) before they are needed: pieces of a few cache lines at long
// strides, which the hardware does not foresee.
inline void prefetch_heads(const Tensor& t, int64_t first, int64_t count, int64_t head, int64_t heads, int64_t head_dim) {
  const int64_t bytes = heads * head_dim * dtype_bytes(t.dtype);
  for (int64_t r = first; r < first + count; ++r) {
    const char* p = static_cast<const char*>(head_in(t, r, head, head_dim).p);
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(p + at);
  }
}

// Context rows [low, high) that slot k of an anchor sees (contract of AnchorRule), and the slots of its block.
struct Range {
  int64_t low, high;
};
inline Range seen_context(const AnchorRule& rule, int64_t row, int64_t doc, int64_t slot) {
  if (rule.window == 0) return {doc, row};
  const int64_t low = rule.window_by_anchor ? row - rule.window : row + slot - rule.window + 1;
  return {std::max(doc, low), row};
}
inline Range seen_slots(const AnchorRule& rule, int64_t slot) {
  if (!rule.causal_in_block) return {0, rule.block};
  return {rule.window == 0 ? 0 : std::max<int64_t>(0, slot - rule.window + 1), slot + 1};
}

// The first tile boundary at or before `row`: boundaries lie kTileKeys apart from `origin` on.
inline int64_t tile_at(int64_t origin, int64_t row) { return origin + (row - origin) / kTileKeys * kTileKeys; }

// A row's limits inside the tile that starts at `tile`.
inline void set_limits(Range seen, int64_t tile, int32_t* low, int32_t* high) {
  *low = static_cast<int32_t>(std::clamp<int64_t>(seen.low - tile, 0, kTileKeys));
  *high = static_cast<int32_t>(std::clamp<int64_t>(seen.high - tile, 0, kTileKeys));
}

// The keys of a tile that some row of a group sees; empty when begin >= end.
inline Range union_of(const int32_t* low, const int32_t* high, int64_t rows) {
  Range all{kTileKeys, 0};
  for (int64_t r = 0; r < rows; ++r) {
    if (low[r] >= high[r]) continue;
    all.low = std::min<int64_t>(all.low, low[r]);
    all.high = std::max<int64_t>(all.high, high[r]);
  }
  return all;
}

}  // namespace dspark::model::cpu
