// What the kernels of anchor attention, forward and backward, share: who sees what, and the walk over the keys of a block's tasks.
//
// A task is 16 query rows of one anchor and one kv head (rows: head in the group, then slot); neighbouring anchors share the context
// tiles they load. Anchors are sorted by row, and padding (row -1) is behind them, so that the anchors which see a stretch of the
// context are neighbours too: the backward finds where they begin and end by bisection and needs no list of them.
#pragma once

#include "cuda/attention.h"

namespace dspark::cuda {

// One anchor's view. Rows of the context it may see: [begin, end).
struct AnchorView {
  int row, doc, begin, end;
};

DS_DEVICE AnchorView anchor_view(const AnchorArgs& a, int anchor) {
  AnchorView v{-1, 0, 0, 0};
  if (anchor >= a.anchors) return v;
  v.row = load(a.anchor_row + anchor);
  if (v.row < 0) return v;
  v.doc = load(a.doc_start + anchor);
  const int first = a.window == 0 ? v.doc : a.by_anchor ? v.row - a.window : v.row - a.window + 1;  // slot 0 sees farthest back
  v.begin = first > v.doc ? first : v.doc;
  v.end = v.row;
  return v;
}
DS_DEVICE bool sees_tile(const AnchorView& v, int first, int keys) { return v.row >= 0 && first < v.end && first + keys > v.begin; }
DS_DEVICE bool sees_context(const AnchorArgs& a, const AnchorView& v, int slot, int t) {
  return t >= v.begin && t < v.end && (a.window == 0 || a.by_anchor || t > v.row + slot - a.window);
}
DS_DEVICE bool sees_block(const AnchorArgs& a, int slot, int j) { return j < a.block && (!a.causal || (j <= slot && (a.window == 0 || slot - j < a.window))); }

// The first anchor that is padding or for whose view `past` holds, which must go on holding behind it.
template <typename Past>
DS_DEVICE int bisect_anchors(const AnchorArgs& a, const Past& past) {
  int low = 0, high = a.anchors;
  while (low < high) {
    const int middle = (low + high) / 2;
    const AnchorView v = anchor_view(a, middle);
    if (v.row < 0 || past(v)) high = middle;
    else low = middle + 1;
  }
  return low;
}

// Query row r of an anchor (head in the group * block + slot).
DS_DEVICE Place query_place(const AnchorArgs& a, int anchor, int kv_head, int r) {
  const int group = a.heads / a.kv_heads;
  if (r >= group * a.block || anchor >= a.anchors) return {-1, 0};
  return {int64_t{anchor} * a.block + r % a.block, int64_t{kv_head * group + r / a.block} * a.head_dim};
}

constexpr int tasks_per_anchor(const AnchorArgs& a) { return (a.heads / a.kv_heads * a.block + 15) / 16; }
inline unsigned task_blocks(const AnchorArgs& a, int tasks) { return static_cast<unsigned>((int64_t{a.anchors} * tasks_per_anchor(a) + tasks - 1) / tasks); }

// The kTasks tasks of a block of the grid [task_blocks, kv heads], one of them this warp's.
template <int kTasks>
struct AnchorTasks {
  int per_anchor, kv_head, first, first_anchor, last_anchor;  // of the block
  int anchor, first_row;                                      // of the warp
  AnchorView view;

  DS_DEVICE explicit AnchorTasks(const AnchorArgs& a)
      : per_anchor(tasks_per_anchor(a)), kv_head(static_cast<int>(block_y())), first(static_cast<int>(block_x()) * kTasks), first_anchor(first / per_anchor),
        last_anchor((first + kTasks - 1) / per_anchor), anchor((first + warp()) / per_anchor), first_row((first + warp()) % per_anchor * 16), view(anchor_view(a, anchor)) {}
  // Row r of the block's 16 kTasks.
  DS_DEVICE Place query(const AnchorArgs& a, int r) const {
    const int task = first + r / 16;
    return query_place(a, task / per_anchor, kv_head, task % per_anchor * 16 + r % 16);
  }
  // The warp's row of a lane's half, and its head and slot.
  DS_DEVICE int row(int half) const { return first_row + lane() / 4 + 8 * half; }
  DS_DEVICE Place place(const AnchorArgs& a, int half) const { return query_place(a, anchor, kv_head, row(half)); }
  DS_DEVICE int head(const AnchorArgs& a, int half) const { return kv_head * (a.heads / a.kv_heads) + row(half) / a.block; }

  // Loads the keys and values that some task of the block sees, a tile at a time. body(key0, sees) is for 16 of a tile that this
  // warp's task sees some of; sees(slot, key in the tile).
  template <typename T, int kHd, typename Body>
  DS_DEVICE void for_keys(const AnchorArgs& a, Shared<T> k, Shared<T> v, const Body& body) const {
    const int64_t col = int64_t{kv_head} * a.head_dim;
    int lo = 0x7fffffff, hi = 0;
    for (int n = first_anchor; n <= last_anchor; ++n) {
      const AnchorView w = anchor_view(a, n);
      if (w.begin >= w.end) continue;
      lo = w.begin < lo ? w.begin : lo;
      hi = w.end > hi ? w.end : hi;
    }
    for (int t0 = lo / kKeys * kKeys; t0 < hi; t0 += kKeys) {
      bool wanted = false;
      for (int n = first_anchor; n <= last_anchor; ++n) wanted = wanted || sees_tile(anchor_view(a, n), t0, kKeys);
      if (!wanted) continue;
      const auto place = [&](int r) { return Place{t0 + r < a.k_ctx.rows ? int64_t{t0} + r : -1, col}; };
      sync_block();
      load_tile<T, kHd>(k, kKeys, a.k_ctx, a.head_dim, place);
      load_tile<T, kHd>(v, kKeys, a.v_ctx, a.head_dim, place);
      sync_block();
      if (!sees_tile(view, t0, kKeys)) continue;
      for (int key0 = 0; key0 < kKeys; key0 += 16) body(key0, [&](int slot, int key) { return sees_context(a, view, slot, t0 + key); });
    }
    for (int n = first_anchor; n <= last_anchor && n < a.anchors; ++n)
      for (int j0 = 0; j0 < a.block; j0 += kKeys) {
        const auto place = [&](int r) { return Place{j0 + r < a.block ? int64_t{n} * a.block + j0 + r : -1, col}; };
        sync_block();
        load_tile<T, kHd>(k, kKeys, a.k_block, a.head_dim, place);
        load_tile<T, kHd>(v, kKeys, a.v_block, a.head_dim, place);
        sync_block();
        if (n != anchor || view.row < 0) continue;
        for (int key0 = 0; key0 < kKeys && j0 + key0 < a.block; key0 += 16) body(key0, [&](int slot, int key) { return sees_block(a, slot, j0 + key); });
      }
  }
};

}  // namespace dspark::cuda
