#include "job/bench_machine.h"

#include <algorithm>
#include <functional>

#include "core/error.h"
#include "core/log.h"
#include "job/bench_limit.h"
#include "job/bench_probe.h"
#include "model/ops_cpu/isa.h"

namespace dspark::job {

using namespace model;

namespace {

void products(Probe& p) {
  const Tensor x = p.act(896, 1024), dy = p.act(896, 3072, 0.1f), y = p.empty(p.ctx.act_dtype(), 896, 3072), dx = p.empty(p.ctx.acc_dtype(), 896, 1024);
  const Weight* w = p.weight(3072, 1024);
  p.run = [&ctx = p.ctx, x, dy, y, dx, w] {
    linear(ctx, {y, x, w});
    linear_dx(ctx, {dx, dy, w});
  };
}

void gradient_products(Probe& p) {
  const Tensor x = p.act(896, 1024), dy = p.act(896, 3072, 0.1f), dw = p.empty(p.ctx.acc_dtype(), 3072, 1024);
  p.run = [&ctx = p.ctx, x, dy, dw] { linear_dw(ctx, {dw, dy, x}); };
}

void attention(Probe& p, bool backward) {
  constexpr int64_t kAnchors = 64, kBlock = 7, kRows = 768, kHeads = 12, kKvHeads = 4, kHead = 64, n = kAnchors * kBlock;
  const DType act = p.ctx.act_dtype(), acc = p.ctx.acc_dtype();
  AnchorAttention a;
  a.q = p.act(n, kHeads * kHead), a.k_ctx = p.act(kRows, kKvHeads * kHead), a.v_ctx = p.act(kRows, kKvHeads * kHead);
  a.k_block = p.act(n, kKvHeads * kHead), a.v_block = p.act(n, kKvHeads * kHead);
  a.out = p.empty(act, n, kHeads * kHead), a.lse = p.empty(acc, n, kHeads);
  a.anchor_row = p.ints(kAnchors, [&](int64_t i) { return static_cast<int32_t>(i * (kRows - 1) / kAnchors); });
  a.doc_start = p.ints(kAnchors, [](int64_t) { return 0; });
  a.rule = {kBlock};
  a.head_dim = kHead, a.scale = 0.125;
  if (!backward) {
    p.run = [&ctx = p.ctx, a] { anchor_attention(ctx, a); };
    return;
  }
  anchor_attention(p.ctx, a);
  AnchorAttentionBackward b;
  b.q = a.q, b.k_ctx = a.k_ctx, b.v_ctx = a.v_ctx, b.k_block = a.k_block, b.v_block = a.v_block, b.out = a.out, b.lse = a.lse;
  b.anchor_row = a.anchor_row, b.doc_start = a.doc_start, b.rule = a.rule, b.head_dim = a.head_dim, b.scale = a.scale;
  b.d_out = p.act(n, kHeads * kHead, 0.1f);
  b.d_q = p.empty(act, n, kHeads * kHead), b.d_k_ctx = p.empty(act, kRows, kKvHeads * kHead), b.d_v_ctx = p.empty(act, kRows, kKvHeads * kHead);
  b.d_k_block = p.empty(act, n, kKvHeads * kHead), b.d_v_block = p.empty(act, n, kKvHeads * kHead);
  b.work = p.empty(acc, 1, anchor_attention_work(n, kHeads));
  p.run = [&ctx = p.ctx, b] { anchor_attention_backward(ctx, b); };
}

// The loss's sweeps: the whole operator at a narrow width, less its products.
void logits(Probe& p) {
  constexpr int64_t kSlots = 256, kVocab = 32768, kWidth = 64;
  const DType acc = p.ctx.acc_dtype();
  VocabLoss a;
  a.joint = p.act(kSlots, kWidth), a.target_state = p.act(kSlots, kWidth);
  a.head = p.weight(kVocab, kWidth), a.target_head = p.weight(kVocab, kWidth);
  a.target_row = p.ints(kSlots, [](int64_t i) { return static_cast<int32_t>(i); });
  a.label = p.ints(kSlots, [](int64_t i) { return static_cast<int32_t>(i * 37 % kVocab); });
  const Tensor ones = p.empty(acc, 1, kSlots), scale = p.empty(acc, 1, kNumTerms);
  fill(p.ctx, {ones, 1}), fill(p.ctx, {scale, 1});
  a.weight = a.conf_weight = ones, a.scale = scale;
  a.coef[kCe] = 0.1, a.coef[kTv] = 1.8;
  a.hidden_cols = kWidth;
  static constexpr LossChunk kWhole{0, kSlots, 0, kSlots};
  a.chunks = {&kWhole, 1};
  a.slot_out = p.empty(acc, kSlots, kSlotOutCols), a.d_joint = p.empty(acc, kSlots, kWidth);
  a.work = p.empty(DType::u8, 1, vocab_loss_work(p.ctx, kSlots, kSlots, kVocab, kWidth));
  const Tensor plain = p.empty(acc, kSlots, kVocab), gradient = p.act(kSlots, kVocab, 0.01f);
  p.run = [&ctx = p.ctx, a] { vocab_loss(ctx, a); };
  p.without = [&ctx = p.ctx, a, plain, gradient] {
    linear(ctx, {plain, a.target_state, a.target_head});
    linear(ctx, {plain, a.joint, a.head});
    linear_dx(ctx, {a.d_joint, gradient, a.head});
  };
}

// What a layer does to its activations between the products, forward and backward.
void rows(Probe& p) {
  constexpr int64_t n = 896, d = 1024, f = 3072, kHead = 64;
  const DType act = p.ctx.act_dtype(), acc = p.ctx.acc_dtype();
  const Tensor x = p.acc(n, d), delta = p.acc(n, d), x_out = p.empty(acc, n, d), y = p.empty(act, n, d), norm = p.acc(1, d), inv = p.empty(acc, 1, n), d_norm = p.empty(acc, 1, d),
               dy = p.acc(n, d, 0.1f), gate_up = p.act(n, 2 * f), mid = p.empty(act, n, f), d_mid = p.act(n, f, 0.1f), d_gate_up = p.empty(act, n, 2 * f),
               q = p.act(n, d), q_out = p.empty(act, n, d), q_norm = p.acc(1, kHead), q_inv = p.empty(acc, n, d / kHead), freq = p.acc(1, kHead / 2),
               position = p.ints(n, [](int64_t i) { return static_cast<int32_t>(i); });
  p.run = [=, &ctx = p.ctx] {
    add_rmsnorm(ctx, {.y = y, .x_out = x_out, .x = x, .delta = delta, .weight = norm, .inv_rms = inv});
    qk_norm_rope(ctx, {q_out, q, q_norm, position, q_inv, {freq, kHead, 1}, kHead});
    swiglu(ctx, {mid, gate_up});
    swiglu_backward(ctx, {d_gate_up, d_mid, gate_up});
    qk_norm_rope_backward(ctx, {.d_x = q_out, .dy = q_out, .x = q, .weight = q_norm, .position = position, .inv_rms = q_inv, .rope = {freq, kHead, 1}, .head_dim = kHead});
    rmsnorm_backward(ctx, {.d_x = delta, .d_weight = d_norm, .dy = dy, .x = x_out, .weight = norm, .inv_rms = inv});
    copy(ctx, {y, x});
  };
}

// A tensor that no cache holds.
void update(Probe& p) {
  constexpr int64_t kRows = 8192, kCols = 2048;
  const DType acc = p.ctx.acc_dtype();
  const Tensor master = p.acc(kRows, kCols), m = p.acc(kRows, kCols, 0.01f), v = p.empty(acc, kRows, kCols), grad = p.acc(kRows, kCols, 0.01f), value = p.empty(p.ctx.act_dtype(), kRows, kCols),
               scalars = p.empty(acc, 1, kNumStepScalars), sum = p.empty(acc, 1, 1);
  fill(p.ctx, {v, 1e-4}), fill(p.ctx, {scalars, 1e-3});
  p.run = [=, &ctx = p.ctx] {
    sum_squares(ctx, {sum, grad});
    adamw(ctx, {master, m, v, grad, value, scalars});
  };
}

void muon_step(Probe& p) {
  constexpr int64_t kRows = 768, kCols = 1536;
  const Tensor master = p.acc(kRows, kCols), buf = p.acc(kRows, kCols, 0.01f), grad = p.acc(kRows, kCols, 0.01f), value = p.empty(p.ctx.act_dtype(), kRows, kCols),
               scalars = p.empty(p.ctx.acc_dtype(), 1, kNumStepScalars), work = p.empty(DType::u8, 1, muon_work(p.ctx, kRows, kCols));
  fill(p.ctx, {scalars, 1e-3});
  p.run = [=, &ctx = p.ctx] { muon(ctx, {master, buf, grad, value, scalars, work, muon_size(kRows, kCols)}); };
}

// Weights are packed after the optimizer has been through all of memory: none is in a cache.
void pack(Probe& p) {
  Weight* w = p.weight(16384, 1024);
  p.run = [&ctx = p.ctx, w] { refresh(ctx, {w}); };
}

void upload(Probe& p) {
  constexpr int64_t n = 1024, width = 6144;
  auto host = std::make_shared<std::vector<bf16>>(static_cast<size_t>(n * width), to_bf16(0.5f));
  const Tensor to = p.empty(p.ctx.act_dtype(), n, width);
  p.run = [&ctx = p.ctx, host, to] { ctx.device().upload(Queue::compute, to, {host->data(), DType::bf16, n, width, width}); };
}

constexpr double kSeconds = 0.06;
constexpr int kRepeats = 3;

struct Kind {
  Work work;
  bool by_bytes;
  std::function<void(Probe&)> make;
};
const std::vector<Kind>& kinds() {
  static const std::vector<Kind> all = {{Work::product, false, products},
                                        {Work::gradient_product, false, gradient_products},
                                        {Work::attention, false, [](Probe& p) { attention(p, false); }},
                                        {Work::attention_backward, false, [](Probe& p) { attention(p, true); }},
                                        {Work::logits, false, logits},
                                        {Work::rows, true, rows},
                                        {Work::update, true, update},
                                        {Work::muon, false, muon_step},
                                        {Work::pack, true, pack},
                                        {Work::upload, true, upload}};
  return all;
}

}  // namespace

const char* work_name(Work work) {
  constexpr const char* names[kWorks] = {"products", "weight gradients", "attention", "attention backward", "logit sweeps", "rows", "update", "muon", "packing", "upload"};
  return names[static_cast<size_t>(work)];
}

std::vector<WorkRate> measure_work(Backend& backend, Precision precision) {
  BackendOptions options;
  options.device = "plan", options.precision = precision;
  std::vector<WorkRate> rates;
  for (const Kind& kind : kinds()) {
    const auto planner = make_plan_backend(options);
    double work = 0;
    {
      Probe planned(planner->context());
      kind.make(planned);
      planner->reset_counts();
      planned.run();
      for (const PlanEntry& e : planner->entries())
        if (e.work == kind.work) work += kind.by_bytes ? e.counts.bytes() : e.counts.flops;
    }
    Probe probe(backend.context());
    kind.make(probe);
    WorkRate r{kind.work, kind.by_bytes, 0, {}};
    backend.choose_kernels(probe.run);
    const double off = probe.without ? median(times(backend.context(), probe.without, kSeconds, kRepeats)) : 0;
    for (double s : times(backend.context(), probe.run, kSeconds, kRepeats)) r.samples.push_back(work / std::max(s - off, 0.1 * s));
    r.rate = median(r.samples);
    rates.push_back(std::move(r));
  }
  return rates;
}

Machine measure_machine(const CommonOptions& options) {
  DS_REQUIRE(options.precision != "fp64", "--machine this measures a device that computes in bf16 or fp32, not fp64");
  return measure_machine(*make_job_backend(options), options);
}

Machine measure_machine(Backend& backend, const CommonOptions& options) {
  Machine m;
  m.name = "this";
  m.measured = true;
  m.packs = is_cpu(backend);
  m.memory_bytes = static_cast<double>(backend.context().device().memory_bytes());
  double memory = 0;
  std::string said;
  for (const WorkRate& r : measure_work(backend, parse_precision(options.precision))) {
    if (r.work == Work::pack && !m.packs) continue;
    Rate& rate = m.of(r.work);
    (r.by_bytes ? rate.bytes : rate.flops) = r.rate;
    if (r.work == Work::update) memory = r.rate;
    said += fmt::format("{}{} {:.1f} {}", said.empty() ? "" : ", ", work_name(r.work), r.rate * 1e-9, r.by_bytes ? "GB/s" : "GFLOP/s");
  }
  for (Work w : {Work::product, Work::gradient_product, Work::attention, Work::attention_backward, Work::muon}) m.of(w).bytes = memory;
  m.peaks = is_cpu(backend) ? fmt::format("{}, {}; {}", model::cpu::cpu_model_name(), backend.describe(), format_bytes(m.memory_bytes)) : backend.describe();
  m.assumptions = "measured now: " + said;
  return m;
}

}  // namespace dspark::job
