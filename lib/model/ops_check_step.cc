// The argument checks of every operator: shapes, dtypes, strides, aliasing. One place for all backends, so that a
// kernel may rely on them. A violation is a bug of ours: it aborts and prints the operator, the tensor and both values.
// Here: optimizers and decoding.
#include "model/ops_check.h"

namespace dspark::model {

// ---- optimizer
// -------------------------------------------------------------------------------------------------------------

void check(const Context& ctx, const SumSquares& a) {
  const Checker c(ctx, "sum_squares");
  c.acc("grad", a.grad, a.grad.rows, a.grad.cols);
  c.acc("sum", a.sum, 1, 1);
  c.distinct({{"sum", a.sum}}, {{"grad", a.grad}});
}

void check(const Context& ctx, const FinishNorm& a) {
  const Checker c(ctx, "finish_norm");
  c.acc("scalars", a.scalars, 1, kNumStepScalars);
  c.acc("sums", a.sums, 1, a.sums.cols);
  c.distinct({{"scalars", a.scalars}}, {{"sums", a.sums}});
}

void check(const Context& ctx, const AdamW& a) {
  const Checker c(ctx, "adamw");
  const int64_t rows = a.master.rows, cols = a.master.cols;
  c.acc("master", a.master, rows, cols);
  c.acc("m", a.m, rows, cols);
  c.acc("v", a.v, rows, cols);
  c.acc("grad", a.grad, rows, cols);
  if (a.value) c.floating("value", a.value, rows, cols);
  c.acc("scalars", a.scalars, 1, kNumStepScalars);
  c.distinct({{"master", a.master}, {"m", a.m}, {"v", a.v}, {"value", a.value}},
             {{"grad", a.grad}, {"scalars", a.scalars}});
}

// X and the polynomial in act; X, two Gram matrices and a diagonal in acc; a sum a row in fp64.
int64_t muon_work(const Context& ctx, int64_t rows, int64_t cols) {
  const int64_t m = std::min(rows, cols), n = std::max(rows, cols);
  const auto padded = [](int64_t bytes) { return (bytes + 63) / 64 * 64; };
  const int64_t act = dtype_bytes(ctx.act_dtype()), acc = dtype_bytes(ctx.acc_dtype());
  return padded(m * n * act) + padded(m * n * acc) + padded(m * m * act) + 2 * padded(m * m * acc) + padded(m * acc) + padded(8 * rows) + 64;
}

void check(const Context& ctx, const Muon& a) {
  const Checker c(ctx, "muon");
  const int64_t rows = a.master.rows, cols = a.master.cols;
  c.acc("master", a.master, rows, cols);
  c.acc("buf", a.buf, rows, cols);
  c.acc("grad", a.grad, rows, cols);
  if (a.value) c.floating("value", a.value, rows, cols);
  c.acc("scalars", a.scalars, 1, kNumStepScalars);
  DS_ASSERT(a.work.dtype == DType::u8 && a.work.rows == 1 && a.work.cols >= muon_work(ctx, rows, cols),
            "muon: work is {} [{}, {}], expected u8 [1, >= {}]", dtype_name(a.work.dtype), a.work.rows, a.work.cols, muon_work(ctx, rows, cols));
  c.distinct({{"master", a.master}, {"buf", a.buf}, {"value", a.value}, {"work", a.work}}, {{"grad", a.grad}, {"scalars", a.scalars}});
}

// ---- decoding
// --------------------------------------------------------------------------------------------------------------

void check(const Context& ctx, const TokenProbs& a) {
  const Checker c(ctx, "token_probs");
  c.floating("logits", a.logits, a.logits.rows, a.logits.cols);
  c.acc("probs", a.probs, a.logits.rows, a.logits.cols);
  DS_ASSERT(a.params.temperature >= 0 && a.params.top_k >= 0 && a.params.top_p > 0 && a.params.min_p >= 0 &&
                a.params.min_p <= 1,
            "token_probs: temperature {}, top_k {}, top_p {}, min_p {}", a.params.temperature, a.params.top_k,
            a.params.top_p, a.params.min_p);
  c.same_or_distinct("probs", a.probs, "logits", a.logits);
}

void check(const Context& ctx, const SampleTokens& a) {
  const Checker c(ctx, "sample_tokens");
  const int64_t n = a.probs.rows;
  c.acc("probs", a.probs, n, a.probs.cols);
  DS_ASSERT(n == 0 || a.probs.cols > 0, "sample_tokens: probs of no token");
  c.i32("ids", a.ids, n);
  c.typed("uniform", a.uniform, DType::f64, n);
  if (a.map) c.i32("map", a.map, a.probs.cols);
  if (a.raw_ids) c.i32("raw_ids", a.raw_ids, n);
  c.distinct({{"ids", a.ids}, {"raw_ids", a.raw_ids}}, {{"probs", a.probs}, {"uniform", a.uniform}, {"map", a.map}});
}

void check(const Context& ctx, const VerifyBlock& a) {
  const Checker c(ctx, "verify_block");
  const int64_t n = a.draft_ids.cols, vocab = a.target_probs.cols;
  c.i32("draft_ids", a.draft_ids, n);
  c.acc("draft_probs", a.draft_probs, n, a.draft_probs.cols);
  if (a.map)
    c.i32("map", a.map, a.draft_probs.cols);
  else
    DS_ASSERT(n == 0 || a.draft_probs.cols == vocab, "verify_block: draft of {} tokens, target of {}, no map",
              a.draft_probs.cols, vocab);
  DS_ASSERT(vocab > 0, "verify_block: target_probs of no token");
  c.acc("target_probs", a.target_probs, n + 1, vocab);
  c.typed("uniform", a.uniform, DType::f64, n + 1);
  c.acc("work", a.work, 1, vocab);
  c.i32("result", a.result, 2);
  c.distinct({{"result", a.result}, {"work", a.work}}, {{"draft_ids", a.draft_ids},
                                                        {"draft_probs", a.draft_probs},
                                                        {"map", a.map},
                                                        {"target_probs", a.target_probs},
                                                        {"uniform", a.uniform}});
}

}  // namespace dspark::model
