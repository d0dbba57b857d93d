#include "job/bench_loss.h"

#include <algorithm>

#include "core/error.h"
#include "job/bench_limit.h"
#include "job/bench_probe.h"
#include "job/common.h"
#include "job/shapes.h"
#include "train/plan_step.h"

namespace dspark::job {

using namespace model;

namespace {

// The loss head's operator as a training step calls it, for one row.
VocabLoss make_loss(Probe& p, const DrafterConfig& c, const BatchPlan& row) {
  const train::Objective objective = train::deepspec_objective(c.confidence);
  const DType acc = p.ctx.acc_dtype();
  const int64_t slots = row.n_slots();
  const auto ints = [&](const std::vector<int32_t>& v) { return p.ints(static_cast<int64_t>(v.size()), [&](int64_t i) { return v[static_cast<size_t>(i)]; }); };
  VocabLoss a;
  const Tensor head = p.act(c.draft_vocab, c.joint_cols(), 0.02f);
  a.head = p.weight(head, true);
  a.target_head = p.weight(c.hidden == c.target_hidden ? head.col_range(0, c.hidden) : p.act(c.draft_vocab, c.target_hidden, 0.02f), false);
  a.joint = p.act(slots, c.joint_cols()), a.target_state = p.act(static_cast<int64_t>(row.target_source.size()), c.target_hidden);
  a.target_row = ints(row.target_row), a.label = ints(row.label);
  a.weight = a.conf_weight = p.empty(acc, 1, slots), a.scale = p.empty(acc, 1, kNumTerms);
  fill(p.ctx, {a.weight, 1}), fill(p.ctx, {a.scale, 1});
  a.coef = objective.coef;
  a.hidden_cols = c.hidden;
  a.chunks = row.chunks;
  a.slot_out = p.empty(acc, slots, kSlotOutCols), a.d_joint = p.empty(acc, slots, c.joint_cols());
  if (c.rank > 0) a.d_head = p.empty(acc, c.draft_vocab, c.rank);
  if (c.confidence) {
    a.conf_w = p.acc(1, c.confidence_cols(), 0.02f), a.conf_b = p.acc(1, 1);
    a.d_conf_w = p.empty(acc, 1, c.confidence_cols()), a.d_conf_b = p.empty(acc, 1, 1);
    if (c.confidence_with_markov && c.rank > 0) a.conf_e = a.joint.col_range(c.hidden, c.rank), a.d_conf_e = a.d_joint.col_range(c.hidden, c.rank);
  }
  a.work = p.empty(DType::u8, 1, vocab_loss_work(p.ctx, row.max_chunk_slots, row.max_chunk_rows, c.draft_vocab, c.joint_cols()));
  return a;
}

}  // namespace

std::vector<BenchResult> bench_loss(const BenchLossOptions& o) {
  const Shape shape = measured_shape(o.shape, o.tokens, o.anchors);
  if (o.precision != "bf16" && o.precision != "fp32") fail_usage("--precision {}: bf16 or fp32", o.precision);
  CommonOptions common;
  common.device = o.device, common.precision = o.precision, common.threads = o.threads, common.cpu_kernel = o.kernel;
  const auto backend = make_job_backend(common);
  const MatrixLimit limit = measure_matrix_limit(*backend, o.kernel, o.threads);
  BackendOptions options;
  options.precision = parse_precision(o.precision);
  std::vector<BenchResult> results;
  for (const int64_t chunk : o.chunk_slots) {
    if (chunk < 1) fail_usage("--chunk-slots {}: at least 1", chunk);
    const BatchPlan row = train::full_row(shape.config, shape.row_tokens, shape.anchors, chunk);
    const auto planner = make_plan_backend(options);
    Probe planned(planner->context());
    const VocabLoss counted = make_loss(planned, shape.config, row);
    planner->reset_counts();
    vocab_loss(planner->context(), counted);
    double products = 0;
    for (const PlanEntry& e : planner->entries()) products += e.work == Work::logits ? 0 : e.counts.flops;

    Probe probe(backend->context());
    const VocabLoss a = make_loss(probe, shape.config, row);
    BenchResult r;
    r.what = fmt::format("loss {} {} {} slots, chunk {}", o.shape, o.precision, row.n_slots(), chunk);
    r.unit = "GFLOP/s";
    r.kernel = backend->kernel();
    r.device = device_text(*backend, o.threads);
    r.limit = limit.flops * 1e-9;
    r.memory_bytes = a.work.size();
    backend->choose_kernels([&] { vocab_loss(probe.ctx, a); });
    for (double s : times(backend->context(), [&] { vocab_loss(probe.ctx, a); }, 0, o.repeats)) r.samples.push_back(products / s * 1e-9);
    r.value = median(r.samples);
    r.share_of_limit = r.value / r.limit;
    results.push_back(std::move(r));
  }
  return results;
}

}  // namespace dspark::job
