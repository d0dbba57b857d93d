// Cases of anchor_attention, anchor_attention_backward, cache_attention.
#include "op_table.h"

namespace dspark::test {

using namespace model;

namespace {

struct AnchorShape {
  std::string name;
  int64_t rows, heads, kv_heads, head_dim;
  std::vector<int64_t> anchor_row, doc_start;
  AnchorRule rule;
};

void anchor_all(OpRun& run, const AnchorShape& s, Kind kind) {
  const auto n = static_cast<int64_t>(s.anchor_row.size());
  const int64_t block_rows = n * s.rule.block, q_cols = s.heads * s.head_dim, kv_cols = s.kv_heads * s.head_dim;
  AnchorAttentionBackward b;
  b.q = run.input("q", kind, block_rows, q_cols);
  b.k_ctx = run.input("k_ctx", kind, s.rows, kv_cols);
  b.v_ctx = run.input("v_ctx", kind, s.rows, kv_cols);
  b.k_block = run.input("k_block", kind, block_rows, kv_cols);
  b.v_block = run.input("v_block", kind, block_rows, kv_cols);
  b.out = run.output("out", kind, block_rows, q_cols);
  b.lse = run.output("lse", Kind::acc, block_rows, s.heads);
  b.anchor_row = run.ints("anchor_row", s.anchor_row);
  b.doc_start = run.ints("doc_start", s.doc_start);
  b.rule = s.rule;
  b.head_dim = s.head_dim;
  b.scale = 1 / std::sqrt(static_cast<double>(s.head_dim));
  anchor_attention(run.ctx(), {b.out, b.lse, b.q, b.k_ctx, b.v_ctx, b.k_block, b.v_block, b.anchor_row, b.doc_start,
                               b.rule, b.head_dim, b.scale});
  b.d_out = run.cotangent("out", kind, block_rows, q_cols);
  b.d_q = run.output("d_q", kind, block_rows, q_cols);
  b.d_k_ctx = run.output("d_k_ctx", kind, s.rows, kv_cols);
  b.d_v_ctx = run.output("d_v_ctx", kind, s.rows, kv_cols);
  b.d_k_block = run.output("d_k_block", kind, block_rows, kv_cols);
  b.d_v_block = run.output("d_v_block", kind, block_rows, kv_cols);
  b.work = run.work(Kind::acc, anchor_attention_work(block_rows, s.heads));
  anchor_attention_backward(run.ctx(), b);
}

// An anchor alone gives the same bits as among others.
void anchor_rows(OpRun& run, const AnchorShape& s, Kind kind) {
  const auto n = static_cast<int64_t>(s.anchor_row.size());
  const int64_t q_cols = s.heads * s.head_dim, kv_cols = s.kv_heads * s.head_dim, block = s.rule.block;
  AnchorAttention a;
  a.q = run.row_input("q", kind, n, block, q_cols);
  a.k_ctx = run.input("k_ctx", kind, s.rows, kv_cols);
  a.v_ctx = run.input("v_ctx", kind, s.rows, kv_cols);
  a.k_block = run.row_input("k_block", kind, n, block, kv_cols);
  a.v_block = run.row_input("v_block", kind, n, block, kv_cols);
  a.out = run.row_output("out", kind, n, block, q_cols);
  a.lse = run.row_output("lse", Kind::acc, n, block, s.heads);
  a.anchor_row = run.ints("anchor_row", run.slice(s.anchor_row));
  a.doc_start = run.ints("doc_start", run.slice(s.doc_start));
  a.rule = s.rule;
  a.head_dim = s.head_dim;
  a.scale = 0.25;
  anchor_attention(run.ctx(), a);
}

struct CacheShape {
  int64_t n, first, capacity, window, heads, kv_heads, head_dim;
};

void cache_rows(OpRun& run, const CacheShape& s, Kind kind) {
  CacheAttention a;
  a.q = run.row_input("q", kind, s.n, 1, s.heads * s.head_dim);
  a.k_cache = run.input("k_cache", kind, s.capacity, s.kv_heads * s.head_dim);
  a.v_cache = run.input("v_cache", kind, s.capacity, s.kv_heads * s.head_dim);
  a.out = run.row_output("out", kind, s.n, 1, s.heads * s.head_dim);
  a.first = s.first + run.first_unit();
  a.window = s.window;
  a.head_dim = s.head_dim;
  a.scale = 1 / std::sqrt(static_cast<double>(s.head_dim));
  cache_attention(run.ctx(), a);
}

}  // namespace

void add_attention_cases(OpCases& cases) {
  const AnchorRule full{.block = 3};
  const std::vector<AnchorShape> shapes = {
      {"one anchor at the start of its document: no context", 1, 1, 1, 4, {0}, {0}, {.block = 1}},
      {"no anchor: context gradients are zero", 5, 2, 1, 8, {}, {}, full},
      {"two documents, the second starts inside the first one's last block",
       12,
       2,
       1,
       8,
       {1, 5, 6, 7, 11},
       {0, 0, 6, 6, 6},
       full},
      {"grouped heads, padding anchors at the end", 9, 6, 2, 16, {2, 4, 8, -1, -1}, {0, 3, 3, 0, 0}, {.block = 2}},
      {"only padding", 4, 2, 2, 8, {-1, -1}, {0, 0}, full},
      {"sliding, as served: slot k sees t > r + k - window",
       20,
       2,
       1,
       8,
       {3, 9, 10, 19},
       {0, 0, 10, 10},
       {.block = 5, .window = 4, .causal_in_block = true}},
      {"sliding, by anchor: t >= r - window",
       20,
       2,
       1,
       8,
       {3, 9, 10, 19},
       {0, 0, 10, 10},
       {.block = 5, .window = 4, .causal_in_block = true, .window_by_anchor = true}},
      {"sliding, window 1: slot 0 sees itself only",
       8,
       1,
       1,
       8,
       {2, 7},
       {0, 5},
       {.block = 4, .window = 1, .causal_in_block = true}},
      {"sliding, not causal in the block", 20, 2, 2, 8, {5, 19}, {0, 7}, {.block = 4, .window = 3}},
      {"causal in the block, no window", 7, 2, 1, 8, {6}, {2}, {.block = 5, .causal_in_block = true}},
      {"a context one over 64, odd head size", 130, 3, 1, 10, {65, 129}, {0, 64}, {.block = 7}},
      {"head size 64, block 16", 33, 2, 1, 64, {1, 32}, {0, 0}, {.block = 16}},
      {"heads of 200 columns, sliding", 40, 2, 1, 200, {3, 9, 36, 39, -1}, {0, 0, 10, 10, 0}, {.block = 5, .window = 6, .causal_in_block = true}},
      {"heads of 256 columns, a context one over 64", 66, 2, 2, 256, {65}, {0}, {.block = 9}},
      {"many anchors on one row", 6, 2, 1, 8, {4, 4, 4, 4, 4, 4, 4, 4, 4}, {0, 0, 0, 0, 0, 0, 0, 0, 0}, {.block = 2}},
  };
  for (const AnchorShape& s : shapes) {
    cases.push_back({"anchor_attention", s.name + ", act", [=](OpRun& run) { anchor_all(run, s, Kind::act); }});
    cases.push_back({"anchor_attention", s.name + ", acc", [=](OpRun& run) { anchor_all(run, s, Kind::acc); }});
    if (s.anchor_row.size() > 1) {
      cases.push_back({"anchor_attention", "rows, " + s.name, [=](OpRun& run) { anchor_rows(run, s, Kind::act); },
                       static_cast<int64_t>(s.anchor_row.size())});
    }
  }
  for (const CacheShape& s : {CacheShape{0, 0, 4, 0, 2, 1, 8},
                              {1, 0, 1, 0, 1, 1, 2},
                              {7, 0, 7, 0, 4, 2, 16},
                              {3, 5, 11, 0, 6, 2, 8},
                              {5, 3, 9, 2, 2, 2, 8},
                              {4, 0, 5, 1, 2, 1, 8},
                              {9, 60, 80, 0, 3, 1, 64},
                              {3, 33, 36, 0, 2, 1, 256},
                              {3, 1022, 1026, 0, 2, 1, 16},
                              {3, 1023, 1026, 600, 2, 1, 8},
                              {9, 125, 134, 33, 3, 3, 10}}) {
    const std::string name = fmt::format("{} rows after {}, window {}, {}/{} heads of {}", s.n, s.first, s.window,
                                         s.heads, s.kv_heads, s.head_dim);
    cases.push_back({"cache_attention", name + ", act", [=](OpRun& run) { cache_rows(run, s, Kind::act); }, s.n});
    cases.push_back({"cache_attention", name + ", acc", [=](OpRun& run) { cache_rows(run, s, Kind::acc); }, s.n});
  }
}

}  // namespace dspark::test
