// A plan for people, and as one JSON object.
#include <nlohmann/json.hpp>

#include "core/log.h"
#include "job/plan.h"

namespace dspark::job {

using namespace model;

namespace {

// "183.4 T", "12.0 G": FLOPs and bytes a second are decimal.
std::string si(double v) {
  constexpr const char* units[] = {"", "k", "M", "G", "T", "P", "E"};
  int u = 0;
  while (v >= 1000 && u < 6) v /= 1000, ++u;
  return fmt::format("{:.{}f} {}", v, v < 100 ? 1 : 0, units[u]);
}
std::string gib(int64_t bytes) { return format_bytes(static_cast<double>(bytes)); }
std::string time(double s) { return s < 1e-4 ? fmt::format("{:.1f} us", 1e6 * s) : s < 1 ? fmt::format("{:.{}f} ms", 1e3 * s, s < 0.1 ? 1 : 0) : s < 600 ? fmt::format("{:.3g} s", s) : format_seconds(s); }

std::string part_line(const std::string& name, const PlanCounts& c, double seconds, const std::string& limit) {
  return fmt::format("  {:<32} {:>12} {:>10} {:>10} {:>10}  {}\n", name, si(c.flops) + "FLOP", si(c.bytes_read) + "B", si(c.bytes_written) + "B", time(seconds), limit);
}

double forward_backward_flops(const Plan& plan) { return total_counts(plan.micro_step).flops; }

struct Pace {
  double steps_per_s, tokens_per_s, raw, stored, seconds;  // bytes a second; seconds of the whole run
};
Pace pace(const Plan& plan, const PlanInput& in) {
  return {1 / plan.step, plan.tokens_per_step / plan.step, plan.store_bytes_per_step / plan.step, plan.store_bytes_per_step / plan.step / in.codec_ratio,
          static_cast<double>(in.steps) * plan.step};
}

std::string memory_text(const Plan& plan, const PlanOptions& options, const Machine& machine) {
  std::string text = fmt::format("\nmemory of a rank ({} {})\n", options.ranks, options.ranks == 1 ? "rank" : fmt::format("ranks, ZeRO-1 in groups of {}", plan.group_ranks));
  const auto line = [&](const char* name, const std::string& value, const char* note = "") { text += fmt::format("  {:<34} {:>12}{}\n", name, value, note); };
  line("weights", gib(plan.weight_bytes));
  if (plan.packed_bytes > 0) line("packed copies of weights", gib(plan.packed_bytes));
  line("gradients, fp32", gib(plan.gradient_bytes));
  line("arena of the largest row", gib(plan.arena_bytes));
  line("batch staging on the host", gib(plan.staging_bytes), plan.staging_counts ? "" : "  (not in the device's memory)");
  const auto& full = plan.fullest();
  if (plan.ranks.size() == 1) {
    line("masters, fp32", gib(full.master_bytes));
    line("optimizer states", gib(full.state_bytes));
    if (full.work_bytes > 0) line("Muon's work", gib(full.work_bytes));
  } else {
    text += "  at the owner only       tensors     masters      states        work      update       total\n";
    for (size_t r = 0; r < plan.ranks.size(); ++r) {
      const auto& s = plan.ranks[r];
      text += fmt::format("    rank {:<4} {:>22} {:>11} {:>11} {:>11} {:>11} {:>11}\n", r, s.tensors, gib(s.master_bytes), gib(s.state_bytes), gib(s.work_bytes), time(s.seconds), gib(s.bytes));
    }
    text += fmt::format("  owners by the optimizer's FLOPs: largest share {:.2f} of the mean\n", plan.imbalance);
  }
  line(plan.ranks.size() == 1 ? "total" : "total of the fullest rank", gib(full.bytes));
  const auto memory = static_cast<int64_t>(machine.memory_bytes);
  text += plan.fits(machine) ? fmt::format("  fits: {} has {}\n", machine.name, gib(memory))
                             : fmt::format("  DOES NOT FIT: needs {} of {}'s {}; fewer --row-tokens, --anchors or --chunk-slots take a smaller arena, more --ranks share masters and states\n",
                                           gib(full.bytes), machine.name, gib(memory));
  return text;
}

std::string work_text(const Plan& plan, const PlanInput& in, const Machine& machine) {
  std::string text = fmt::format("\n{:<34} {:>12} {:>10} {:>10} {:>10}  limit\n", fmt::format("work of a row of {} tokens", in.rows.front().n_context), "", "read", "written", "time");
  for (const PartCost& p : plan.micro_step) {
    const bool beside = p.part == Part::upload && !machine.packs;  // comes in while the row before is at work
    text += part_line(fmt::format("{}{}", part_name(p.part), p.backward ? ", backward" : beside ? ", beside the row before" : ""), p.counts, p.seconds, p.limit);
  }
  text += part_line("forward and backward", total_counts(plan.micro_step), plan.forward_backward / plan.micro_steps, total_limit(plan.micro_step));
  text += part_line(fmt::format("{}, all tensors", in.optimizer.muon ? "Muon and AdamW" : "AdamW"), total_counts(plan.update), total_seconds(plan.update), total_limit(plan.update));
  return text;
}

std::string network_text(const Plan& plan, const PlanOptions& options) {
  if (options.ranks == 1) return "";
  const auto seconds = [](double bytes, double rate) { return rate > 0 ? fmt::format("{} at {}B/s", time(bytes / rate), si(rate)) : std::string("time not known: this machine names no link for so many ranks, it is not counted"); };
  return fmt::format("\nnetwork, sent by a rank a step\n  gradients to their owners, {:<7} {:>9}B  {}\n  weights from their owners, bf16    {:>9}B  {}\n", options.grad_wire, si(plan.reduce_bytes),
                     seconds(plan.reduce_bytes, plan.reduce_rate), si(plan.gather_bytes), seconds(plan.gather_bytes, plan.gather_rate));
}

}  // namespace

std::string plan_text(const Plan& plan, const PlanInput& in, const PlanOptions& options, const Machine& machine) {
  const DrafterConfig& c = in.config;
  std::string text = fmt::format("{} on {}: {} layers, width {}, block {}, rank {}; {:g} rows a step, {}\n  {}\n  {}\n", in.name, machine.name, c.n_layers(), c.hidden, c.block, c.rank,
                                 in.rows_per_step, in.optimizer.muon ? "muon" : "adamw", machine.peaks, machine.assumptions);
  text += fmt::format("\n{:<25} {:>20} {:>20}\n", "parameters", "total", "trained");
  for (const auto& g : plan.groups) text += fmt::format("  {:<23} {:>20} {:>20}\n", g.name, g.total, g.trainable);
  text += fmt::format("  {:<23} {:>20} {:>20}\n", "all", plan.parameters, plan.trainable);
  text += memory_text(plan, options, machine) + work_text(plan, in, machine) + network_text(plan, options);
  const double all = plan.step, flops = forward_backward_flops(plan) * plan.micro_steps;
  const Pace p = pace(plan, in);
  text += fmt::format("\nstep: {} = {:g} x forward and backward {}{}{} + optimizer {}{}; the {} binds\n", time(all), plan.micro_steps, time(plan.forward_backward / plan.micro_steps),
                      plan.reduce > 0 ? " + reduce beyond the backward " : "", plan.reduce > 0 ? time(plan.reduce) : "", time(plan.optimizer), plan.gather > 0 ? " + gather beyond the update " + time(plan.gather) : "",
                      plan.limit == "matrix" ? "matrix rate" : plan.limit == "memory" ? "memory rate" : plan.limit == "host" ? "host link" : plan.limit);
  text += fmt::format("pace: {:.4g} tokens/s, {:.3g} million tokens/day; {}FLOP/s of a rank in forward and backward over the step\n", p.tokens_per_s, p.tokens_per_s * 86400e-6, si(flops / all));
  text += fmt::format("store or stream: {}B/s of states in bf16, {}B/s as stored (ratio {:.2f}, {}); {} and {} a rank\n", si(p.raw), si(p.stored), in.codec_ratio, in.codec,
                      si(p.raw / static_cast<double>(options.ranks)) + "B/s", si(p.stored / static_cast<double>(options.ranks)) + "B/s");
  if (in.steps > 0) {
    text += fmt::format("run: {} steps, {:.4g} tokens, {}", in.steps, plan.tokens_per_step * static_cast<double>(in.steps), format_seconds(p.seconds));
    if (options.price > 0)
      text += fmt::format(", {:.2f} at {:g} an hour for each of {} machines", p.seconds / 3600 * options.price * static_cast<double>(options.ranks), options.price, options.ranks);
    text += "\n";
  }
  return text;
}

OrderedJson plan_json(const Plan& plan, const PlanInput& in, const PlanOptions& options, const Machine& machine) {
  auto groups = OrderedJson::array(), ranks = OrderedJson::array(), parts = OrderedJson::array();
  for (const auto& g : plan.groups) groups.push_back({{"name", g.name}, {"total", g.total}, {"trainable", g.trainable}});
  for (const auto& r : plan.ranks)
    ranks.push_back({{"tensors", r.tensors}, {"update_flops", r.flops}, {"update_s", r.seconds}, {"master_bytes", r.master_bytes}, {"state_bytes", r.state_bytes}, {"work_bytes", r.work_bytes}, {"total_bytes", r.bytes}});
  const auto part = [](const std::string& name, bool backward, const PlanCounts& c, double seconds, const std::string& limit) {
    return OrderedJson{{"part", name}, {"backward", backward}, {"flops", c.flops}, {"bytes_read", c.bytes_read}, {"bytes_written", c.bytes_written}, {"seconds", seconds}, {"limit", limit}};
  };
  for (const PartCost& p : plan.micro_step) parts.push_back(part(part_name(p.part), p.backward, p.counts, p.seconds, p.limit));
  const Pace p = pace(plan, in);
  OrderedJson j{{"what", "plan"}, {"name", in.name}};
  j["machine"] = OrderedJson{{"name", machine.name}, {"peaks", machine.peaks}, {"assumptions", machine.assumptions}, {"measured", machine.measured}, {"memory_bytes", machine.memory_bytes}};
  j["parameters"] = OrderedJson{{"total", plan.parameters}, {"trainable", plan.trainable}, {"groups", groups}};
  j["memory"] = OrderedJson{{"weight_bytes", plan.weight_bytes}, {"packed_bytes", plan.packed_bytes}, {"gradient_bytes", plan.gradient_bytes}, {"arena_bytes", plan.arena_bytes},
                            {"staging_bytes", plan.staging_bytes}, {"group_ranks", plan.group_ranks}, {"ranks", ranks}, {"imbalance", plan.imbalance},
                            {"total_bytes", plan.fullest().bytes}, {"fits", plan.fits(machine)}};
  j["row"] = OrderedJson{{"parts", parts}, {"flops", forward_backward_flops(plan)}, {"seconds", plan.forward_backward / plan.micro_steps}};
  j["update"] = part(in.optimizer.muon ? "muon" : "adamw", false, total_counts(plan.update), total_seconds(plan.update), total_limit(plan.update));
  j["network"] = OrderedJson{{"grad_wire", options.grad_wire}, {"reduce_bytes", plan.reduce_bytes}, {"gather_bytes", plan.gather_bytes}, {"reduce_bytes_per_s", plan.reduce_rate}, {"gather_bytes_per_s", plan.gather_rate}};
  j["step"] = OrderedJson{{"seconds", plan.step}, {"rows_a_rank", plan.micro_steps}, {"forward_backward_s", plan.forward_backward}, {"reduce_s", plan.reduce}, {"optimizer_s", plan.optimizer},
                          {"gather_s", plan.gather}, {"limit", plan.limit}, {"tokens", plan.tokens_per_step}};
  j["pace"] = OrderedJson{{"tokens_per_s", p.tokens_per_s}, {"tokens_per_day", p.tokens_per_s * 86400}};
  j["states"] = OrderedJson{{"bytes_per_s", p.raw}, {"stored_bytes_per_s", p.stored}, {"codec_ratio", in.codec_ratio}, {"codec", in.codec}};
  j["ranks"] = options.ranks;
  j["peak_rss_bytes"] = peak_rss_bytes();  // of planning
  if (in.steps > 0) j["run"] = OrderedJson{{"steps", in.steps}, {"tokens", plan.tokens_per_step * static_cast<double>(in.steps)}, {"seconds", p.seconds}};
  if (in.steps > 0 && options.price > 0) j["run"]["cost"] = p.seconds / 3600 * options.price * static_cast<double>(options.ranks);
  return j;
}

}  // namespace dspark::job
