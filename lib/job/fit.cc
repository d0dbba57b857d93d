#include "job/fit.h"

#include <unistd.h>

#include "core/error.h"
#include "core/log.h"
#include "train/checkpoint.h"
#include "train/plan_step.h"

namespace dspark::job {

model::DrafterFiles open_drafter(const fs::path& path) {
  DS_REQUIRE(fs::exists(path / "config.json") || !train::has_checkpoint(path),
             "{} is a run that has not finished, not yet a drafter: start its command again, or take one of its checkpoints in {}", path.string(), (path / "checkpoints").string());
  return model::read_drafter(path);
}

void require_fit(const model::DrafterFiles& d, const target::TargetFiles& files) {
  const auto& c = d.config;
  const auto& t = files.config();
  const std::string where = d.path.string();
  DS_REQUIRE(c.target_hidden == t.hidden, "{}: it reads target states of width {}, {} has {}: it is another target's drafter", where, c.target_hidden, files.name(), t.hidden);
  DS_REQUIRE(c.vocab == t.vocab, "{}: its vocabulary has {} tokens, {}'s {}: it is another target's drafter", where, c.vocab, files.name(), t.vocab);
  DS_REQUIRE(c.taps.back().n < t.layers, "{}: it taps the state after {} layers, {} has {}: it is another target's drafter", where, c.taps.back().n, files.name(), t.layers);
  DS_REQUIRE(c.tokenizer_hash.empty() || c.tokenizer_hash == files.tokenizer().identity(), "{}: it was trained with another tokenizer ({}) than {}'s ({})", where,
             c.tokenizer_hash.substr(0, 12), files.name(), files.tokenizer().identity().substr(0, 12));
  if (!c.target_id.empty() && c.target_id != files.id())
    log_warn("{} was trained on the states of {} with other weights or settings ({}, {}) than this {} ({}, {}): fewer of its tokens may be accepted", where, c.target_name, c.trained_on,
             c.target_id.substr(0, 12), files.name(), files.quantisation(), files.id().substr(0, 12));
}

void require_heads(const model::Backend& backend, int64_t head_dim, const std::string& whose) {
  DS_REQUIRE(head_dim <= backend.most_head_dim(), "{} has attention heads of {} columns, {} can do up to {}; use --device cpu", whose, head_dim, backend.describe(), backend.most_head_dim());
}

void require_memory(const model::DrafterConfig& config, model::Precision precision, const train::OptimizerOptions& optimizer) {
  double bytes = 0, parameters = 0;
  for (const train::TensorPlan& t : train::plan_update(config, precision, optimizer).tensors) {
    bytes += static_cast<double>(t.value_bytes + t.master_bytes + t.grad_bytes + t.state_bytes);
    parameters += static_cast<double>(t.size);
  }
  const double memory = static_cast<double>(::sysconf(_SC_PHYS_PAGES)) * static_cast<double>(::sysconf(_SC_PAGESIZE));
  DS_REQUIRE(bytes <= memory, "a drafter of {:.0f} parameters needs {} for its weights, gradients and optimizer states, this machine has {}; take fewer --layers, a narrower --hidden or a smaller --rank ('dspark train --plan' shows what takes how much)",
             parameters, format_bytes(bytes), format_bytes(memory));
}

}  // namespace dspark::job
