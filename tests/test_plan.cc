#include <catch2/catch.hpp>

#include "core/rng.h"
#include "model/backends.h"
#include "train/plan_step.h"

using namespace dspark;
using namespace dspark::model;

namespace {
std::unique_ptr<PlanBackend> plan(Precision precision) {
  BackendOptions options;
  options.precision = precision;
  return make_plan_backend(options);
}
}  // namespace

TEST_CASE("the plan counts products by their shape and remembers who asked", "[plan]") {
  const auto backend = plan(Precision::bf16);
  Context& ctx = backend->context();
  CHECK(ctx.act_dtype() == DType::bf16);
  CHECK(ctx.acc_dtype() == DType::f32);
  Weight w;
  w.value = ctx.allocate(DType::bf16, 30, 20);
  w.needs_input_gradient = true;
  const Tensor x = ctx.allocate(DType::bf16, 7, 20), y = ctx.allocate(DType::f32, 7, 30),
               dy = ctx.allocate(DType::bf16, 7, 30);
  const Tensor dw = ctx.allocate(DType::f32, 30, 20);
  linear(ctx, {y, x, &w});
  CHECK(backend->counts().flops == 2 * 7 * 30 * 20);
  CHECK(backend->counts().bytes_read == 2 * (7 * 20 + 30 * 20));
  CHECK(backend->counts().bytes_written == 4 * 7 * 30);
  linear_dw(ctx, {dw, dy, x, Write::add});
  linear_dw(ctx, {dw, dy, x, Write::overwrite});
  CHECK(backend->by_operator().at("linear_dw").calls == 2);
  CHECK(backend->by_operator().at("linear_dw").flops == 2 * 2 * 7 * 30 * 20);
  CHECK(backend->by_operator().at("linear_dw").bytes_read == 2 * 2 * (7 * 30 + 7 * 20) + 4 * 30 * 20);
  CHECK(backend->counts().calls == 3);
  CHECK(backend->by_operator().count("swiglu") == 0);
  backend->reset_counts();
  CHECK(backend->counts().calls == 0);
}

TEST_CASE("the plan's memory is counted and never touched", "[plan]") {
  const auto backend = plan(Precision::fp32);
  Context& ctx = backend->context();
  CHECK(ctx.act_dtype() == DType::f32);
  // A tebibyte that no machine here has.
  const Tensor big = ctx.allocate(DType::f32, 1 << 20, 1 << 18);
  CHECK(backend->allocated_bytes() == int64_t{1} << 40);
  const Tensor small = ctx.allocate(DType::f32, 1, 1);
  CHECK(backend->allocated_bytes() == (int64_t{1} << 40) + 64);
  fill(ctx, {big, 1});
  CHECK(backend->counts().bytes_written == static_cast<double>(int64_t{1} << 40));
  ctx.free(big);
  CHECK(backend->allocated_bytes() == 64);
  float value = 5;
  ctx.download_now({&value, DType::f32, 1, 1, 1}, small);
  CHECK(value == 0);

  Arena arena(ctx.device(), 0);
  const int64_t mark = arena.mark();
  const Tensor a = arena.matrix(DType::f32, 1 << 20, 1 << 20), b = arena.matrix(DType::f32, 3, 5);
  CHECK(a.data);
  CHECK_FALSE(b.data == a.data);
  CHECK(arena.peak_bytes() == (int64_t{1} << 42) + 64);
  arena.release(mark);
  arena.vector(DType::f32, 16);
  CHECK(arena.peak_bytes() == (int64_t{1} << 42) + 64);
}

TEST_CASE("the plan counts the loss head chunk by chunk", "[plan]") {
  const auto backend = plan(Precision::bf16);
  Context& ctx = backend->context();
  Weight head, target_head;
  head.value = ctx.allocate(DType::bf16, 100, 24);
  head.needs_input_gradient = true;
  target_head.value = ctx.allocate(DType::bf16, 100, 16);
  VocabLoss a;
  a.joint = ctx.allocate(DType::bf16, 10, 24);
  a.head = &head;
  a.target_state = ctx.allocate(DType::bf16, 6, 16);
  a.target_head = &target_head;
  a.target_row = ctx.allocate(DType::i32, 1, 10);
  a.label = ctx.allocate(DType::i32, 1, 10);
  a.weight = ctx.allocate(DType::f32, 1, 10);
  a.conf_weight = ctx.allocate(DType::f32, 1, 10);
  a.scale = ctx.allocate(DType::f32, 1, kNumTerms);
  a.coef[kCe] = 1;
  a.hidden_cols = 16;
  a.slot_out = ctx.allocate(DType::f32, 10, kSlotOutCols);
  a.d_joint = ctx.allocate(DType::f32, 10, 24);
  const LossChunk chunks[] = {{0, 6, 0, 4}, {6, 4, 3, 3}};
  a.chunks = chunks;
  a.work = ctx.allocate(DType::u8, 1, vocab_loss_work(ctx, 6, 4, 100, 24));
  a.backward = false;
  vocab_loss(ctx, a);
  const double validation = backend->counts().flops;
  CHECK(validation >= 2.0 * 100 * (10 * 24 + 7 * 16));  // target rows of both chunks
  backend->reset_counts();
  a.backward = true;
  vocab_loss(ctx, a);
  CHECK(backend->counts().flops - validation == Approx(2.0 * 100 * 10 * 24 + 10.0 * 10 * 100));
}

// Anchors bunched and spread, masks full and holey, one document and many: no row of the planned size needs more than was planned.
TEST_CASE("the planned arena holds every row of its size", "[plan]") {
  const Rng rng(12, RngStream::test);
  uint64_t draws = 0;
  const auto below = [&](int64_t n) { return static_cast<int64_t>(rng.below(draws++, static_cast<uint64_t>(n))); };
  constexpr int64_t kTokens = 120;
  for (const Markov markov : {Markov::none, Markov::vanilla, Markov::gated, Markov::rnn})
    for (const int64_t anchors : {1, 9, 40, 119}) {
      DrafterConfig c;
      c.hidden = 32, c.target_hidden = below(2) == 0 ? 32 : 48, c.ffn = 48, c.heads = 2, c.kv_heads = 1, c.head_dim = 16;
      c.vocab = c.draft_vocab = 300, c.layers.assign(2, LayerType::full), c.taps = {{1}, {2}}, c.block = 5, c.mask_token = 299, c.max_position = 100;
      c.markov = markov, c.rank = markov == Markov::none ? 0 : 8;
      c.confidence = c.confidence_with_markov = c.rank > 0;
      c.rope.type = "dynamic";
      const train::Objective objective = train::deepspec_objective(c.confidence);
      const train::StepMemory planned = train::plan_step(c, objective, true, Precision::bf16, train::largest_row(c, kTokens, anchors, 24)).memory;
      for (int trial = 0; trial < 40; ++trial) {
        std::vector<int32_t> tokens, starts;
        std::vector<uint8_t> mask;
        std::vector<PackedDocument> documents;
        const int64_t holes = below(3) == 0 ? 4 : 1000000;
        for (int64_t t = 0; t < kTokens; ++t) tokens.push_back(static_cast<int32_t>(below(300))), mask.push_back(below(holes) > 0);
        for (int64_t begin = 0; begin < kTokens;) {
          const int64_t end = trial % 2 == 0 ? kTokens : std::min(kTokens, begin + 1 + below(60));
          documents.push_back({begin, end});
          begin = end;
        }
        // Dense in one part of the row, sparse in the other, `anchors` at most.
        const int64_t cut = below(kTokens), dense = 1 + below(4), sparse = 1 + below(12);
        for (int64_t t = 0; t < kTokens && static_cast<int64_t>(starts.size()) < anchors; t += t < cut ? dense : sparse) starts.push_back(static_cast<int32_t>(t));
        PlanInput in = plan_input(c);
        in.tokens = tokens, in.mask = mask, in.documents = documents, in.anchors = starts, in.chunk_slots = 24;
        in.slots = below(2) == 0 ? SlotRule::label_prefix : SlotRule::row_mask;
        const train::StepMemory needed = train::plan_step(c, objective, true, Precision::bf16, make_batch_plan(in)).memory;
        INFO(static_cast<int>(markov) << ", " << starts.size() << " of " << anchors << " anchors, " << documents.size() << " documents");
        CHECK(needed.arena <= planned.arena);
        CHECK(needed.inbox <= planned.inbox);
        CHECK(needed.lists <= planned.lists);
      }
    }
}

TEST_CASE("make_backend refuses a device it does not know", "[plan]") {
  BackendOptions options;
  options.device = "tpu";
  CHECK_THROWS_WITH(make_backend(options), Catch::Contains("tpu"));
  for (const std::string device : {"ref", "plan", "cpu"}) {
    options.device = device;
    options.precision = device == "ref" ? Precision::fp64 : Precision::fp32;
    CHECK(make_backend(options)->context().device().name() == device);
  }
  options.device = "ref";
  options.precision = Precision::bf16;
  CHECK_THROWS(make_backend(options));
}
