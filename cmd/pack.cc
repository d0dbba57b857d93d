#include "job/pack.h"

#include "commands.h"

namespace dspark::cmd {

void add_pack(CLI::App& app) {
  auto o = std::make_shared<job::PackOptions>();
  CLI::App* sub = app.add_subcommand("pack", "a drafter for the servers people run, or a look at one");
  sub->add_option("drafter", o->drafter, "drafter folder: speculators or DeepSpec")->type_name("DRAFTER")->required();
  sub->add_option("--to", o->to, "speculators (vLLM) or deepspec")->capture_default_str();
  sub->add_option("--out", o->out, "folder to write")->type_name("PATH");
  sub->add_option("--target", o->target, "puts the target's embeddings into the folder")->type_name("TARGET");
  sub->add_option("--rotary", o->rotary, "how a drafter with partial_rotary_factor was trained: served (that part of a head) or reference (all of it: the factor is dropped)")->type_name("RULE");
  sub->add_flag("--inspect", o->inspect, "what the drafter is, and its tensors");
  sub->add_option("--json", o->json, "machine-readable result into FILE, or - for stdout")->type_name("FILE|-");
  sub->callback([o] { job::run_pack(*o); });
}

}  // namespace dspark::cmd
