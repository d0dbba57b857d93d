#include "job/plan.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/log.h"
#include "train/shards.h"

namespace dspark::job {

using namespace model;

namespace {

constexpr size_t kMostRowsPlanned = 16;  // the mean of more says no more

// The mean micro-step.
std::vector<PlanEntry> mean_entries(const PlanInput& in) {
  std::vector<PlanEntry> all;
  const size_t n = std::min(in.rows.size(), kMostRowsPlanned);
  for (size_t i = 0; i < n; ++i)
    for (PlanEntry e : train::plan_step(in.config, in.objective, in.apply_norm, in.precision, in.rows[i]).entries) {
      const auto share = 1.0 / static_cast<double>(n);
      e.counts.flops *= share, e.counts.bytes_read *= share, e.counts.bytes_written *= share;
      all.push_back(e);
    }
  return all;
}

double mean_tokens(const PlanInput& in) {
  double sum = 0;
  for (const BatchPlan& row : in.rows) sum += static_cast<double>(row.n_context);
  return sum / static_cast<double>(in.rows.size());
}

void share_among_ranks(const train::UpdatePlan& update, const PlanOptions& options, const Machine& machine, Plan& plan) {
  std::vector<const train::TensorPlan*> trained;
  std::vector<double> costs;
  for (const auto& t : update.tensors)
    if (t.trainable) trained.push_back(&t), costs.push_back(t.update_flops());
  plan.group_ranks = train::shard_group_ranks(options.ranks);
  const std::vector<int> owners = train::assign_owners(costs, plan.group_ranks);
  plan.imbalance = train::imbalance(costs, owners, plan.group_ranks);
  plan.ranks.assign(static_cast<size_t>(plan.group_ranks), {});
  std::vector<std::vector<PlanEntry>> work(plan.ranks.size(), update.everywhere);
  std::vector<PlanEntry> all = update.everywhere;
  for (size_t i = 0; i < trained.size(); ++i) {
    const train::TensorPlan& t = *trained[i];
    Plan::RankShare& r = plan.ranks[static_cast<size_t>(owners[i])];
    ++r.tensors;
    r.flops += costs[i];
    r.owned_bytes += t.grad_bytes, r.master_bytes += t.master_bytes, r.state_bytes += t.state_bytes;
    r.work_bytes = std::max(r.work_bytes, t.work_bytes);
    auto& mine = work[static_cast<size_t>(owners[i])];
    mine.insert(mine.end(), t.update.begin(), t.update.end());
    all.insert(all.end(), t.update.begin(), t.update.end());
  }
  plan.update = predict(all, machine);
  for (size_t r = 0; r < plan.ranks.size(); ++r) plan.ranks[r].seconds = total_seconds(predict(work[r], machine));
}

// Reduce to the owner within a shard group, all-reduce of what one owns across groups, gather in the group; rings throughout.
void plan_network(const train::UpdatePlan& update, const PlanOptions& options, const Machine& machine, Plan& plan, double backward) {
  double grads = 0, values = 0, least_owned = 1e300, most_owned = 0;
  const double wire = options.grad_wire == "bf16" ? 0.5 : 1;
  for (const auto& t : update.tensors)
    if (t.trainable) grads += static_cast<double>(t.grad_bytes) * wire, values += static_cast<double>(t.value_bytes);
  for (const auto& r : plan.ranks) {
    least_owned = std::min(least_owned, static_cast<double>(r.owned_bytes) * wire);
    most_owned = std::max(most_owned, static_cast<double>(r.owned_bytes) * wire);
  }
  const auto in_group = static_cast<double>(plan.group_ranks), groups = static_cast<double>(options.ranks / plan.group_ranks);
  const double to_owner = in_group > 1 ? grads - least_owned : 0, across = groups > 1 ? 2 * (groups - 1) / groups * most_owned : 0;
  plan.reduce_bytes = to_owner + across;
  plan.gather_bytes = in_group > 1 ? values * (in_group - 1) / in_group : 0;
  const auto rate = [&](int64_t ranks) { return ranks <= machine.link_ranks ? machine.link_bytes : machine.network_bytes; };
  const double inner = rate(plan.group_ranks), outer = rate(options.ranks);
  plan.gather_rate = inner;
  if (plan.gather_bytes > 0 && inner > 0) plan.gather = std::max(0.0, plan.gather_bytes / inner - plan.optimizer);
  const bool known = (to_owner == 0 || inner > 0) && (across == 0 || outer > 0);
  if (plan.reduce_bytes > 0 && known) {
    const double seconds = (to_owner > 0 ? to_owner / inner : 0) + (across > 0 ? across / outer : 0);
    plan.reduce_rate = plan.reduce_bytes / seconds;
    plan.reduce = std::max(0.0, seconds - backward);
  }
}

// Of a row's upload, what its work has to wait for: where the device has a queue for copies, the next row comes in meanwhile.
double exposed_upload(const Plan& plan, const Machine& machine) {
  double upload = 0, rest = 0;
  for (const PartCost& p : plan.micro_step) (p.part == Part::upload ? upload : rest) += p.seconds;
  return machine.packs ? upload : std::max(0.0, upload - rest);
}

std::string find_limit(const Plan& plan, const Machine& machine) {
  std::map<std::string, double> seconds;
  for (const PartCost& p : plan.micro_step) seconds[p.limit] += plan.micro_steps * (p.part == Part::upload ? exposed_upload(plan, machine) : p.seconds);
  seconds[total_limit(plan.update)] += plan.optimizer;
  seconds["network"] += plan.reduce + plan.gather;
  return std::max_element(seconds.begin(), seconds.end(), [](const auto& a, const auto& b) { return a.second < b.second; })->first;
}

}  // namespace

std::string tensor_group(const std::string& name) {
  const auto has = [&](const char* part) { return name.find(part) != std::string::npos; };
  if (has("embed_tokens")) return "embed_tokens";
  if (has("lm_head")) return "lm_head";
  if (has("markov_head")) return "markov";
  if (has("confidence_head")) return "confidence";
  if (has("norm")) return "norms";
  if (has("self_attn")) return "attention";
  if (has("mlp")) return "mlp";
  return "fc";
}

const Plan::RankShare& Plan::fullest() const {
  return *std::max_element(ranks.begin(), ranks.end(), [](const auto& a, const auto& b) { return a.bytes < b.bytes; });
}

Plan make_plan(const PlanInput& in, const PlanOptions& options, const Machine& machine) {
  Plan plan;
  const train::UpdatePlan update = train::plan_update(in.config, in.precision, in.optimizer);
  for (const char* name : {"embed_tokens", "lm_head", "fc", "attention", "mlp", "norms", "markov", "confidence"}) plan.groups.push_back({name, 0, 0});
  for (const auto& t : update.tensors) {
    auto& group = *std::find_if(plan.groups.begin(), plan.groups.end(), [&](const auto& g) { return g.name == tensor_group(t.name); });
    group.total += t.size, plan.parameters += t.size;
    group.trainable += t.trainable ? t.size : 0, plan.trainable += t.trainable ? t.size : 0;
    plan.weight_bytes += t.value_bytes;
    plan.gradient_bytes += t.grad_bytes;
  }
  const train::StepPlan largest = train::plan_step(in.config, in.objective, in.apply_norm, in.precision, in.largest);
  plan.arena_bytes = largest.memory.total();
  const int64_t act = in.precision == Precision::bf16 ? 2 : 4;
  if (in.config.hidden != in.config.target_hidden) plan.weight_bytes += act * in.config.draft_vocab * in.config.target_hidden;  // the target's own head
  if (machine.packs) plan.packed_bytes = largest.packed_bytes;

  plan.micro_step = predict(mean_entries(in), machine);
  plan.micro_steps = std::ceil(in.rows_per_step / static_cast<double>(options.ranks));
  const double row_bytes = mean_tokens(in) * static_cast<double>((in.config.n_taps() + 1) * in.config.target_hidden * 2);
  // A step's states on the host: one being read, one being trained on, and one whose results are still awaited.
  plan.staging_bytes = static_cast<int64_t>(3 * plan.micro_steps * row_bytes);
  plan.staging_counts = machine.packs;

  share_among_ranks(update, options, machine, plan);
  for (Plan::RankShare& r : plan.ranks) {
    r.bytes = plan.weight_bytes + plan.packed_bytes + plan.gradient_bytes + plan.arena_bytes + r.master_bytes + r.state_bytes + r.work_bytes +
              (plan.staging_counts ? plan.staging_bytes : 0);
    plan.optimizer = std::max(plan.optimizer, r.seconds);
  }
  double backward = 0;
  for (const PartCost& p : plan.micro_step) {
    backward += p.backward ? p.seconds : 0;
    plan.forward_backward += plan.micro_steps * (p.part == Part::upload ? exposed_upload(plan, machine) : p.seconds);
  }
  plan_network(update, options, machine, plan, backward);
  plan.step = plan.forward_backward + plan.reduce + plan.optimizer + plan.gather;
  plan.limit = find_limit(plan, machine);
  plan.tokens_per_step = in.rows_per_step * mean_tokens(in);
  plan.store_bytes_per_step = in.rows_per_step * row_bytes;
  return plan;
}

}  // namespace dspark::job
